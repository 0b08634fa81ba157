"""The sampler: each request's part of a step's sampling, before and after the backend chooses tokens.

`sample_rows` serves all requests of a step by one call of the backend, which knows the stages
(`kukri.kernels.reference_sampling` defines them). A `RequestSampler` holds what one request needs for that:
its record, its random numbers, and what its history means for penalties, DRY, bad words and mirostat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.errors import KukriError, RequestError, ShapeError, StageError, failure_of
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Logits, SamplingBackend
from kukri.kernels.host_step import HostLogits
from kukri.kernels.sampling_record import (
    CHOSEN,
    NONE_ALLOWED,
    RECORD,
    SamplingRecords,
)
from kukri.kernels.sampling_stages import MIROSTAT_1, MIROSTAT_2, STAGES
from kukri.sampling.grammar import Grammar
from kukri.sampling.history import BadPhrases, DryRepetitions, ReasoningTokens, SeenTokens, Tokens
from kukri.sampling.params import LogitsProcessor, SamplingParams

_GIVEN = np.zeros(1, RECORD)  # a token whose log-probability is wanted
_GIVEN["is_given"] = 1


class SamplingError(KukriError):
    """The logits of a request are unusable: NaN or infinite, or no token is allowed. The request fails."""


class SampledToken(NamedTuple):
    """One chosen token. Log-probabilities (natural) are of the raw logits, None unless requested."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # (id, logprob), most likely first


