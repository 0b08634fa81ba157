"""From a row of logits to one token, in the order that `kukri.sampling` documents.

A vocabulary has 50,000 to 150,000 entries and a nucleus has a few dozen, so nothing here sorts a vocabulary.
Filters cut a set of `Candidates` from below, at a logit: the tokens kept are always the largest. A filter
that meets the whole row takes a threshold that provably lies at or under its cut, gathers the tokens above,
and works on those few exactly. The passes over a whole row are the three of the backend's `RowOps`, and
maxima for `top_k`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.errors import KukriError, RequestError, ShapeError
from kukri.kernels.reference import ReferenceRowOps
from kukri.kernels.types import SUM_BLOCK, RowOps
from kukri.sampling.params import SamplingParams

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

_GROUPS = 768  # interleaved groups whose maxima bound the k-th largest logit
_COARSE = (64, 1024)  # see `_gather_nucleus`
REFERENCE_ROW_OPS = ReferenceRowOps()
_LOWEST = float(np.finfo(np.float32).min)
_MAX_SCALE = 1e6  # a temperature below 1e-6 acts as 1e-6


class SamplingError(KukriError):
    """The logits of a request are unusable: NaN or infinite, or no token is allowed. The request fails."""


class Candidates:
    """The tokens still in play: the whole row at first (`ids` is None), then `ids` with their `logits`.

    `ids` int32, ascending; `logits` float32, finite. The model's odds of a token are
    exp((logit - peak) * scale). Raises SamplingError where the row holds NaN or +inf, or nothing but -inf.
    """

    def __init__(self, row: FloatArray, row_ops: RowOps) -> None:
        self.row, self.row_ops = row, row_ops
        self.scale = 1.0
        self.peak = 0.0  # the largest logit, known once `ids` is set
        self.ids: IntArray | None = None
        self.logits: FloatArray = row

    def find_peak(self) -> float:
        """The largest logit."""
        if self.ids is None:
            self.peak = _peak_at(self.row, self.row_ops.argmax(self.row))
        return self.peak

    def whole_row_sums(self) -> FloatArray:
        """The odds of the whole row, summed by blocks of SUM_BLOCK ids; sets `peak`."""
        peak, sums = self.row_ops.max_and_sum_exp(self.row, self.scale)
        self.peak = _checked_peak(peak)
        assert len(sums) == -(-len(self.row) // SUM_BLOCK)
        return sums

    def gather(self, threshold: float) -> None:
        """Narrows the whole row to the tokens whose logit is at least `threshold`, or a rounding below."""
        bound = np.float32(max(threshold, _LOWEST))
        # one step down, as `above` leaves the bound itself out and rounding to float32 may have gone up
        bound = np.nextafter(bound, np.float32(-np.inf)) if bound > _LOWEST else np.float32(-np.inf)
        self.ids = self.row_ops.above(self.row, float(bound))
        self.logits = self.row.take(self.ids)

    def odds(self) -> DoubleArray:
        """float64: the odds of each candidate against the most likely token."""
        return np.exp((self.logits.astype(np.float64) - self.peak) * self.scale)

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Narrows the candidates to those that `kept` marks."""
        assert self.ids is not None
        places = np.flatnonzero(kept)  # several times as quick as indexing by booleans
        self.ids, self.logits = self.ids.take(places), self.logits.take(places)

    def keep_largest(self, n: int, ascending: FloatArray) -> None:
        """Narrows to the `n` largest logits, of equals the lowest ids; `ascending` is the sorted logits."""
        if n >= len(ascending):
            return
        cut = ascending[-n]
        kept = self.logits >= cut
        n_excess = int(np.count_nonzero(kept)) - n
        if n_excess:
            kept[np.flatnonzero(self.logits == cut)[-n_excess:]] = False
        self.keep(kept)


Filter = Callable[[Candidates], None]


def top_k(k: int) -> Filter:
    """A filter that keeps the k most likely tokens."""

    def run(candidates: Candidates) -> None:
        if candidates.ids is None:
            candidates.peak, threshold = _peak_and_kth_bound(candidates.row, k)
            candidates.gather(threshold)
        if k < len(candidates.logits):
            candidates.keep_largest(k, np.sort(candidates.logits))

    return run


def top_p(p: float) -> Filter:
    """A filter that keeps the fewest, likeliest tokens whose odds reach a share p (Holtzman et al. 2020)."""

    def run(candidates: Candidates) -> None:
        if candidates.ids is None:
            total = _gather_nucleus(candidates, p)
        else:
            total = float(candidates.odds().sum())
        ascending = np.sort(candidates.logits)
        descending_odds = np.exp((ascending[::-1].astype(np.float64) - candidates.peak) * candidates.scale)
        # the first place where the sum reaches p; rounding may keep it just short of 1
        n = int(np.searchsorted(np.cumsum(descending_odds), p * total)) + 1
        candidates.keep_largest(n, ascending)

    return run


