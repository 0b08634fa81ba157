"""Sampling records: each row's parameters and result, and the arithmetic that all backends share.

A step's records are one structured array of `RECORD`, with one pool for what differs in length: a backend
needs these two and the logits, and copies each once.

The arithmetic is defined so that backends are bit-identical however they order their sums:

- A token's *depth* is t = (logit - peak) * (scale * log2(e)), in float32: its odds are 2^t. The peak is the
  largest logit in play, and the scale 1 after all temperatures so far.
- Its *weight* is 2^t in units of 1 / WEIGHT_ONE, rounded to a whole number, by float32 arithmetic without
  fused operations. Sums of weights are whole numbers below 2^53: exact in float64 in
  any order. So a token some 10^10 times less likely than the likeliest is never drawn.
- Other sums (`lane_sum`) add value i to lane i mod 16, in float64, then the upper half of the lanes to the
  lower until one is left.
- Logarithms and powers are those of `log_of` and `exp_of`, plain float64 operations that kernels compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.kernels.sampling_stages import MAX_STAGES, STAGES

WEIGHT_BITS = 33
WEIGHT_ONE = float(2**WEIGHT_BITS)
MIN_DEPTH = -35.0  # the weight is 0 from there down
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
# 2^f = 1 + f * (these, of f's powers from 4 down to 0) for f from -0.5 to 0.5, within 2e-7 of the value
POWER_TERMS = (
    1.326472614891827e-3, 9.671512991189957e-3, 5.550733581185341e-2, 2.4022242426872253e-1,
    6.931470036506653e-1,
)  # fmt: skip
MAX_VOCAB = 2**20  # the weights of this many tokens add up exactly
MIN_SCALE, MAX_SCALE = 1e-30, 1e6
MIROSTAT_TOKENS = 100  # the likeliest tokens, whose probabilities give mirostat 1 Zipf's exponent

# `status` of a record once its row was sampled
CHOSEN, NOT_FINITE, NONE_ALLOWED = range(3)

RECORD = np.dtype([
    *((name, np.int64) for name in (
        "row",  # the row of the logits
        "is_given",  # 1: `token` is given, and only its log-probability is wanted
        "is_greedy",
        "xtc_applies",  # 1: this time
        # tables: the first word in the pool, and the entries; TABLES has the arrays of each
        "bias", "n_bias",  # added to logits
        "seen", "n_seen",  # tokens to be penalized
        "dry", "n_dry",  # DRY's penalties
        "forbidden", "n_forbidden",  # tokens that may not come
        "allowed", "n_allowed",  # words of bits; if there are any, tokens whose bits are 0 may not come
        "top", "n_top",  # most likely tokens to report
        "has_logprobs",  # 1: `top` and `sum_exp` are wanted
        # results
        "n_top_found",  # entries of `top` that are filled in, in order of id
        "status", "token",
    )),
    *((name, np.float64) for name in (
        "u",  # the random number, 0 <= u < 1
        *(name for stage in STAGES for name in stage.numbers),
        "surprise_power",  # 2^mu of mirostat
        # results
        "probability",  # the chosen token's among the remaining tokens
        "peak", "sum_exp",  # from the row as given: its largest logit, and the sum of exp(logit - peak)
    )),
    ("stages", np.int64, MAX_STAGES),  # codes, ended by END
])  # fmt: skip

# The arrays of a table, one after another in the pool; float64 first, so that they lie at whole 8 bytes
TABLES: dict[str, tuple[type[np.generic], ...]] = {
    "bias": (np.float64, np.int32),  # values, ids
    "seen": (np.int32, np.int32, np.int32),  # ids, how often seen, how often generated
    "dry": (np.float64, np.int32),  # values, ids
    "forbidden": (np.int32,),
    "allowed": (np.int32,),
    "top": (np.int32, np.float32),  # ids, logits
}
_RECORD_WORDS = RECORD.itemsize // 8
_WORD_OF = {name: place[1] // 8 for name, place in (RECORD.fields or {}).items()}
_U, _TOKEN, _STATUS = _WORD_OF["u"], _WORD_OF["token"], _WORD_OF["status"]
_COUNTS = {name: f"n_{name}" for name in TABLES}


class SamplingRecords:
    """The records of a step: `fields`, a structured array [n_rows] of RECORD, and the `pool` of their tables.

    Numbers are set in `fields`, tables by `set_table`. `memory`, the bytes that `fields` begin with, and
    `pool`, int32 words, stay in place from step to step unless they must grow: an engine keeps one of these.
    """

    def __init__(self, settings: Sequence[npt.NDArray[np.uint8]] = (), rows: Sequence[int] = ()) -> None:
        self.memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.pool: npt.NDArray[np.int32] = np.zeros(2, np.int32)
        self._all: npt.NDArray[Any] = self.memory.view(RECORD)
        # all words as memoryviews, which take less time for one number than NumPy
        self._words, self._floats = self.memory.data.cast("q"), self.memory.data.cast("d")
        self._n_words = 0  # words of the pool in use
        self._kept: Sequence[npt.NDArray[np.uint8]] = ()
        self.start(settings, rows)

    def start(self, settings: Sequence[npt.NDArray[np.uint8]], rows: Sequence[int]) -> None:
        """Begins a step: a record for each of `settings`, a RECORD's bytes; `rows` are their rows of logits.

        Bytes, because NumPy copies structured arrays field by field, at 20 us a record.
        """
        n = len(settings)
        if n > len(self._all):
            self.memory = np.zeros(max(n, 2 * len(self._all)) * RECORD.itemsize, np.uint8)
            self._all = self.memory.view(RECORD)
            self._words, self._floats = self.memory.data.cast("q"), self.memory.data.cast("d")
        self.fields = self._all[:n]
        if n == 1:  # the usual step: half the time of the lines below
            self.memory[: RECORD.itemsize] = settings[0]
            self.fields["row"][0] = rows[0]
        elif n:
            np.concatenate(settings, out=self.memory[: n * RECORD.itemsize])
            self.fields["row"] = rows
        self._n_words, self._kept = 0, ()

    def keep(self, settings: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Begins a step as `start` does, of rows 0, 1 and so on, whose records differ from their settings
        by `u` alone: those of the same settings before are kept.
        """
        if len(settings) != len(self._kept) or not all(map(is_, settings, self._kept)):
            self.start(settings, range(len(settings)))
            self._kept = settings

    def set_random(self, i: int, number: float) -> None:
        """Sets `u` of record i."""
        self._floats[i * _RECORD_WORDS + _U] = number

    def random(self, i: int) -> float:
        """`u` of record i."""
        return self._floats[i * _RECORD_WORDS + _U]

    def chosen(self) -> list[int]:
        """The token of each record; -1 if its status is another than CHOSEN."""
        words, stop = self._words, len(self.fields) * _RECORD_WORDS
        return [
            words[i + _TOKEN] if words[i + _STATUS] == CHOSEN else -1 for i in range(0, stop, _RECORD_WORDS)
        ]

    def set_table(self, i: int, name: str, *arrays: npt.NDArray[Any]) -> None:
        """Adds a table of record i: arrays of one length, of the dtypes in TABLES."""
        self.fields[name][i], self.fields[_COUNTS[name]][i] = self._n_words, len(arrays[0])
        for array, dtype in zip(arrays, TABLES[name], strict=True):
            assert array.dtype == dtype
            self._add(array.view(np.int32))
        self._n_words += self._n_words % 2

    def _add(self, words: npt.NDArray[np.int32]) -> None:
        stop = self._n_words + len(words)
        if stop >= len(self.pool):
            grown = np.zeros(2 * stop + 2, np.int32)
            grown[: self._n_words] = self.pool[: self._n_words]
            self.pool = grown
        self.pool[self._n_words : stop] = words
        self._n_words = stop

    def part(self, chosen: Sequence[int]) -> SamplingRecords:
        """Copies of some records, for rows 0, 1 and so on, with the same pool, where their tables are."""
        size = RECORD.itemsize
        part = SamplingRecords([self.memory[i * size : (i + 1) * size] for i in chosen], range(len(chosen)))
        part.pool = self.pool
        return part

    def table(self, i: int, name: str) -> list[npt.NDArray[Any]]:
        """The arrays of a table: views of the pool, of use until the next step."""
        start, n = int(self.fields[name][i]), int(self.fields[_COUNTS[name]][i])
        arrays = []
        for dtype in TABLES[name]:
            stop = start + n * np.dtype(dtype).itemsize // 4
            arrays.append(self.pool[start:stop].view(dtype))
            start = stop
        return arrays


def log_of(x: float) -> float:
    """The natural logarithm of x, finite and above 0, within 4 ulp or so."""
    n = 0
    while x > 1.4142135623730951:
        x *= 0.5
        n += 1
    while x < 0.7071067811865476:
        x *= 2.0
        n -= 1
    s = (x - 1.0) / (x + 1.0)
    total = 0.0
    for k in range(25, 0, -2):
        total = total * (s * s) + 1.0 / k
    return 2.0 * s * total + n * 0.6931471805599453


def exp_of(x: float) -> float:
    """e^x, with x clamped to -700 to 700."""
    x = min(max(x, -700.0), 700.0)
    n = int(x * 1.4426950408889634 + (0.5 if x >= 0.0 else -0.5))
    r = x - n * 0.6931471805599453
    total = 1.0
    for k in range(18, 0, -1):
        total = 1.0 + total * r / k
    while n > 0:
        total *= 2.0
        n -= 1
    while n < 0:
        total *= 0.5
        n += 1
    return total


def f32(x: float) -> np.float32:
    """x as float32, clamped to finite values."""
    limit = 3.4028234663852886e38
    return np.float32(min(max(x, -limit), limit))
