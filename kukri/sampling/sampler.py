"""The sampler: each request's part of a step's sampling, before and after the backend chooses tokens.

`sample_rows` serves all requests of a step by one call of the backend, which knows the stages
(`kukri.kernels.reference_sampling` defines them). A `RequestSampler` holds what one request needs for that:
its record, its random numbers, and what its history means for penalties, DRY, bad words and mirostat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.errors import KukriError, RequestError, ShapeError
from kukri.kernels import sampling_record
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.kernels.sampling_record import SamplingRecord
from kukri.kernels.types import SamplingBackend
from kukri.sampling.grammar import Grammar
from kukri.sampling.history import BadPhrases, DryRepetitions, SeenTokens, Thoughts, Tokens
from kukri.sampling.params import SAMPLERS, LogitsProcessor, SamplingParams

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

REFERENCE_SAMPLING = ReferenceSampling()
_MIN_TEMPERATURE = 1e-6  # a temperature below acts as this


class SamplingError(KukriError):
    """The logits of a request are unusable: NaN or infinite, or no token is allowed. The request fails."""


class SampledToken(NamedTuple):
    """One chosen token. Log-probabilities (natural) are of the raw logits, None unless asked for."""

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
        forbidden_until_min: Iterable[int] = (),
        sampling: SamplingBackend = REFERENCE_SAMPLING,
    ) -> None:
        """`forbidden_until_min`: end-of-text ids, kept back with the stop ids until `min_tokens`.

        Raises RequestError where a parameter names a token outside the vocabulary, or holds texts that are to
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
        if params.thoughts is not None:
            _check_ids("thoughts", (params.thoughts.open_id, params.thoughts.close_id), n_vocab)
        self._record = _record_of(params)
        long_words = tuple(phrase for phrase in bad_words if len(phrase) > 1)
        self._bad_phrases = BadPhrases(long_words) if long_words else None
        ends = {i for i in (*forbidden_until_min, *params.stop_token_ids) if 0 <= i < n_vocab}
        banned = {phrase[0] for phrase in bad_words if len(phrase) == 1}
        self._forbidden = np.array(sorted(banned), np.int32)
        self._forbidden_with_ends = np.array(sorted(banned | ends), np.int32)
        self._last_forbidden: IntArray | None = None
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
            raise RequestError("grammar must be compiled here: give it to LLM or the server", param="grammar")
        self._matcher = None if params.grammar is None else params.grammar.matcher()
        if self._matcher is not None:
            words = self._matcher.allowed
            self._record.set_table("allowed", len(words), words)
        self._thoughts = None if params.thoughts is None else Thoughts(params.thoughts)
        self._mu = 2.0 * params.mirostat_tau
        seed = None if params.seed is None else params.seed % 2**64
        self._random = None if params.is_greedy else np.random.Generator(np.random.PCG64(seed))

    def __call__(self, logits: FloatArray, allow_end: bool = True) -> SampledToken:
        """The next token for `logits`, float32 [V], which are not written; counts it as generated.

        End-of-text and stop ids are not chosen before `min_tokens`, nor where `allow_end` is False.
        Raises SamplingError where the logits hold NaN or +inf, no token is allowed, or a processor fails.
        """
        result = sample_rows([self], logits[None], self._sampling, allow_end=allow_end)[0]
        if isinstance(result, KukriError):
            raise result
        return result

    def prepare(self, allow_end: bool = True) -> SamplingRecord:
        """The record of the next row."""
        record = self._record
        if self._random is not None:
            record.u = self._random.random()
            if self.params.xtc_probability:
                record.xtc_applies = self._random.random() < self.params.xtc_probability
            if self.params.mirostat:
                record.surprise_power = 2.0 ** min(max(self._mu, -100.0), 100.0)
        forbidden = self._forbidden
        if not allow_end or self.n_generated < self.params.min_tokens:
            forbidden = self._forbidden_with_ends
        if self._bad_phrases is not None and self._tokens is not None:
            ids = self._bad_phrases.next_ids(self._tokens)
            forbidden = np.append(forbidden, np.array(ids, np.int32)) if ids else forbidden
        if forbidden is not self._last_forbidden:
            record.set_table("forbidden", len(forbidden), forbidden)
            self._last_forbidden = forbidden
        if self._seen is not None:
            self._seen.fill(record)
        if self._dry is not None:
            self._dry.fill(record)
        if self._thoughts is not None:
            self._close_thoughts(self._thoughts, record)
        return record

    def _close_thoughts(self, thoughts: Thoughts, record: SamplingRecord) -> None:
        """Has the record give the token that ends the thoughts, where they are over."""
        close_id = thoughts.limit.close_id
        record.is_given = thoughts.are_over and (self._matcher is None or self._matcher.accepts(close_id))
        if record.is_given:
            record.token, record.probability = close_id, 1.0

    def process(self, row: FloatArray) -> None:
        """Has the grammar say what it allows, and the caller's functions edit a copy of the row.

        Raises SamplingError where one fails.
        """
        if self._matcher is not None:
            error = self._matcher.update()
            if error:
                raise SamplingError(f"the grammar gave up: {error[:300]}")
        if self._processors and self._tokens is not None:
            row = row.copy()
            for processor in self._processors:
                row = _processed(processor, self._tokens.ids, row)
            self._record.own_row = row

    def finish(self, row: FloatArray) -> SampledToken:
        """The token that the record got for `row`; counts it. Raises SamplingError where there is none."""
        record = self._record
        if record.status != sampling_record.CHOSEN:
            raise _failure(record)
        token_id: int = record.token
        self.n_generated += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._tokens is not None:
            self._tokens.add(token_id)
        if self._dry is not None:
            self._dry.update()
        if self._matcher is not None:
            self._matcher.take(token_id)
        if self._thoughts is not None:
            self._thoughts.add(token_id)
        if self.params.mirostat and self._random is not None:
            surprise = -math.log2(record.probability)
            self._mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        if record.n_top < 0:
            return SampledToken(token_id)
        if self._processors:
            return token_logprobs(token_id, row, record.n_top, self._sampling)
        return _with_logprobs(record, row)


