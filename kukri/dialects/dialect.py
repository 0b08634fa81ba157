"""`Dialect`: how a model family writes reasoning and tool calls, as data.

The families are in `families.py`. A dialect says which marks are around calls and reasoning and how the body
of a call is written; `tool_parser.py` and `thoughts.py` read that, `call_grammar.py` enforces it, and
`written` writes earlier calls for templates that print none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kukri.dataclass import dataclass, field
from kukri.dialects.thoughts import Thoughts

# json: {"name": …, "arguments": …}; named: name{…}; tagged: <function=name><parameter=key>…;
# keys: name<arg_key>…; python: name(key=value); gemma: call:name{key:value}; harmony: a message to it
Body = Literal["json", "named", "tagged", "keys", "python", "gemma", "harmony"]

MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


@dataclass(frozen=True)
class Around:
    """What a family writes around calls: `before` and `after` all of them, `open` and `close` at each one.

    `between` stands between two. Where a name and its arguments are apart, `head`, `neck` and `tail` are
    around them: before the name, after it, and after the arguments. `edge` is around each value.
    """

    before: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    after: str = ""
    head: str = ""
    neck: str = ""
    tail: str = ""
    edge: str = ""

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks that come before a call."""
        return tuple(MARK.findall(self.before + self.open))

    @property
    def closers(self) -> tuple[str, ...]:
        """The marks that come after a call."""
        return tuple(MARK.findall(self.close + self.after))


@dataclass(frozen=True)
class Dialect:
    """How a family writes reasoning and calls.

    `signs` are texts of its chat template, or tokens of its vocabulary. A model matches if it has all of a
    tuple.
    """

    name: str
    body: Body
    around: Around = field(default_factory=Around)
    signs: tuple[tuple[str, ...], ...] = ()
    thoughts: Thoughts = field(default_factory=Thoughts)
    also: tuple[str, ...] = ()  # further marks before a call
    arguments_key: str = "arguments"
    begins_bare: bool = False  # without a mark, at the beginning of the answer
    reads_code: bool = False  # <code>name(key=value)</code> is a call too
    id_length: int | None = None  # the length of ids that the template accepts
    most_calls: int | None = None  # in one message: the template takes no more
    is_generic: bool = False  # the template knows no tools: the system prompt shows them

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks before a call in the family's own form."""
        return (*self.around.openers, *self.also)

    def can_reason(self, template: str) -> bool:
        """True if a chat template has the marks of the family's reasoning."""
        return self.body == "harmony" or self.thoughts.opener in template

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Names and arguments as the model writes them."""
        if self.reads_code:
            lines = "".join(f"{_python(name, given, repr)}\n" for name, given in calls)
            return f"<code>\n{lines}</code>"
        around = self.around
        bodies = [
            f"{around.open}{_WRITERS[self.body](self, name, given)}{around.close}" for name, given in calls
        ]
        return f"{around.before}{around.between.join(bodies)}{around.after}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write_json(dialect: Dialect, name: str, given: Mapping[str, Any]) -> str:
    return _json({"name": name, dialect.arguments_key: given})


def _write_named(dialect: Dialect, name: str, given: Mapping[str, Any]) -> str:
    return f"{dialect.around.head}{name}{dialect.around.neck}{_json(given)}{dialect.around.tail}"


def _write_tagged(dialect: Dialect, name: str, given: Mapping[str, Any]) -> str:
    edge = dialect.around.edge
    tags = (f"<parameter={key}>{edge}{_text(value)}{edge}</parameter>\n" for key, value in given.items())
    return f"<function={name}>\n{''.join(tags)}</function>"


def _write_keys(_: Dialect, name: str, given: Mapping[str, Any]) -> str:
    tags = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in given.items()
    )
    return f"{name}\n{''.join(tags)}"


def _write_python(_: Dialect, name: str, given: Mapping[str, Any]) -> str:
    return _python(name, given, repr)


def _write_gemma(dialect: Dialect, name: str, given: Mapping[str, Any]) -> str:
    return f"{dialect.around.head}{name}{_gemma(given, dialect.around.edge)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _python(name: str, given: Mapping[str, Any], write: Callable[[Any], str]) -> str:
    return f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return _json(value)


_WRITERS: dict[Body, Callable[[Dialect, str, Mapping[str, Any]], str]] = {
    "json": _write_json,
    "named": _write_named,
    "tagged": _write_tagged,
    "keys": _write_keys,
    "python": _write_python,
    "gemma": _write_gemma,
}
