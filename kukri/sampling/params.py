"""The sampling parameters of a request, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import indent
from typing import Any, TypedDict, Unpack, cast, get_args

from kukri.config import Speculation
from kukri.dataclass import dataclass, replace
from kukri.kernels.sampling_stages import STAGES
from kukri.sampling.fields import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_PHRASE_TOKENS,
    MAX_PHRASES,
    MAX_STOPS,
    MAX_TEXT,
    are_within,
    described,
    facts_of,
    integer,
    is_id,
    is_integer,
    is_number,
    number,
    other,
    wrong_value,
)
from kukri.sampling.grammar import CompiledGrammar, Grammar

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_LOGPROBS = 1000
MAX_CHOICES = 128  # answers to one prompt
MAX_DRAFT_TOKENS = 64  # per request and step
SPECULATIONS = get_args(Speculation)
_A_PHRASE = f"a string of 1 to {MAX_TEXT} characters, or a sequence of 1 to {MAX_PHRASE_TOKENS} token ids"

SAMPLERS = tuple(stage.name for stage in STAGES)

# processor(token ids so far: int32 [n], a row of logits: float32 [V]) edits the row, or returns another.
LogitsProcessor = Callable[[Any, Any], Any]


class TokenSet(frozenset[int]):
    """Token ids each of which ends a repetition: what a text of `dry_sequence_breakers` becomes."""


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
        if not is_integer(self.n_tokens) or self.n_tokens < 0:
            raise wrong_value("reasoning_limit", "a limit of tokens, at least 0", self.n_tokens)


# Written by packaging/sampling_options.py, because type checkers derive nothing from a dataclass
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
    own distribution, without the model's advice, which `LLM.default_params` has: begin with
    `llm.default_params.replace(max_tokens=64)` to keep it. With `max_tokens` None an answer may fill the
    context. `stop` and `stop_token_ids` become tuples without repeats.
    """

    # fmt: off
    temperature: float = number(
        1.0, 0, MAX_FACTOR,
        "Divide the logits by this: below 1 sharper, above 1 flatter; 0 always takes the likeliest token.",
        flags=("--temperature", "-t"), metavar="T", ollama="temperature", llama_cpp="temperature",
        on_page=True,
    )
    dynatemp_range: float = number(
        0.0, 0, MAX_FACTOR, "Move the temperature this far down and up with the entropy; 0 is off.",
        llama_cpp="dynatemp_range",
    )
    dynatemp_exponent: float = number(
        1.0, 0, MAX_FACTOR, "Exponent of the entropy's share of its largest value.",
        llama_cpp="dynatemp_exponent",
    )
    top_k: int = integer(
        0, -MAX_COUNT, MAX_COUNT, "Keep this many of the most likely tokens; 0 or less keeps all.",
        flags=("--top-k",), metavar="K", ollama="top_k", llama_cpp="top_k", on_page=True,
    )
    top_p: float = number(
        1.0, 0, 1, "Keep the most likely tokens up to this total probability; 1 keeps all.",
        flags=("--top-p",), metavar="P", ollama="top_p", llama_cpp="top_p", on_page=True,
    )
    min_p: float = number(
        0.0, 0, 1, "Keep tokens of at least this share of the likeliest token's probability; 0 is off.",
        flags=("--min-p",), metavar="P", ollama="min_p", llama_cpp="min_p", on_page=True,
    )
    typical_p: float = number(
        1.0, 0, 1, "Keep tokens about as surprising as expected, up to this total probability; 1 keeps all.",
        ollama="typical_p", llama_cpp="typical_p",
    )
    top_n_sigma: float = number(
        0.0, -1, MAX_FACTOR,
        "Keep logits within this many standard deviations of the largest; 0 or less is off.",
        llama_cpp="top_n_sigma",
    )
    xtc_probability: float = number(
        0.0, 0, 1, "Probability that the most likely choices are removed; 0 is off.",
        llama_cpp="xtc_probability",
    )
    xtc_threshold: float = number(
        0.1, 0, 1, "The probability that makes a token one of these choices; above 0.5 is off.",
        llama_cpp="xtc_threshold",
    )
    mirostat: int = integer(
        0, 0, 2, "Version of mirostat, 1 or 2, used instead of the filters above; 0 is off.",
        ollama="mirostat", llama_cpp="mirostat",
    )
    mirostat_tau: float = number(
        5.0, 0, 100, "Target surprise of mirostat, in bits.", ollama="mirostat_tau", llama_cpp="mirostat_tau"
    )
    mirostat_eta: float = number(
        0.1, 0, 1, "Learning rate of mirostat.", ollama="mirostat_eta", llama_cpp="mirostat_eta"
    )
    repetition_penalty: float = number(
        1.0, 0.01, 100, "Divide positive and multiply negative logits of tokens seen so far; 1 is off.",
        flags=("--repetition-penalty",), metavar="X",
        ollama="repeat_penalty", llama_cpp="repeat_penalty", on_page=True,
    )
    presence_penalty: float = number(
        0.0, -2, 2, "Subtract this from the logits of tokens generated so far.",
        flags=("--presence-penalty",), metavar="X",
        ollama="presence_penalty", llama_cpp="presence_penalty", on_page=True,
    )
    frequency_penalty: float = number(
        0.0, -2, 2, "Subtract this from a token's logit for each time it was generated.",
        flags=("--frequency-penalty",), metavar="X",
        ollama="frequency_penalty", llama_cpp="frequency_penalty", on_page=True,
    )
    repeat_last_n: int = integer(
        -1, -1, MAX_COUNT, "The last tokens that these three penalties look at; -1 for all, 0 for none.",
        ollama="repeat_last_n", llama_cpp="repeat_last_n",
    )
    dry_multiplier: float = number(
        0.0, 0, MAX_FACTOR, "Penalty for continuing a repeated sequence; 0 is off.",
        llama_cpp="dry_multiplier",
    )
    dry_base: float = number(
        1.75, 1, MAX_FACTOR, "Factor by which the DRY penalty grows with each repeated token.",
        llama_cpp="dry_base",
    )
    dry_allowed_length: int = integer(
        2, 1, MAX_COUNT, "Shortest repetition, in tokens, that DRY penalizes.",
        llama_cpp="dry_allowed_length",
    )
    dry_penalty_last_n: int = integer(
        -1, -1, MAX_COUNT, "The last tokens that DRY looks at; -1 for all, 0 for none.",
        llama_cpp="dry_penalty_last_n",
    )
    dry_sequence_breakers: Sequence[str | Sequence[int]] = other(
        ("\n", ":", '"', "*"), "phrases",
        "Texts or token ids that end a repetition; a text stands for all tokens that contain it.",
        most=MAX_STOPS,
    )
    samplers: Sequence[str] = other(
        SAMPLERS, "names", "The stages of sampling in order; those left out are off.", choices=SAMPLERS
    )
    logit_bias: Mapping[int, float] | None = other(
        None, "bias", "Numbers added to logits, by token id; not part of the hash.",
        low=-MAX_BIAS, high=MAX_BIAS, most=MAX_BIASES, is_optional=True, is_hashed=False,
    )
    bad_words: Sequence[str | Sequence[int]] = other(
        (), "phrases", "Texts, or sequences of token ids, that must not be generated.",
        most=MAX_PHRASES // 2,
    )
    logits_processors: Sequence[LogitsProcessor] = other(
        (), "object",
        "Functions (token ids int32 [n], logits float32 [V]) that edit a row of logits or return another, "
        "before everything else.",
    )
    grammar: Grammar | CompiledGrammar | None = other(
        None, "object", "A grammar that the text must match, such as `Grammar.json(schema)`."
    )
    reasoning_limit: ReasoningLimit | None = other(
        None, "object", "The reasoning budget; None for no limit."
    )
    seed: int | None = integer(
        None, SEED_MIN, SEED_MAX, "Seed of the random numbers; without one, answers differ each time.",
        is_optional=True, flags=("--seed",), ollama="seed", llama_cpp="seed", on_page=True,
    )
    max_tokens: int | None = integer(
        256, 1, MAX_COUNT, "Maximum number of tokens to generate.",
        is_optional=True, flags=("--max-tokens", "-n"),
        ollama="num_predict", llama_cpp="n_predict", on_page=True,
    )
    min_tokens: int = integer(
        0, 0, MAX_COUNT,
        "Tokens to generate before an end-of-text token, stop id or stop string may end the answer.",
    )
    stop: str | Sequence[str | int] | None = other(
        (), "texts",
        "Text before which the answer ends, or several; token ids among them move to `stop_token_ids`.",
        most=MAX_STOPS, is_optional=True, flags=("--stop",), metavar="TEXT", ollama="stop", llama_cpp="stop",
    )
    stop_token_ids: Sequence[int] = other(
        (), "ids", "Token ids that end the answer.", most=MAX_PHRASES
    )
    ignore_eos: bool = other(
        False, "switch", "Continue after an end-of-text token.",
        flags=("--ignore-eos",), llama_cpp="ignore_eos",
    )
    logprobs: int | None = integer(
        None, 0, MAX_LOGPROBS,
        "Number of most likely tokens whose log-probabilities (nats) are reported besides the chosen one's; "
        "None for none.",
        is_optional=True, llama_cpp="n_probs",
    )
    prompt_logprobs: int | None = integer(
        None, 0, MAX_LOGPROBS, "The same for each token of the prompt.", is_optional=True
    )
    speculation: str | None = other(
        None, "choice",
        'Source of draft tokens, which save time and change no answer: "off", "ngram" (the text so far, '
        '`prediction` and earlier answers) or "draft" (a draft model too); None for the '
        'setting of the engine.',
        choices=SPECULATIONS, is_optional=True,
    )
    max_draft_tokens: int | None = integer(
        None, 1, MAX_DRAFT_TOKENS, "Most draft tokens in a step; None for the setting of the engine.",
        is_optional=True,
    )
    prediction: str | Sequence[int] = other(
        (), "object", "A text or token ids that the answer may resemble, for n-gram drafts."
    )
    n: int = integer(1, 1, MAX_CHOICES, "Number of answers.")
    best_of: int | None = integer(
        None, 1, MAX_CHOICES,
        "Number of answers generated, of which the `n` most likely are returned; None for `n`.",
        is_optional=True,
    )
    # fmt: on

    def __post_init__(self) -> None:
        """Raises RequestError, whose `param` is the field, on a value of the wrong type or range."""
        for name, facts in facts_of(SamplingParams):
            if facts.kind in ("number", "integer"):
                self._set(name, facts.checked(name, getattr(self, name)))
        self._set("top_k", max(self.top_k, 0))
        if self.best_of is not None and self.best_of < self.n:
            raise wrong_value("best_of", f"from n ({self.n}) to {MAX_CHOICES}", self.best_of)
        self._set("prediction", _checked_prediction(self.prediction))
        if self.speculation not in (None, *SPECULATIONS):
            raise wrong_value("speculation", f"one of {', '.join(SPECULATIONS)}, or None", self.speculation)
        if self.prediction and self.speculation == "off":
            raise wrong_value("speculation", "ngram or draft, because a prediction is given", "off")
        if not isinstance(self.ignore_eos, bool):
            raise wrong_value("ignore_eos", "True or False", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong_value("min_tokens", f"at most 'max_tokens', {self.max_tokens}", self.min_tokens)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        texts, ids = _checked_stop(self.stop, self.stop_token_ids)
        self._set("stop", texts)
        self._set("stop_token_ids", ids)
        self._set("bad_words", _checked_bad_words(self.bad_words))
        self._set("dry_sequence_breakers", _checked_breakers(self.dry_sequence_breakers))
        self._set("logits_processors", _checked_processors(self.logits_processors))
        self._set("samplers", _checked_samplers(self.samplers))
        self._check_stages()
        self._check_grammar()

    def replace(self, **changes: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these parameters with other values for some fields.

        A `mirostat` or `samplers` among the changes switches off the stages that it rules out, unless they
        are among the changes too. Raises RequestError on values that do not work.
        """
        samplers = changes.get("samplers")
        off: dict[str, Any] = {}
        for stage in STAGES:
            is_replaced = changes.get("mirostat") and stage.kind == "filter"
            if is_replaced or (isinstance(samplers, list | tuple) and stage.name not in samplers):
                off |= {name: getattr(SamplingParams, name) for name in stage.switches}
        return replace(self, **off | cast("dict[str, Any]", changes)) if changes else self

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
        is_on = {stage.name for stage in STAGES if stage.is_on(self)}
        return tuple(name for name in self.samplers if name in is_on)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop`, always a tuple."""
        return cast("tuple[str, ...]", self.stop)

    def _check_stages(self) -> None:
        """Raises RequestError if a parameter that is set would have no effect."""
        for stage in STAGES:
            if not stage.is_on(self):
                continue
            if stage.name not in self.samplers and not (stage.kind == "scale" and self.is_greedy):
                allowed = f"a list that names {stage.name}, which is set"
                raise wrong_value("samplers", allowed, list(self.samplers))
            if self.mirostat and stage.kind == "filter":
                allowed = f"0 where {stage.name} is set, which it replaces"
                raise wrong_value("mirostat", allowed, self.mirostat)

    def _check_grammar(self) -> None:
        if self.reasoning_limit is not None and not isinstance(self.reasoning_limit, ReasoningLimit):
            raise wrong_value("reasoning_limit", "a ReasoningLimit or None", self.reasoning_limit)
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar | CompiledGrammar):
            raise wrong_value("grammar", "a Grammar, such as Grammar.json(schema), or None", self.grammar)
        if self.ignore_eos:
            raise wrong_value("ignore_eos", "False where a grammar says when the text ends", True)
        if self.min_tokens:
            raise wrong_value("min_tokens", "0 where a grammar says when the text ends", self.min_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _checked_bias(bias: Any) -> dict[int, float]:
    allowed = (
        f"a mapping of at most {MAX_BIASES} token ids (integers, at least 0) with numbers from "
        f"{-MAX_BIAS:g} to {MAX_BIAS:g}"
    )
    if not isinstance(bias, Mapping):
        raise wrong_value("logit_bias", allowed, bias)
    if len(bias) > MAX_BIASES:
        raise wrong_value("logit_bias", allowed, len(bias))
    values = bias.values()
    if not (are_within(bias, 0, MAX_COUNT, int) and are_within(values, -MAX_BIAS, MAX_BIAS, int, float)):
        for token_id, value in bias.items():  # NumPy's numbers are well, others not
            if not is_id(token_id) or not is_number(value) or abs(value) > MAX_BIAS:
                raise wrong_value("logit_bias", allowed, {token_id: value})
    return dict(zip(map(int, bias), map(float, values), strict=True))


def _checked_stop(stop: Any, stop_token_ids: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The stop strings and the stop ids, those given in `stop` included."""
    allowed = (
        f"a string of 1 to {MAX_TEXT} characters, or a sequence of at most {MAX_STOPS} such strings and of "
        "token ids"
    )
    entries = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(entries, Sequence) or isinstance(entries, bytes | bytearray):
        raise wrong_value("stop", allowed, stop)
    for entry in entries:
        if not (isinstance(entry, str) and 1 <= len(entry) <= MAX_TEXT) and not is_id(entry):
            raise wrong_value("stop", allowed, entry)
    texts = tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, str)))
    if len(texts) > MAX_STOPS:
        raise wrong_value("stop", allowed, len(texts))
    ids, allowed = stop_token_ids, f"a sequence of at most {MAX_PHRASES} token ids (integers, at least 0)"
    if not isinstance(ids, Sequence) or not all(map(is_id, ids)):
        raise wrong_value("stop_token_ids", allowed, ids)
    from_stop = [int(entry) for entry in entries if not isinstance(entry, str)]
    unique = tuple(dict.fromkeys([*map(int, ids), *from_stop]))
    if len(unique) > MAX_PHRASES:
        raise wrong_value("stop_token_ids", allowed, len(unique))
    return texts, unique


def _checked_bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    allowed = f"at most {MAX_PHRASES} phrases (a text counts as two): {_A_PHRASE}"
    checked = _checked_phrases("bad_words", words, allowed)
    if (n := sum(2 if isinstance(word, str) else 1 for word in checked)) > MAX_PHRASES:
        raise wrong_value("bad_words", allowed, n)
    return checked


def _checked_breakers(breakers: Any) -> tuple[str | tuple[int, ...], ...]:
    resolved: tuple[Any, ...] = ()
    if isinstance(breakers, Sequence):
        resolved = tuple(one for one in breakers if isinstance(one, TokenSet))  # a set may hold thousands
        breakers = [one for one in breakers if not isinstance(one, TokenSet)] if resolved else breakers
    name, allowed = "dry_sequence_breakers", f"at most {MAX_STOPS} strings, and token ids: {_A_PHRASE}"
    checked = _checked_phrases(name, breakers, allowed)
    if (n := sum(isinstance(one, str) for one in checked)) > MAX_STOPS:
        raise wrong_value(name, allowed, n)
    if (n := sum(len(one) > 1 for one in checked if isinstance(one, tuple))) > MAX_STOPS:
        raise wrong_value(name, f"at most {MAX_STOPS} sequences of several token ids", n)
    return (*resolved, *checked)


def _checked_phrases(name: str, phrases: Any, allowed: str) -> tuple[str | tuple[int, ...], ...]:
    """Texts and sequences of token ids, without repeats."""
    phrases = () if phrases is None else phrases
    if isinstance(phrases, str | bytes) or not isinstance(phrases, Sequence):
        raise wrong_value(name, allowed, phrases)
    if name == "bad_words" and len(phrases) > MAX_PHRASES:
        raise wrong_value(name, allowed, len(phrases))
    checked: list[str | tuple[int, ...]] = []
    for phrase in phrases:
        if isinstance(phrase, str) and 1 <= len(phrase) <= MAX_TEXT:
            checked.append(phrase)
        elif (
            isinstance(phrase, Sequence)
            and not isinstance(phrase, str | bytes)
            and 1 <= len(phrase) <= MAX_PHRASE_TOKENS
            and all(map(is_id, phrase))
        ):
            checked.append(tuple(int(i) for i in phrase))
        else:
            raise wrong_value(name, allowed, phrase)
    return tuple(dict.fromkeys(checked))


def _checked_prediction(prediction: Any) -> str | tuple[int, ...]:
    if isinstance(prediction, str):
        return prediction
    prediction = () if prediction is None else prediction
    if not isinstance(prediction, Sequence) or not all(is_id(i) for i in prediction):
        raise wrong_value(
            "prediction", "a text or a sequence of token ids (integers, at least 0)", prediction
        )
    return tuple(int(i) for i in prediction)


def _checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
        raise wrong_value("logits_processors", "a sequence of functions", processors)
    return tuple(processors)


def _checked_samplers(samplers: Any) -> tuple[str, ...]:
    allowed = f"a sequence of different names out of {', '.join(SAMPLERS)}"
    if isinstance(samplers, str) or not isinstance(samplers, Sequence):
        raise wrong_value("samplers", allowed, samplers)
    found: list[str] = []
    for name in samplers:
        if not isinstance(name, str) or name not in SAMPLERS or name in found:
            raise wrong_value("samplers", allowed, name)
        found.append(name)
    return tuple(found)


SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n{indent(described(SamplingParams), '    ')}\n    "