def sample_rows(
    samplers: Sequence[RequestSampler],
    logits: FloatArray,
    sampling: SamplingBackend,
    *,
    allow_end: bool = True,
) -> list[SampledToken | KukriError]:
    """The next token of each request by its row of logits, float32 [N, V], or the error that ends it.

    The logits are not written. Raises ShapeError where they are not a row for each.
    """
    if not samplers:
        return []
    _check_shape(samplers, logits)
    results: list[Any] = [None] * len(samplers)
    records = []
    for i, sampler in enumerate(samplers):
        records.append(sampler.prepare(allow_end))
        if sampler.params.logits_processors or sampler.params.grammar is not None:
            try:
                sampler.process(logits[i])
            except KukriError as error:
                results[i] = error
    sampling.choose(records, logits)
    for i, sampler in enumerate(samplers):
        if results[i] is None:
            try:
                results[i] = sampler.finish(logits[i])
            except KukriError as error:
                results[i] = error
    return results


def token_logprobs(token_id: int, logits: FloatArray, n_top: int, sampling: SamplingBackend) -> SampledToken:
    """A given token with its log-probability by a row of logits, float32 [V], and the `n_top` most likely.

    Raises SamplingError where the logits hold NaN or +inf, or nothing but -inf.
    """
    record = SamplingRecord(is_given=1, token=token_id)
    _ask_for_top(record, n_top)
    sampling.choose([record], logits[None])
    if record.status != sampling_record.CHOSEN:
        raise _failure(record)
    return _with_logprobs(record, logits)


