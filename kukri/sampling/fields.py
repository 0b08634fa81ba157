"""Declares a field of `SamplingParams` once: its type and default, and here its range, help and other names.

From it follow the check of its value, the bodies of the server's APIs, the options of the command line and of
the plugin for llm, the page's controls, and the table in docs/sampling.md. Imports no NumPy: the command line
reads this at each start.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from numbers import Integral, Real
from typing import Any, Literal

from kukri.dataclass import dataclass
from kukri.errors import RequestError

MAX_COUNT = 2**31 - 1  # the most tokens; the largest token id
MAX_FACTOR = 1e6
MAX_TEXT = 1000  # characters of a stop string, a bad word, a breaker, a text with a bias
MAX_PHRASES = 1000  # the most bad_words, and stop ids
MAX_PHRASE_TOKENS = 64
MAX_STOPS = 64  # stop strings; texts of dry_sequence_breakers, and sequences of several tokens
MAX_BIASES = 2**15  # entries of logit_bias
MAX_BIAS = 100.0

Kind = Literal["number", "integer", "switch", "choice", "names", "texts", "phrases", "ids", "bias", "object"]


@dataclass(frozen=True, kw_only=True)
class FieldFacts:
    """What is known of a field beyond its type and default.

    `low` and `high` bound a number, and the entries of a list as `most` bounds how many these are. A field
    with `flags` is an option of the command line, one with `ollama` or `llama_cpp` has that name there, and
    one `on_page` has a control there. An "object" has no form in JSON: APIs have others for it, or none.
    """

    kind: Kind
    help: str
    low: float = 0
    high: float = 0
    most: int = 0
    is_optional: bool = False
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str = "N"
    ollama: str | None = None
    llama_cpp: str | None = None
    on_page: bool = False

    @property
    def allowed(self) -> str:
        """The values that a number may have, as an error says it."""
        noun = "an integer" if self.kind == "integer" else "a number"
        text = f"{noun} from {_shown(self.low)} to {_shown(self.high)}"
        return f"{text}, or None" if self.is_optional else text

    def checked(self, name: str, value: Any) -> Any:
        """A number of Python's own type, or None. Raises RequestError."""
        if value is None and self.is_optional:
            return None
        is_right = is_integer if self.kind == "integer" else is_number
        if not is_right(value) or not self.low <= value <= self.high:
            raise wrong_value(name, self.allowed, value)
        return int(value) if self.kind == "integer" else float(value)


def number(default: float, low: float, high: float, help: str, **facts: Any) -> Any:
    """A field of SamplingParams that is a number."""
    return _declared(default, FieldFacts(kind="number", help=help, low=low, high=high, **facts))


def integer(default: int | None, low: int, high: int, help: str, **facts: Any) -> Any:
    """A field of SamplingParams that is an integer."""
    return _declared(default, FieldFacts(kind="integer", help=help, low=low, high=high, **facts))


def other(default: Any, kind: Kind, help: str, *, is_hashed: bool = True, **facts: Any) -> Any:
    """A field of SamplingParams of another kind."""
    return _declared(default, FieldFacts(kind=kind, help=help, **facts), is_hashed=is_hashed)


def _declared(default: Any, facts: FieldFacts, *, is_hashed: bool = True) -> Any:
    return dataclasses.field(default=default, hash=None if is_hashed else False, metadata={"facts": facts})


def facts_of(params: type[Any]) -> Iterator[tuple[str, FieldFacts]]:
    """The fields of a class declared so, in order."""
    for field in dataclasses.fields(params):
        yield field.name, field.metadata["facts"]


def described(params: type[Any]) -> str:
    """The "Attributes" part of its docstring."""
    return "Attributes:\n" + "\n".join(f"    {name}: {facts.help}" for name, facts in facts_of(params))


def wrong_value(name: str, allowed: str, value: object) -> RequestError:
    """The error about a value of a field."""
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits
        shown = "a huge number"
    return RequestError.of(name, f"must be {allowed}, not {shown[:60]}", code="invalid_value")


def is_integer(value: object) -> bool:
    """True for an integer, NumPy's too, that is not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for a finite real number that fits a float; a bool is not one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def are_within(values: Collection[Any], low: float, high: float, *kinds: type) -> bool:
    """True if all are finite numbers of these types and in this range; a millisecond for thousands."""
    found = set(map(type, values))
    if not found or not found <= set(kinds):
        return not found
    return (
        low <= min(values) and max(values) <= high and (float not in found or all(map(math.isfinite, values)))
    )


def is_id(value: Any) -> bool:
    """True for a number that can be a token's id in some vocabulary."""
    return is_integer(value) and 0 <= value <= MAX_COUNT


def _shown(limit: float) -> str:
    return f"{limit:g}" if abs(limit) <= MAX_FACTOR else str(int(limit))
