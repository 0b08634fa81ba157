"""The definition of sampling, in NumPy, by sorting: a token chosen from a row of logits.

`sampling_record` has the parameters and the arithmetic; `kukri.sampling` says what the stages mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import ShapeError
from kukri.kernels import sampling_stages as stages
from kukri.kernels.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from kukri.kernels.backend import Logits, SamplingBackend
from kukri.kernels.sampling_record import (
    CHOSEN,
    LN_2,
    LOG2_E,
    MAX_SCALE,
    MIN_DEPTH,
    MIN_SCALE,
    MIROSTAT_TOKENS,
    NONE_ALLOWED,
    NOT_FINITE,
    POWER_TERMS,
    RECORD,
    WEIGHT_BITS,
    WEIGHT_ONE,
    SamplingRecords,
    exp_of,
    f32,
    log_of,
)


class ReferenceSampling(SamplingBackend):
    """Sampling (`kukri.kernels.backend.SamplingBackend`) in NumPy."""

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        rows = logits.numpy()
        if rows.dtype != np.float32:
            raise ShapeError(f"logits must be float32, not {rows.dtype}")
        for i, row in enumerate(records.fields["row"]):
            choose(records, i, rows[row])


class Record:
    """One record for reading: its fields as attributes of Python's types, and its tables."""

    def __init__(self, records: SamplingRecords, i: int) -> None:
        fields = records.fields[i]
        for name in RECORD.names or ():
            setattr(self, name, fields[name].tolist())
        self._records, self._i = records, i

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # declared for type checkers: fields are set from RECORD

    def table(self, name: str) -> list[npt.NDArray[Any]]:
        """The arrays of a table."""
        return self._records.table(self._i, name)


def choose(records: SamplingRecords, i: int, row: FloatArray) -> None:
    """Chooses a token for one row, which is not written, and fills in the results of record i."""
    results, record = records.fields[i], Record(records, i)
    peak = float(row.max())
    results["peak"] = peak
    results["status"] = _status(peak)
    if not math.isfinite(peak):
        return
    if record.has_logprobs:
        results["sum_exp"], results["n_top_found"] = report_top(record, row)
    if record.is_given:
        return
    candidates = Candidates(row)
    edit_row(candidates, record)
    run_stages(candidates, record)
    if not math.isfinite(candidates.peak):
        results["peak"] = candidates.peak
        results["status"] = _status(candidates.peak)
    elif record.is_greedy:
        results["token"] = candidates.ids[candidates.logits.argmax()]
    else:
        results["token"], results["probability"] = draw(candidates, record.u)


def _status(peak: float) -> int:
    """The status of a row whose largest logit is `peak`."""
    if math.isfinite(peak):
        return CHOSEN
    return NONE_ALLOWED if peak == -math.inf else NOT_FINITE


def run_stages(candidates: Candidates, record: Record) -> None:
    """Runs the stages of a record, in its order."""
    for stage in record.stages:
        if stage == stages.END or not math.isfinite(candidates.peak):
            break
        if not record.is_greedy or stage in stages.EDITS:
            RUN[stage](candidates, record)


class Candidates:
    """The tokens in play: `ids` ascending, with their `logits`; a stage removes some, or edits them.

    Until a stage has filtered, all tokens are there, and forbidden tokens have -inf.
    """

    def __init__(self, row: FloatArray) -> None:
        self.ids = np.arange(len(row))
        self.logits = row.copy()
        self.scale = 1.0
        self.is_whole = True

    @property
    def peak(self) -> float:
        """The largest logit."""
        return float(self.logits.max())

    def depths(self) -> FloatArray:
        """float32 [n]: the binary logarithm of each candidate's odds against the likeliest."""
        with np.errstate(over="ignore"):
            return (self.logits - np.float32(self.peak)) * np.float32(self.scale * LOG2_E)

    def weights(self) -> DoubleArray:
        """float64 [n]: the weights of all, see `weights_of`."""
        return weights_of(self.depths())

    def keep(self, kept: BoolArray) -> None:
        """Narrows the candidates to those that `kept` marks and that may come."""
        kept = kept & (self.logits > -np.inf)
        self.ids, self.logits, self.is_whole = self.ids[kept], self.logits[kept], False

    def keep_most(self, keys: DoubleArray | FloatArray, weights: DoubleArray, target: float) -> None:
        """Narrows to the fewest of the largest keys, of equals the lowest ids, that weigh `target`."""
        order = np.argsort(-keys, kind="stable")
        n = int(np.searchsorted(np.cumsum(weights[order]), max(target, 1.0))) + 1
        kept = np.zeros(len(order), np.bool_)
        kept[order[:n]] = True
        self.keep(kept)

    def edit(self, ids: IntArray, change: Callable[[DoubleArray], DoubleArray]) -> None:
        """Changes the logits of those of `ids`, each named once, that are candidates."""
        places = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        is_there = self.ids[places] == ids
        logits = np.zeros(len(ids), np.float64)
        logits[is_there] = self.logits[places[is_there]]
        with np.errstate(over="ignore"):
            self.logits[places[is_there]] = change(logits)[is_there].astype(np.float32)


