"""The sampling parameters of a request, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypedDict, cast

from kukri.errors import RequestError
from kukri.sampling.grammar import CompiledGrammar, Grammar

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_LOGPROBS = 1000
MAX_BIAS = 100.0
MAX_CHOICES = 128  # answers to one prompt
MAX_PHRASES = 1000  # of bad_words, and of dry_sequence_breakers of several tokens
MAX_PHRASE_TOKENS = 64
MAX_DRAFT_TOKENS = 64  # of a request in a step
SPECULATIONS = ("off", "ngram", "draft")

# The stages of sampling, in their default order: that of llama.cpp's chain.
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip

# processor(token ids so far: int32 [n], a row of logits: float32 [V]) edits the row, or returns another.
LogitsProcessor = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ReasoningLimit:
    """A budget of reasoning tokens: after `n_tokens` of them, the token that ends the reasoning is forced.

    Reasoning begins with the token `open_id`, or with the answer if the prompt has opened it.
    """

    n_tokens: int
    open_id: int
    close_id: int
    is_open: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError on a limit below 0."""
        if not _is_integer(self.n_tokens) or self.n_tokens < 0:
            raise _wrong("reasoning_limit", "a limit of tokens, at least 0", self.n_tokens)


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for type checkers and editors."""

    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str | Sequence[int]]
    samplers: Sequence[str]
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str | Sequence[int]]
    logits_processors: Sequence[LogitsProcessor]
    grammar: Grammar | CompiledGrammar | None
    reasoning_limit: ReasoningLimit | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str | int] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    speculation: str | None
    max_draft_tokens: int | None
    prediction: str | Sequence[int]
    n: int
    best_of: int | None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request; `kukri.sampling` has the order.

    Checked when made: RequestError names the field and its allowed values. The defaults draw from the model's
    own distribution.

    Attributes:
        temperature: Divides the logits: below 1 sharper, above 1 flatter; 0 is greedy.
        dynatemp_range: The temperature moves this far down and up with the entropy; 0 is off.
        dynatemp_exponent: Exponent of the entropy's share of its largest value.
        top_k: Keeps this many of the most likely tokens; 0 keeps all.
        top_p: Keeps the most likely tokens up to this total probability; 1 keeps all.
        min_p: Keeps tokens of at least this share of the most likely token's probability; 0 is off.
        typical_p: Keeps tokens about as surprising as expected, up to this total probability; 1 keeps all.
        top_n_sigma: Keeps logits within this many standard deviations of the largest; 0 or less is off.
        xtc_probability: Probability that the most likely choices are removed; 0 is off.
        xtc_threshold: The probability that makes a token one of these choices; above 0.5 is off.
        mirostat: Version of mirostat, 1 or 2, used instead of the filters above; 0 is off.
        mirostat_tau: Target surprise of mirostat, in bits.
        mirostat_eta: Learning rate of mirostat.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen so far; 1 is off.
        presence_penalty: Subtracted from the logits of tokens generated so far.
        frequency_penalty: Subtracted from the logits once for each time a token was generated.
        repeat_last_n: The last tokens that these three penalties look at; -1 for all, 0 for none.
        dry_multiplier: Penalty for continuing a repeated sequence; 0 is off.
        dry_base: Factor by which the DRY penalty grows with each repeated token.
        dry_allowed_length: Shortest repetition, in tokens, that DRY penalizes.
        dry_penalty_last_n: The last tokens that DRY looks at; -1 for all, 0 for none.
        dry_sequence_breakers: Texts or token ids that end a repetition; a text stands for all tokens that
            contain it.
        samplers: The stages of sampling in order; those left out are off.
        logit_bias: Numbers added to logits, by token id; not part of the hash.
        bad_words: Texts, or sequences of token ids, that must not be generated.
        logits_processors: Functions (token ids int32 [n], logits float32 [V]) that edit a row of logits or
            return another, before everything else.
        grammar: A grammar that the text must match, such as `Grammar.json(schema)`.
        reasoning_limit: The reasoning budget; None for no limit.
        seed: Seed of the random numbers; None draws another one each time.
        max_tokens: Most tokens to generate; None until the context is full.
        min_tokens: Tokens to generate before an end-of-text token, stop id or stop string may end the answer.
        stop: A string, or a sequence of strings and token ids, before which the text ends. Becomes a tuple of
            the strings without repeats; the ids move to `stop_token_ids`.
        stop_token_ids: Token ids that end the answer; becomes a tuple without repeats.
        ignore_eos: Continues after an end-of-text token.
        logprobs: Number of most likely tokens whose log-probabilities (nats) are reported beside the chosen
            one's; None for none.
        prompt_logprobs: The same for each token of the prompt.
        speculation: Source of draft tokens, which save time and change no answer: "off", "ngram" (the text so
            far and `prediction`) or "draft" (a draft model); None as the engine is set.
        max_draft_tokens: Most draft tokens in a step; None as the engine is set.
        prediction: A text or token ids that the answer may resemble, for n-gram drafts.
        n: Number of answers.
        best_of: Number of answers generated, of which the `n` most likely are returned; None for `n`.
    """

    temperature: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str | Sequence[int]] = ("\n", ":", '"', "*")
    samplers: Sequence[str] = SAMPLERS
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str | Sequence[int]] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    grammar: Grammar | CompiledGrammar | None = None
    reasoning_limit: ReasoningLimit | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str | int] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: str | None = None
    max_draft_tokens: int | None = None
    prediction: str | Sequence[int] = ()
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        """Raises RequestError, whose `param` is the field, on a value of the wrong type or range."""
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("dynatemp_range", 0.0, math.inf)
        self._number("dynatemp_exponent", 0.0, math.inf)
        self._number("typical_p", 0.0, 1.0)
        self._number("top_n_sigma", -1.0, math.inf)
        self._number("xtc_probability", 0.0, 1.0)
        self._number("xtc_threshold", 0.0, 1.0)
        self._number("mirostat_tau", 0.0, 100.0)
        self._number("mirostat_eta", 0.0, 1.0)
        self._number("dry_multiplier", 0.0, 1e6)
        self._number("dry_base", 1.0, 1e6)
        self._integer("mirostat", 0, 2)
        self._integer("repeat_last_n", -1)
        self._integer("dry_allowed_length", 1)
        self._integer("dry_penalty_last_n", -1)
        self._integer("top_k", 0)
        self._integer("n", 1, MAX_CHOICES)
        self._integer("best_of", self.n, MAX_CHOICES, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("min_tokens", 0)
        self._integer("seed", SEED_MIN, SEED_MAX, optional=True)
        self._integer("max_tokens", 1, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("max_draft_tokens", 1, MAX_DRAFT_TOKENS, optional=True)
        self._set("prediction", _checked_prediction(self.prediction))
        if self.speculation not in (None, *SPECULATIONS):
            raise _wrong("speculation", f"one of {', '.join(SPECULATIONS)}, or None", self.speculation)
        if self.prediction and self.speculation not in (None, "ngram"):
            raise _wrong("speculation", "ngram, as a prediction is given", self.speculation)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "True or False", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"at most max_tokens, {self.max_tokens}", self.min_tokens)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        texts, ids = _checked_stop(self.stop, self.stop_token_ids)
        self._set("stop", texts)
        self._set("stop_token_ids", ids)
        for name in ("bad_words", "dry_sequence_breakers"):
            self._set(name, _checked_phrases(name, getattr(self, name)))
        self._set("logits_processors", _checked_processors(self.logits_processors))
        self._set("samplers", _checked_samplers(self.samplers))
        self._check_stages()
        self._check_grammar()

    @property
    def is_greedy(self) -> bool:
        """True if the largest logit always wins."""
        return self.temperature == 0.0

    @property
    def n_generated_answers(self) -> int:
        """Answers to generate: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def active_stages(self) -> tuple[str, ...]:
        """The stages that change something, in order."""
        is_on = self._stages_on()
        return tuple(name for name in self.samplers if is_on[name])

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop`, always a tuple."""
        return cast("tuple[str, ...]", self.stop)

    def _stages_on(self) -> dict[str, bool]:
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0
        return {
            "penalties": (has_penalty or self.frequency_penalty != 0.0) and self.repeat_last_n != 0,
            "dry": self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0.0,
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
            "xtc": self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1.0 or self.dynatemp_range > 0.0,
        }

    def _check_stages(self) -> None:
        """Raises RequestError if a parameter that is set would have no effect."""
        for stage, is_on in self._stages_on().items():
            if is_on and stage not in self.samplers and not (stage == "temperature" and self.is_greedy):
                raise _wrong("samplers", f"a list that names {stage}, which is set", list(self.samplers))
            if is_on and self.mirostat and stage not in ("penalties", "dry", "temperature"):
                raise _wrong("mirostat", f"0 where {stage} is set, whose place it takes", self.mirostat)

    def _check_grammar(self) -> None:
        if self.reasoning_limit is not None and not isinstance(self.reasoning_limit, ReasoningLimit):
            raise _wrong("reasoning_limit", "a ReasoningLimit or None", self.reasoning_limit)
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar | CompiledGrammar):
            raise _wrong("grammar", "a Grammar, such as Grammar.json(schema), or None", self.grammar)
        if self.ignore_eos:
            raise _wrong("ignore_eos", "False where a grammar says when the text ends", True)
        if self.min_tokens:
            raise _wrong("min_tokens", "0 where a grammar says when the text ends", self.min_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        allowed = f"a number, at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
        if not _is_number(value) or not low <= value <= high:
            raise _wrong(name, allowed, value)
        self._set(name, float(value))

    def _integer(self, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        allowed = f"an integer, at least {low}" if high is None else f"an integer from {low} to {high}"
        if not _is_integer(value) or value < low or (high is not None and value > high):
            raise _wrong(name, allowed + (", or None" if optional else ""), value)
        self._set(name, int(value))


def _wrong(name: str, allowed: str, value: object) -> RequestError:
    shown = repr(value)
    return RequestError(f"{name} must be {allowed}, not {shown[:60]}", param=name, code="invalid_value")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """True if value is a finite real number that fits a float (a bool is not a number)."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _checked_bias(bias: Any) -> dict[int, float]:
    allowed = f"token ids (integers, at least 0) with numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    if not isinstance(bias, Mapping):
        raise _wrong("logit_bias", f"a mapping of {allowed}", bias)
    for token_id, value in bias.items():
        if not _is_integer(token_id) or token_id < 0 or not _is_number(value) or abs(value) > MAX_BIAS:
            raise _wrong("logit_bias", f"a mapping of {allowed}", {token_id: value})
    return {int(token_id): float(value) for token_id, value in bias.items()}


def _checked_stop(stop: Any, stop_token_ids: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The stop strings and the stop ids, those given in `stop` included."""
    allowed = "a non-empty string, or a sequence of non-empty strings and token ids"
    entries = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(entries, Sequence) or isinstance(entries, bytes | bytearray):
        raise _wrong("stop", allowed, stop)
    for entry in entries:
        if not (isinstance(entry, str) and entry) and not (_is_integer(entry) and entry >= 0):
            raise _wrong("stop", allowed, entry)
    ids = stop_token_ids
    if not isinstance(ids, Sequence) or not all(_is_integer(i) and i >= 0 for i in ids):
        raise _wrong("stop_token_ids", "a sequence of token ids (integers, at least 0)", ids)
    texts = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, str)))
    from_stop = [int(entry) for entry in entries if not isinstance(entry, str)]
    return texts, tuple(dict.fromkeys([*map(int, ids), *from_stop]))