def _gather_nucleus(candidates: Candidates, p: float) -> float:
    """Narrows the whole row to a set that holds the nucleus; gives the sum of all odds.

    Tokens below a share (1 - p) / V of the sum weigh less than 1 - p together, so those above weigh more than
    p: the nucleus, being the largest tokens, lies among them. Larger shares find fewer tokens and nearly
    always enough: they are tried first, and stand only where their tokens are seen to reach p.
    """
    total = float(candidates.whole_row_sums().sum(dtype=np.float64))
    for parts in (*_COARSE, len(candidates.row)):
        depth = min(math.log(total * (1.0 - p) / parts), 0.0)  # the largest is always in
        candidates.gather(candidates.peak + depth / candidates.scale)
        if parts == len(candidates.row) or candidates.odds().sum() >= p * total:
            break
    return total


def min_p(p: float) -> Filter:
    """A filter that keeps the tokens at least p times as likely as the most likely (Nguyen et al. 2024)."""
    distance = math.log(p)

    def run(candidates: Candidates) -> None:
        peak = candidates.find_peak()
        if candidates.ids is None:
            candidates.gather(peak + distance / candidates.scale)
        candidates.keep((candidates.logits.astype(np.float64) - peak) * candidates.scale >= distance)

    return run


def temperature(value: float) -> Filter:
    """A filter that divides the logits by `value`, which is above 0."""

    def run(candidates: Candidates) -> None:
        candidates.scale = min(candidates.scale / value, _MAX_SCALE)

    return run


def filters_of(params: SamplingParams) -> list[Filter]:
    """The filters that a request asks for, in order; those that would change nothing are left out."""
    filters: list[Filter] = []
    if params.top_k:
        filters.append(top_k(params.top_k))
    if params.top_p < 1.0:
        filters.append(top_p(params.top_p))
    if params.min_p > 0.0:
        filters.append(min_p(params.min_p))
    if params.temperature != 1.0:
        filters.append(temperature(params.temperature))
    return filters


def draw(candidates: Candidates, u: float) -> int:
    """The token at the point `u`, 0 <= u < 1, of the candidates' summed probabilities, in order of id."""
    if candidates.ids is not None:
        return int(candidates.ids[_pick(candidates.odds(), u)])
    # whole row: choose a block by its sum, then a token inside it, with what is left of u
    sums = candidates.whole_row_sums().astype(np.float64)
    block = _pick(sums, u)
    before = float(sums[:block].sum())
    rest = (u * float(sums.sum()) - before) / float(sums[block])
    start = block * SUM_BLOCK
    candidates.logits = candidates.row[start : start + SUM_BLOCK]
    return start + _pick(candidates.odds(), min(max(rest, 0.0), 1.0))


def _pick(weights: DoubleArray, u: float) -> int:
    """The first index whose running sum passes the share `u` of the sum; its weight is above 0."""
    running = np.cumsum(weights)
    total = running[-1]
    return int(np.searchsorted(running, min(u * total, np.nextafter(total, 0.0)), side="right"))


def _peak_at(row: FloatArray, index: int) -> float:
    return _checked_peak(float(row[index]) if index >= 0 else math.nan)


def _checked_peak(peak: float) -> float:
    if math.isfinite(peak):
        return peak
    if peak == -math.inf:
        raise SamplingError("no token is allowed: every logit is -inf")
    raise SamplingError(
        f"the logits hold {peak}: the model or a hook computed something that is not a number"
    )


def _peak_and_kth_bound(row: FloatArray, k: int) -> tuple[float, float]:
    """The largest logit, and a bound that at least k logits reach.

    Split into groups, the row has as many maxima as groups; the k-th largest of them is reached by k tokens,
    one of each of k groups. With more tokens wanted than there are groups, the k-th logit itself is found.
    """
    n_even = len(row) // _GROUPS * _GROUPS
    if k > _GROUPS or not n_even:
        peak = _checked_peak(float(row.max()))
        return peak, float(np.partition(row, -k)[-k]) if k < len(row) else -math.inf
    maxima = np.sort(np.maximum.reduce(row[:n_even].reshape(-1, _GROUPS), axis=0))
    tail = row[n_even:]
    peak = float(maxima[-1])
    if len(tail):
        peak = float(np.maximum(maxima[-1], tail.max()))
    return _checked_peak(peak), float(maxima[-k])