def weights_of(depths: FloatArray) -> DoubleArray:
    """2^depth in units of 1 / WEIGHT_ONE, whole numbers."""
    t = np.maximum(depths, np.float32(MIN_DEPTH))
    n = np.rint(t)
    f = t - n
    p = np.full_like(f, POWER_TERMS[0])
    for term in POWER_TERMS[1:]:
        p = p * f + np.float32(term)
    p = p * f + np.float32(1.0)
    weights: DoubleArray = np.rint(np.ldexp(p, n.astype(np.int32) + WEIGHT_BITS)).astype(np.float64)
    return weights


def lane_sum(values: DoubleArray) -> float:
    """The sum in the order that `kukri.kernels.sampling_record` defines."""
    padded = np.zeros(-(-len(values) // 16) * 16)
    padded[: len(values)] = values
    lanes = np.cumsum(padded.reshape(-1, 16), axis=0)[-1]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def edit_row(candidates: Candidates, record: Record) -> None:
    """Adds the bias and forbids tokens, before all stages."""
    if record.n_bias:
        values, ids = record.table("bias")
        candidates.edit(ids, lambda logits: logits + values)
    if record.n_allowed:
        bits = np.unpackbits(record.table("allowed")[0].view(np.uint8), bitorder="little")
        candidates.logits[bits[: len(candidates.logits)] == 0] = -np.inf
    if record.n_forbidden:
        candidates.logits[record.table("forbidden")[0]] = -np.inf


def penalties(candidates: Candidates, record: Record) -> None:
    """Repetition (Keskar et al. 2019), presence and frequency."""
    if not record.n_seen:
        return
    ids, counts, generated = record.table("seen")
    scale = candidates.scale

    def change(logits: DoubleArray) -> DoubleArray:
        x = logits * scale
        # they divide; below 0 dividing would reward, so transformers multiplies there
        repeated = np.where(x > 0, x / record.repetition_penalty, x * record.repetition_penalty)
        x = np.where(counts > 0, repeated, x)
        x = x - np.where(generated > 0, record.presence_penalty, 0.0)
        return np.asarray((x - record.frequency_penalty * generated) / scale)

    candidates.edit(ids, change)


def dry(candidates: Candidates, record: Record) -> None:
    """Takes DRY's penalties from tokens that would continue a repetition (p-e-w 2024)."""
    if record.n_dry:
        values, ids = record.table("dry")
        candidates.edit(ids, lambda logits: logits - values / candidates.scale)


def top_n_sigma(candidates: Candidates, record: Record) -> None:
    """Keeps logits within n standard deviations of the largest (Tang et al. 2024)."""
    is_in = candidates.logits > -np.inf
    with np.errstate(over="ignore"):
        below = np.asarray(candidates.logits - np.float32(candidates.peak))
    below = np.maximum(below, f32(-math.inf))
    distances = np.where(is_in, below, np.float32(0.0)).astype(np.float64)
    n = float(np.count_nonzero(is_in))
    mean = lane_sum(distances) / n
    deviation = math.sqrt(max(lane_sum(distances * distances) / n - mean * mean, 0.0))
    candidates.keep(candidates.logits >= f32(candidates.peak - record.top_n_sigma * deviation))


def top_k(candidates: Candidates, record: Record) -> None:
    """Keeps the k largest logits."""
    candidates.keep_most(candidates.logits, np.ones(len(candidates.ids)), record.top_k)


def typical_p(candidates: Candidates, record: Record) -> None:
    """Keeps the tokens whose surprise is nearest to the expected one (Meister et al. 2022)."""
    depths, weights = candidates.depths(), candidates.weights()
    total = float(weights.sum())
    mean = expected_depth(depths, weights)
    distances = np.abs(depths.astype(np.float64) - mean).astype(np.float32)
    candidates.keep_most(-distances, weights, record.typical_p * total)


def top_p(candidates: Candidates, record: Record) -> None:
    """Keeps the fewest, likeliest tokens that have a share p of the probability (Holtzman et al. 2020)."""
    weights = candidates.weights()
    candidates.keep_most(candidates.logits, weights, record.top_p * float(weights.sum()))


def min_p(candidates: Candidates, record: Record) -> None:
    """Keeps the tokens at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    candidates.keep(candidates.logits >= f32(candidates.peak + record.min_p_depth / candidates.scale))


def xtc(candidates: Candidates, record: Record) -> None:
    """Removes all tokens of at least the threshold's probability but the least likely (p-e-w 2024)."""
    if not record.xtc_applies:
        return
    weights = candidates.weights()
    choices = np.flatnonzero(weights >= max(record.xtc_threshold * float(weights.sum()), 1.0))
    if len(choices) < 2:
        return
    least = choices[::-1][np.argmin(candidates.logits[choices][::-1])]  # the highest id of equals
    candidates.logits[choices[choices != least]] = -np.inf
    if not candidates.is_whole:
        candidates.keep(candidates.logits > -np.inf)


def temperature(candidates: Candidates, record: Record) -> None:
    """Divides the logits; with a range, by more the flatter they are (llama.cpp's dynatemp)."""
    value = record.temperature
    n = float(np.count_nonzero(candidates.logits > -np.inf))
    if record.temperature_range > 0.0:
        if n < 2.0:
            return
        low, high = max(value - record.temperature_range, 0.0), value + record.temperature_range
        weights = candidates.weights()
        total = float(weights.sum())
        entropy = log_of(total / WEIGHT_ONE) * LOG2_E - expected_depth(candidates.depths(), weights)
        share = entropy / (log_of(n) * LOG2_E)
        power = exp_of(record.temperature_exponent * log_of(share)) if share > 1e-9 else 0.0
        value = low + (high - low) * (power if record.temperature_exponent > 0.0 else 1.0)
    candidates.scale = min(max(candidates.scale / max(value, 1e-9), MIN_SCALE), MAX_SCALE)


def mirostat_1(candidates: Candidates, record: Record) -> None:
    """Keeps the `mirostat_k` most likely tokens, for a surprise of mu by a Zipf law (Basu et al. 2021)."""
    depths = -np.sort(-candidates.depths().astype(np.float64))[:MIROSTAT_TOKENS]
    depths = depths[depths > -np.inf]
    n = float(np.count_nonzero(candidates.logits > -np.inf))
    candidates.keep_most(
        candidates.logits, np.ones(len(candidates.ids)), mirostat_k(depths.tolist(), n, record.surprise_power)
    )


def mirostat_k(depths: Sequence[float], n: float, surprise_power: float) -> float:
    """The number of tokens to keep of a row of `n`, by its largest depths in descending order."""
    products = squares = 0.0
    for i in range(len(depths) - 1):
        ratio = log_of((i + 2.0) / (i + 1.0))
        products += ratio * (depths[i] - depths[i + 1]) * LN_2
        squares += ratio * ratio
    if products <= 0.0 or n < 2.0:
        return 1.0
    exponent = products / squares
    epsilon = exponent - 1.0
    divisor = 1.0 - exp_of(-epsilon * log_of(n))
    if divisor == 0.0 or epsilon * surprise_power / divisor <= 0.0:
        return 1.0
    return float(int(min(max(exp_of(log_of(epsilon * surprise_power / divisor) / exponent), 1.0), n)))


def mirostat_2(candidates: Candidates, record: Record) -> None:
    """Keeps the tokens whose surprise is at most mu; the likeliest in any case (Basu et al. 2021)."""
    weights = candidates.weights()
    kept = weights >= max(float(weights.sum()) / record.surprise_power, 1.0)
    kept[np.argmax(candidates.logits)] = True
    candidates.keep(kept)


def expected_depth(depths: FloatArray, weights: DoubleArray) -> float:
    """The mean depth of a token drawn."""
    limited = np.maximum(depths, np.float32(MIN_DEPTH)).astype(np.float64)
    return lane_sum(weights * limited) / float(weights.sum())


RUN: dict[int, Callable[[Candidates, Record], None]] = {
    stages.PENALTIES: penalties,
    stages.DRY: dry,
    stages.TOP_N_SIGMA: top_n_sigma,
    stages.TOP_K: top_k,
    stages.TYPICAL_P: typical_p,
    stages.TOP_P: top_p,
    stages.MIN_P: min_p,
    stages.XTC: xtc,
    stages.TEMPERATURE: temperature,
    stages.MIROSTAT_1: mirostat_1,
    stages.MIROSTAT_2: mirostat_2,
}


def draw(candidates: Candidates, u: float) -> tuple[int, float]:
    """(token, probability): the token at the point `u` of the weights' sum, in order of id."""
    weights = candidates.weights()
    running = np.cumsum(weights)
    total = float(running[-1])
    place = int(np.searchsorted(running, min(math.floor(u * total), total - 1.0), side="right"))
    return int(candidates.ids[place]), float(weights[place]) / total


def report_top(record: Record, row: FloatArray) -> tuple[float, int]:
    """(sum of exp, entries of the table `top`), with the likeliest tokens in it: of equals the lowest ids."""
    depths = row.astype(np.float64) - float(row.max())
    best = np.argsort(-row, kind="stable")[: record.n_top]
    best = np.sort(best[row[best] > -np.inf])
    ids, logits = record.table("top")
    ids[: len(best)], logits[: len(best)] = best, row[best]
    return float(np.exp(depths).sum()), len(best)