def _checked_phrases(name: str, phrases: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts and sequences of token ids, without repeats."""
    allowed = (
        f"at most {MAX_PHRASES} non-empty strings or sequences of 1 to {MAX_PHRASE_TOKENS} token ids "
        "(integers, at least 0)"
    )
    phrases = () if phrases is None else phrases
    if isinstance(phrases, str | bytes) or not isinstance(phrases, Sequence):
        raise _wrong(name, allowed, phrases)
    checked: list[str | tuple[int, ...]] = []
    for phrase in phrases:
        if isinstance(phrase, str) and phrase:
            checked.append(phrase)
        elif (
            isinstance(phrase, Sequence)
            and not isinstance(phrase, str | bytes)
            and 1 <= len(phrase) <= MAX_PHRASE_TOKENS
            and all(_is_integer(i) and i >= 0 for i in phrase)
        ):
            checked.append(tuple(int(i) for i in phrase))
        else:
            raise _wrong(name, allowed, phrase)
    if sum(1 for phrase in checked if name == "bad_words" or len(phrase) > 1) > MAX_PHRASES:
        raise _wrong(name, allowed, checked)
    return tuple(dict.fromkeys(checked))


def _checked_prediction(prediction: Any) -> str | tuple[int, ...]:
    if isinstance(prediction, str):
        return prediction
    prediction = () if prediction is None else prediction
    if not isinstance(prediction, Sequence) or not all(_is_integer(i) and i >= 0 for i in prediction):
        raise _wrong("prediction", "a text or a sequence of token ids (integers, at least 0)", prediction)
    return tuple(int(i) for i in prediction)


def _checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        raise _wrong("logits_processors", "a sequence of functions", processors)
    return tuple(processors)


def _checked_samplers(samplers: Any) -> tuple[str, ...]:
    allowed = f"a sequence of different names out of {', '.join(SAMPLERS)}"
    if isinstance(samplers, str) or not isinstance(samplers, Sequence):
        raise _wrong("samplers", allowed, samplers)
    for name in samplers:
        if name not in SAMPLERS or list(samplers).count(name) > 1:
            raise _wrong("samplers", allowed, name)
    return tuple(samplers)