class SampledToken(NamedTuple):
    """One chosen token. Log-probabilities (natural) are of the raw logits, None unless asked for."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # (id, logprob), most likely first


class _SeenTokens:
    """The distinct tokens of a request so far, and how often each was generated."""

    def __init__(self, prompt_ids: npt.ArrayLike) -> None:
        prompt = np.unique(np.asarray(prompt_ids, np.int32))
        self._place = {int(token_id): i for i, token_id in enumerate(prompt)}
        self._ids = np.concatenate([prompt, np.zeros(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.append(self._ids, np.zeros(place, np.int32))
            self._counts = np.append(self._counts, np.zeros(place, np.float32))
        self._ids[place] = token_id
        self._counts[place] += 1

    def penalize(self, row: FloatArray, params: SamplingParams) -> None:
        """Applies the three penalties to `row`, in place."""
        n = len(self._place)
        ids, counts = self._ids[:n], self._counts[:n]
        logits, factor = row[ids], np.float32(params.repetition_penalty)
        # Keskar et al. 2019 divide; below 0 dividing would reward, so transformers multiplies there
        logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= np.float32(params.presence_penalty) * (counts > 0)
        logits -= np.float32(params.frequency_penalty) * counts
        row[ids] = logits


class RequestSampler:
    """Chooses the tokens of one request: sampler(logits) for each, in turn.

    Holds the request's own random numbers and counts, so that its tokens depend on its seed and logits and
    never on its batch mates. Each token drawn takes one number, whatever the filters; greedy takes none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: npt.ArrayLike,
        n_vocab: int,
        forbidden_until_min: Iterable[int] = (),
        row_ops: RowOps = REFERENCE_ROW_OPS,
    ) -> None:
        """`forbidden_until_min`: end-of-text ids, kept back with the stop ids until `min_tokens`.

        Raises RequestError where logit_bias or stop_token_ids name a token outside the vocabulary.
        """
        self.params, self.n_vocab, self.n_generated = params, n_vocab, 0
        _check_ids("logit_bias", params.logit_bias or (), n_vocab)
        _check_ids("stop_token_ids", params.stop_token_ids, n_vocab)
        self._row_ops = row_ops
        self._filters = filters_of(params)
        ends = {*forbidden_until_min, *params.stop_token_ids}
        self._end_ids = np.array(sorted(i for i in ends if 0 <= i < n_vocab), np.int64)
        bias = params.logit_bias or {}
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._seen: _SeenTokens | None = None
        if params.repetition_penalty != 1.0:
            self._seen = _SeenTokens(prompt_ids)
        elif params.presence_penalty or params.frequency_penalty:
            self._seen = _SeenTokens(())
        seed = None if params.seed is None else params.seed % 2**64
        self._random = None if params.is_greedy else np.random.Generator(np.random.PCG64(seed))

    def __call__(self, logits: FloatArray, allow_end: bool = True) -> SampledToken:
        """The next token for `logits`, float32 [V], which are not written; counts it as generated.

        End-of-text and stop ids are not chosen before `min_tokens`, nor where `allow_end` is False.
        Raises SamplingError where the logits hold NaN or +inf, or no token is allowed.
        """
        if logits.shape != (self.n_vocab,) or logits.dtype != np.float32:
            raise ShapeError(f"logits {logits.dtype} {logits.shape} given for a vocabulary of {self.n_vocab}")
        row = self._edited(logits, allow_end and self.n_generated >= self.params.min_tokens)
        token_id = self._choose(row)
        self.n_generated += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self.params.logprobs is None:
            return SampledToken(token_id)
        return token_logprobs(token_id, logits, self.params.logprobs, self._row_ops)

    def _edited(self, logits: FloatArray, allow_end: bool) -> FloatArray:
        """The logits with bias, penalties and forbidden tokens: a copy, or `logits` where there is none."""
        forbids = not allow_end and len(self._end_ids) > 0
        if not (len(self._bias_ids) or self._seen is not None or forbids):
            return logits
        row = logits.copy()
        row[self._bias_ids] += self._bias
        if self._seen is not None:
            self._seen.penalize(row, self.params)
        if forbids:
            row[self._end_ids] = -np.inf
        return row

    def _choose(self, row: FloatArray) -> int:
        if self._random is None:
            token_id = self._row_ops.argmax(row)
            _peak_at(row, token_id)  # raises where it is no number
            return token_id
        candidates = Candidates(row, self._row_ops)
        for run in self._filters:
            run(candidates)
        return draw(candidates, self._random.random())


def _check_ids(name: str, ids: Iterable[int], n_vocab: int) -> None:
    for token_id in ids:
        if token_id >= n_vocab:
            raise RequestError(
                f"{name} names token {token_id}, and the vocabulary has {n_vocab}",
                param=name,
                code="invalid_value",
            )


def token_logprobs(token_id: int, logits: FloatArray, n_top: int, row_ops: RowOps) -> SampledToken:
    """The token with its own log-probability and those of the `n_top` most likely."""
    peak, sums = row_ops.max_and_sum_exp(logits, 1.0)
    log_total = _checked_peak(peak) + math.log(float(sums.sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if n_top:
        candidates = Candidates(logits, row_ops)
        top_k(n_top)(candidates)
        assert candidates.ids is not None
        order = np.argsort(-candidates.logits, kind="stable")
        top = [(int(candidates.ids[i]), float(candidates.logits[i]) - log_total) for i in order]
    return SampledToken(token_id, float(logits[token_id]) - log_total, tuple(top))
