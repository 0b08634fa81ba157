"""What a request may ask of the sampler, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

from kukri.errors import RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_LOGPROBS = 1000
MAX_BIAS = 100.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; `kukri.sampling` has the order.

    Checked when made: RequestError names the field and what it may be. The defaults draw from the model's
    own distribution. `stop` takes a string, or a sequence of strings and token ids: ids are moved to
    `stop_token_ids`, and both become tuples without repeats.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # tokens kept; 0: all
    top_p: float = 1.0  # probability kept; 1: all
    min_p: float = 0.0  # least probability, as a share of the most likely token's; 0: off
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens seen so far
    presence_penalty: float = 0.0  # taken from the logits of generated tokens
    frequency_penalty: float = 0.0  # taken from them once for each time they were generated
    # token id -> what its logit gains; not hashed, so that params are hashable
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None  # None: other tokens each time
    max_tokens: int | None = 256  # generated at most; None: until the context is full
    min_tokens: int = 0  # generated before an end-of-text or stop id may come
    stop: str | Sequence[str | int] | None = ()  # generation ends before this text
    stop_token_ids: Sequence[int] = ()  # generation ends at these ids
    ignore_eos: bool = False  # goes on after an end-of-text token
    logprobs: int | None = (
        None  # most likely tokens reported beside the chosen one; None: no log-probabilities
    )

    def __post_init__(self) -> None:
        """Raises RequestError, whose `param` is the field, on a value of the wrong type or range."""
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("top_k", 0)
        self._integer("min_tokens", 0)
        self._integer("seed", SEED_MIN, SEED_MAX, optional=True)
        self._integer("max_tokens", 1, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "True or False", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"at most max_tokens, {self.max_tokens}", self.min_tokens)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        texts, ids = _checked_stop(self.stop, self.stop_token_ids)
        self._set("stop", texts)
        self._set("stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit always wins."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop`, always a tuple."""
        return cast("tuple[str, ...]", self.stop)

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
    """Whether value is a finite real number that fits a float (a bool is not a number)."""
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