def _with_logprobs(record: SamplingRecord, row: FloatArray) -> SampledToken:
    log_total = record.peak + math.log(record.sum_exp)
    top: tuple[tuple[int, float], ...] = ()
    if record.n_top:
        ids, logits = record.tables["top"]
        found = zip(ids[: record.n_top_found].tolist(), logits[: record.n_top_found].tolist(), strict=True)
        # stable: of equals the lowest id first
        top = tuple((i, x - log_total) for i, x in sorted(found, key=_minus_logit))
    return SampledToken(record.token, float(row[record.token]) - log_total, top)


def _minus_logit(entry: tuple[int, float]) -> float:
    return -entry[1]


def _ask_for_top(record: SamplingRecord, n_top: int) -> None:
    record.set_table("top", n_top, np.zeros(n_top, np.int32), np.zeros(n_top, np.float32))


def _record_of(params: SamplingParams) -> SamplingRecord:
    """The record of a request, but for what changes from token to token."""
    record = SamplingRecord(
        is_greedy=params.is_greedy,
        top_k=params.top_k,
        top_p=params.top_p,
        typical_p=params.typical_p,
        min_p_depth=math.log(params.min_p) if params.min_p else 0.0,
        top_n_sigma=params.top_n_sigma,
        xtc_threshold=params.xtc_threshold,
        temperature=max(params.temperature, _MIN_TEMPERATURE),
        temperature_range=params.dynatemp_range,
        temperature_exponent=params.dynatemp_exponent,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    stages = [sampling_record.PENALTIES + SAMPLERS.index(name) for name in params.active_stages]
    if params.mirostat:
        stages.append(sampling_record.MIROSTAT_1 if params.mirostat == 1 else sampling_record.MIROSTAT_2)
    record.stages[: len(stages)] = stages
    if params.logit_bias:
        ids = np.array(list(params.logit_bias), np.int32)
        record.set_table("bias", len(ids), ids, np.array(list(params.logit_bias.values()), np.float64))
    if params.logprobs is not None:
        _ask_for_top(record, params.logprobs)
    return record


def _processed(processor: LogitsProcessor, token_ids: IntArray, row: FloatArray) -> FloatArray:
    """The row after one of the caller's functions, checked."""
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        returned = processor(token_ids, row)
        result = row if returned is None else np.ascontiguousarray(returned, np.float32)
    except Exception as error:
        raise SamplingError(f"the logits processor {name} failed: {type(error).__name__}: {error}") from error
    if result.shape != row.shape:
        raise SamplingError(
            f"the logits processor {name} returned an array of shape {result.shape}: "
            f"it must be float32 {row.shape}, or None"
        )
    peak = float(result.max())
    if not math.isfinite(peak):
        left = "no token: every logit is -inf" if peak == -math.inf else f"{peak} in the logits"
        raise SamplingError(f"the logits processor {name} left {left}")
    return result


def _failure(record: SamplingRecord) -> SamplingError:
    if record.status == sampling_record.NONE_ALLOWED:
        return SamplingError("no token is allowed: every logit is -inf")
    return SamplingError(
        f"the logits hold {record.peak}: the model or a hook computed something that is not a number"
    )


def _check_shape(samplers: Sequence[RequestSampler], logits: FloatArray) -> None:
    n_vocab = samplers[0].n_vocab
    if logits.shape != (len(samplers), n_vocab) or logits.dtype != np.float32:
        raise ShapeError(
            f"logits {logits.dtype} {logits.shape} given for {len(samplers)} rows of {n_vocab} tokens"
        )


def _phrase_ids(name: str, params: SamplingParams, n_vocab: int) -> tuple[tuple[int, ...], ...]:
    phrases = getattr(params, name)
    if any(isinstance(phrase, str) for phrase in phrases):
        raise RequestError(f"{name} must be token ids here: give texts to LLM or the server", param=name)
    for phrase in phrases:
        _check_ids(name, phrase, n_vocab)
    return tuple(phrases)


def _check_ids(name: str, ids: Iterable[int], n_vocab: int) -> None:
    for token_id in ids:
        if token_id >= n_vocab:
            raise RequestError(
                f"{name} names token {token_id}, and the vocabulary has {n_vocab}",
                param=name,
                code="invalid_value",
            )