class RequestSampler:
    """Chooses the tokens of one request: sampler(logits) for each, in turn, or `sample_rows` for many.

    Holds the request's own random numbers and counts, so that its tokens depend on its seed and logits and
    never on its batch mates. Each token drawn takes one number, whatever the filters, and one more with XTC;
    greedy takes none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: npt.ArrayLike,
        n_vocab: int,
        sampling: SamplingBackend,
        forbidden_until_min: Iterable[int] = (),
    ) -> None:
        """`forbidden_until_min`: end-of-text ids, kept back with the stop ids until `min_tokens`.

        Raises RequestError if a parameter names a token outside the vocabulary, or holds texts that are to
        be token ids (see `resolve_texts`).
        """
        self.params, self.n_vocab, self.n_generated = params, n_vocab, 0
        self._sampling = sampling
        self._processors = params.logits_processors
        stages = params.active_stages
        breakers = _phrase_ids("dry_sequence_breakers", params, n_vocab) if "dry" in stages else ()
        bad_words = _phrase_ids("bad_words", params, n_vocab)
        _check_ids("logit_bias", params.logit_bias or (), n_vocab)
        _check_ids("stop_token_ids", params.stop_token_ids, n_vocab)
        limit = params.reasoning_limit
        if limit is not None:
            _check_ids("reasoning_limit", (limit.open_id, limit.close_id), n_vocab)
        self.settings = _settings_of(params)
        self._bias: tuple[npt.NDArray[Any], ...] | None = None
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), np.float64)
            self._bias = values, np.array(list(params.logit_bias), np.int32)
        long_words = tuple(phrase for phrase in bad_words if len(phrase) > 1)
        self._bad_phrases = BadPhrases(long_words) if long_words else None
        ends = {i for i in (*forbidden_until_min, *params.stop_token_ids) if 0 <= i < n_vocab}
        banned = {phrase[0] for phrase in bad_words if len(phrase) == 1}
        self._forbidden = np.array(sorted(banned), np.int32)
        self._forbidden_with_ends = np.array(sorted(banned | ends), np.int32)
        self._tokens: Tokens | None = None
        self._dry: DryRepetitions | None = None
        self._seen: SeenTokens | None = None
        if "dry" in stages or self._processors or self._bad_phrases:
            self._tokens = Tokens(prompt_ids)
        if "dry" in stages and self._tokens is not None:
            self._dry = DryRepetitions(params, self._tokens, breakers)
        if "penalties" in stages:
            self._seen = SeenTokens(params, prompt_ids)
        if isinstance(params.grammar, Grammar):
            raise RequestError.of("grammar", "must be compiled here: give it to LLM or the server")
        self._matcher = None if params.grammar is None else params.grammar.matcher()
        self._reasoning = None if limit is None else ReasoningTokens(limit)
        self._mu = 2.0 * params.mirostat_tau
        # Python's own: importing NumPy's takes 10 ms of a start
        seed = None if params.seed is None else params.seed % 2**64
        self._random = None if params.is_greedy else Random(seed)
        self._returned: list[float] = []  # numbers that were put back, to be drawn first
        # True if a record changes from token to token only by its random number
        histories = (self._dry, self._seen, self._matcher, self._reasoning, params.logprobs)
        edits = (params.logit_bias, bad_words, self._processors, params.min_tokens)
        draws_more = params.mirostat or params.xtc_probability
        self.is_plain = not (any(edits) or draws_more or any(part is not None for part in histories))

    @property
    def mirostat_mu(self) -> float | None:
        """The state of mirostat, in bits; None without."""
        return self._mu if self.params.mirostat else None

    def resume(self, token_ids: Sequence[int], mirostat_mu: float | None = None) -> None:
        """Brings a new sampler to the state of one that has chosen these tokens.

        `mirostat_mu` is that one's: it does not follow from the tokens alone.
        """
        for token_id in token_ids:
            self._take(token_id)
        if self._random is not None:
            n_numbers = 2 if self.params.xtc_probability else 1
            for _ in range(n_numbers * len(token_ids)):
                self._random.random()
        if mirostat_mu is not None:
            self._mu = mirostat_mu

    def __call__(self, logits: FloatArray, allow_end: bool = True) -> SampledToken:
        """The next token for `logits`, float32 [V], which are not written; counts it as generated.

        End-of-text and stop ids are not chosen before `min_tokens`, nor if `allow_end` is False.
        Raises SamplingError if the logits hold NaN or +inf, no token is allowed, or a processor fails.
        """
        result = sample_rows([self], HostLogits(logits[None]), self._sampling, allow_end=allow_end)[0]
        if isinstance(result, KukriError):
            raise result
        return result

    def prepare(self, records: SamplingRecords, i: int, allow_end: bool = True) -> None:
        """Fills in record i, made of `settings`, for the next row. `process` comes first."""
        fields = records.fields
        if self._random is not None:
            fields["u"][i] = self._number(self._random)
            if self.params.xtc_probability:
                fields["xtc_applies"][i] = self._number(self._random) < self.params.xtc_probability
            if self.params.mirostat:
                fields["surprise_power"][i] = 2.0 ** min(max(self._mu, -100.0), 100.0)
        if self._bias is not None:
            records.set_table(i, "bias", *self._bias)
        if self._matcher is not None:
            records.set_table(i, "allowed", self._matcher.allowed)
        forbidden = self._forbidden_now(allow_end)
        if len(forbidden):
            records.set_table(i, "forbidden", forbidden)
        if self._seen is not None:
            records.set_table(i, "seen", *self._seen.table())
        if self._dry is not None:
            records.set_table(i, "dry", *self._dry.table())
        if self.params.logprobs is not None:
            _add_top(records, i, self.params.logprobs)
        if self._reasoning is not None and self._reasoning.is_over:
            close_id = self._reasoning.limit.close_id
            if self._matcher is None or self._matcher.accepts(close_id):
                fields["is_given"][i], fields["token"][i], fields["probability"][i] = 1, close_id, 1.0

    def draw(self, records: SamplingRecords, i: int) -> None:
        """Fills in record i for the next row of a plain sampler, and counts its token."""
        self.n_generated += 1
        if self._random is not None:
            records.set_random(i, self._number(self._random))

    def put_back(self, records: SamplingRecords, rows: range) -> None:
        """Undoes `draw` for the last rows that it was called for: their tokens are not to be generated."""
        self.n_generated -= len(rows)
        if self._random is not None:
            self._returned[:0] = [records.random(i) for i in rows]

    def _number(self, random: Random) -> float:
        """The next random number."""
        return self._returned.pop(0) if self._returned else random.random()

    def _forbidden_now(self, allow_end: bool) -> IntArray:
        """The tokens that may not come next: bad words, and end-of-text before `min_tokens`."""
        forbidden = self._forbidden
        if not allow_end or self.n_generated < self.params.min_tokens:
            forbidden = self._forbidden_with_ends
        if self._bad_phrases is not None and self._tokens is not None:
            ids = self._bad_phrases.next_ids(self._tokens)
            if ids:
                return np.append(forbidden, np.array(ids, np.int32))
        return forbidden

    def process(self, logits: Logits, i: int) -> FloatArray | None:
        """Updates the grammar's allowed tokens; a copy of row i edited by the caller's functions, if any.

        Raises SamplingError if one fails.
        """
        if self._matcher is not None:
            error = self._matcher.update()
            if error:
                raise SamplingError(f"the grammar failed: {error[:300]}")
        if not self._processors or self._tokens is None:
            return None
        row: FloatArray = logits.take([i]).numpy()[0].copy()
        for processor in self._processors:
            row = _processed(processor, self._tokens.ids, row)
        return row

    def finish(
        self, records: SamplingRecords, i: int, logits: Logits, row: int, token_id: int
    ) -> SampledToken:
        """The token that record i chose, with its log-probabilities in a row; counts it as generated."""
        self._take(token_id)
        if self.params.mirostat and self._random is not None:
            surprise = -math.log2(records.fields["probability"][i])
            self._mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        if self.params.logprobs is None:
            return SampledToken(token_id)
        if self._processors:
            return token_logprobs(token_id, logits.take([row]), self.params.logprobs, self._sampling)
        return _with_logprobs(records, i, logits, row)

    def _take(self, token_id: int) -> None:
        """Counts a token as generated."""
        self.n_generated += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._tokens is not None:
            self._tokens.add(token_id)
        if self._dry is not None:
            self._dry.update()
        if self._matcher is not None:
            self._matcher.take(token_id)
        if self._reasoning is not None:
            self._reasoning.add(token_id)


def sample_rows(
    samplers: Sequence[RequestSampler],
    logits: Logits,
    sampling: SamplingBackend,
    records: SamplingRecords | None = None,
    *,
    rows: Sequence[int] | None = None,
    allow_end: bool = True,
) -> list[SampledToken | KukriError]:
    """The next token of each request by its row of logits [N, V], or the error that ends it.

    `rows`: which row is whose, if not each has one, in order. Plain samplers alone may have several, for
    tokens that follow one another.

    Whatever a request's own code raises (a processor, a grammar, its history) is its error alone. The logits
    are not written. Whoever calls often keeps `records`. Raises ShapeError if the logits are not a
    row for each.
    """
    if not samplers:
        return []
    records = records or SamplingRecords()
    is_plain = allow_end and not [sampler for sampler in samplers if not sampler.is_plain]
    if rows is not None and not is_plain:
        logits, rows = logits.take(rows), None
    _check_shape(samplers, logits, rows)
    if is_plain:
        return _sample_plain(samplers, logits, sampling, records, rows)
    results: list[Any] = [None] * len(samplers)
    plain: list[int] = []
    edited: list[int] = []  # requests whose processors made a row of their own
    edited_rows: list[FloatArray] = []
    for i, sampler in enumerate(samplers):
        try:
            row = sampler.process(logits, i)
        except StageError:  # concerns all requests
            raise
        except BaseException as error:
            results[i] = failure_of("the request's sampler", error)
            continue
        if row is None:
            plain.append(i)
        else:
            edited.append(i)
            edited_rows.append(row)

    def choose(chosen: list[int], rows: Logits, row_numbers: Sequence[int]) -> None:
        records.start([samplers[i].settings for i in chosen], row_numbers)
        for place, i in enumerate(chosen):
            try:
                samplers[i].prepare(records, place, allow_end)
            except BaseException as error:  # whatever is chosen for it now, it fails
                results[i] = failure_of("the request's sampler", error)
        sampling.choose(records, rows)
        tokens, statuses = records.fields["token"].tolist(), records.fields["status"].tolist()
        for place, i in enumerate(chosen):
            if results[i] is not None:
                continue
            if statuses[place] != CHOSEN:
                results[i] = _failure(records, place)
                continue
            try:
                results[i] = samplers[i].finish(records, place, logits, i, tokens[place])
            except StageError:
                raise
            except BaseException as error:
                results[i] = failure_of("the request's sampler", error)

    if plain:
        choose(plain, logits, plain)
    if edited:
        choose(edited, HostLogits(np.stack(edited_rows)), range(len(edited)))
    return results


def _sample_plain(
    samplers: Sequence[RequestSampler],
    logits: Logits,
    sampling: SamplingBackend,
    records: SamplingRecords,
    rows: Sequence[int] | None,
) -> list[SampledToken | KukriError]:
    """`sample_rows` of samplers that are plain."""
    settings = [sampler.settings for sampler in samplers]
    if rows is None:
        records.keep(settings)
    else:
        records.start(settings, rows)
    for i, sampler in enumerate(samplers):
        sampler.draw(records, i)
    sampling.choose(records, logits)
    return [
        SampledToken(token) if token >= 0 else _failure(records, i)
        for i, token in enumerate(records.chosen())
    ]


def token_logprobs(token_id: int, logits: Logits, n_top: int, sampling: SamplingBackend) -> SampledToken:
    """A given token with its log-probability by one row of logits [1, V], and the `n_top` most likely.

    Raises SamplingError if the logits hold NaN or +inf, or nothing but -inf.
    """
    records = SamplingRecords([_GIVEN.view(np.uint8)], [0])
    records.fields["token"] = token_id
    _add_top(records, 0, n_top)
    sampling.choose(records, logits)
    if records.fields["status"][0] != CHOSEN:
        raise _failure(records, 0)
    return _with_logprobs(records, 0, logits, 0)


def _with_logprobs(records: SamplingRecords, i: int, logits: Logits, row: int) -> SampledToken:
    record = records.fields[i]
    token_id = int(record["token"])
    log_total = float(record["peak"]) + math.log(record["sum_exp"])
    top: tuple[tuple[int, float], ...] = ()
    if record["n_top"]:
        ids, values = (array[: record["n_top_found"]].tolist() for array in records.table(i, "top"))
        # stable: of equals the lowest id first
        likeliest = sorted(zip(ids, values, strict=True), key=_minus_logit)
        top = tuple((i, x - log_total) for i, x in likeliest)
    return SampledToken(token_id, logits.logit(row, token_id) - log_total, top)


def _minus_logit(entry: tuple[int, float]) -> float:
    return -entry[1]


def _add_top(records: SamplingRecords, i: int, n_top: int) -> None:
    """Has record i report the `n_top` most likely tokens."""
    records.fields["has_logprobs"][i] = 1
    records.set_table(i, "top", np.zeros(n_top, np.int32), np.zeros(n_top, np.float32))


def _settings_of(params: SamplingParams) -> npt.NDArray[np.uint8]:
    """A RECORD's bytes, with the fields that stay the same from token to token."""
    fields = np.zeros(1, RECORD)
    record = fields[0]
    record["is_greedy"] = params.is_greedy
    codes = {}
    for stage in STAGES:
        codes[stage.name] = stage.code
        for name, number in stage.numbers.items():
            record[name] = number(params)
    stages = [codes[name] for name in params.active_stages]
    if params.mirostat:
        stages.append(MIROSTAT_1 if params.mirostat == 1 else MIROSTAT_2)
    record["stages"][: len(stages)] = stages
    return fields.view(np.uint8)


def _processed(processor: LogitsProcessor, token_ids: IntArray, row: FloatArray) -> FloatArray:
    """The row after one of the caller's functions, checked."""
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        returned = processor(token_ids, row.view())  # reshaped or resized, it leaves the row as it is
        result = row if returned is None else np.ascontiguousarray(returned, np.float32)
    except Exception as error:
        raise SamplingError(f"the logits processor {name} failed: {type(error).__name__}: {error}") from error
    if result.shape != row.shape:
        raise SamplingError(
            f"the logits processor {name} must return {row.shape} or None, not {result.shape}"
        )
    peak = float(result.max())
    if not math.isfinite(peak):
        left = "no token: every logit is -inf" if peak == -math.inf else f"{peak} in the logits"
        raise SamplingError(f"the logits processor {name} left {left}")
    return result


def _failure(records: SamplingRecords, i: int) -> SamplingError:
    """The error of a record whose status is not CHOSEN."""
    record = records.fields[i]
    if record["status"] == NONE_ALLOWED:
        return SamplingError("no token is allowed: every logit is -inf")
    return SamplingError(
        f"the logits hold {record['peak']}: the model or a hook computed something that is not a number"
    )


def _check_shape(samplers: Sequence[RequestSampler], logits: Logits, rows: Sequence[int] | None) -> None:
    n_vocab = samplers[0].n_vocab
    n_rows = len(samplers) if rows is None else len(logits)
    is_outside = rows is not None and (min(rows) < 0 or max(rows) >= n_rows)
    if logits.shape != (n_rows, n_vocab) or is_outside:
        raise ShapeError(f"logits {logits.shape} given for {len(samplers)} rows of {n_vocab} tokens")


def _phrase_ids(name: str, params: SamplingParams, n_vocab: int) -> tuple[tuple[int, ...], ...]:
    phrases = getattr(params, name)
    if any(isinstance(phrase, str) for phrase in phrases):
        raise RequestError.of(name, "must be token ids here: give texts to LLM or the server")
    for phrase in phrases:
        _check_ids(name, [max(phrase)], n_vocab)
    return tuple(phrases)


def _check_ids(name: str, ids: Iterable[int], n_vocab: int) -> None:
    for token_id in ids:
        if token_id >= n_vocab:
            raise RequestError.of(
                name, f"must name tokens below {n_vocab}, not {token_id}", code="invalid_value"
            )
