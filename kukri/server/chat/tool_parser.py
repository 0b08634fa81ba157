"""Parses tool calls out of an answer as it grows.

`ToolParser` takes text and gives content and calls: the same ones however the text was cut into pieces.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kukri.server.chat.tool_dialects import CODE, CODE_END, ToolDialect
from kukri.tokenizer import n_partial

_ARGUMENTS = ("arguments", "parameters")  # how models name them, whatever they were trained on
_NAME = re.compile(r"([\w.\-]{1,64})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")
_MAX_NAME = 200  # characters between a mark and its arguments


class CallDelta(NamedTuple):
    """A piece of a call: its name at the beginning, then more of its arguments, which are JSON."""

    place: int  # among the calls, from 0
    name: str | None
    arguments: str


class ToolParser:
    """Splits a text into content and calls. White space around calls belongs to neither.

    What is not a call, because it is not JSON or has no name, stays text. `parameters` are the names of each
    tool's parameters, in order, for calls written as code.
    """

    def __init__(self, dialect: ToolDialect, parameters: Mapping[str, Sequence[str]] | None = None) -> None:
        self._dialect, self._parameters = dialect, parameters or {}
        self._openers = (dialect.opener, CODE) if dialect.reads_code else (dialect.opener,)
        self._steps = {
            "start": self._start, "text": self._text, "between": self._between, "call": self._call,
            "code": self._code,
        }  # fmt: skip
        self._state = "start"
        self._held = ""  # text not yet known to be content or call
        self._raw = ""  # text that is content after all if no call comes of it
        self._scan = _CallScan()
        self._n_sent = -1  # characters of the arguments; -1: not even the name
        self._n_calls = 0
        self._is_behind_call = self._is_last = False
        self._events: list[str | CallDelta] = []

    def push(self, text: str) -> list[str | CallDelta]:
        """The new content and calls, in order."""
        self._held += text
        while self._held and self._steps[self._state]():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[str | CallDelta]:
        """The content and calls held back, when no more text comes."""
        self._is_last = True
        events = self.push("")
        self._is_last = False
        rest = self._raw + self._held
        self._raw = self._held = ""
        is_told = {"call": self._n_sent >= 0, "between": self._is_behind_call}.get(self._state, False)
        if rest and not is_told:
            events.append(rest)
        return events

    # Each step takes something off `_held`, gives events and sets the state; False: it needs more text.

    def _start(self) -> bool:
        begun = self._held.lstrip()
        if not begun:
            return False
        self._state = "text"
        if self._dialect.begins_bare and begun[0] == "{":
            self._state, self._raw, self._held = "between", self._held[: -len(begun)], begun
        return True

    def _text(self) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
        found = [(at, o) for o in self._openers if (at := self._held.find(o)) >= 0]
        if not found:
            n_safe = len(self._held[: len(self._held) - n_partial(self._held, self._openers)].rstrip())
            self._say(self._held[:n_safe])
            self._held = self._held[n_safe:]
            return False
        at, opener = min(found)
        said = self._held[:at].rstrip()
        self._say(said)
        self._raw = self._held[len(said) : at + len(opener)]
        self._held = self._held[at + len(opener) :]
        self._is_behind_call = False
        self._state = "code" if opener == CODE else "between"
        return True

    def _between(self) -> bool:
        """Behind an opener, or behind a call."""
        separators = self._dialect.separators if self._is_behind_call else self._dialect.bracket
        n = next((i for i, c in enumerate(self._held) if not c.isspace() and c not in separators), None)
        if n is None:
            n = len(self._held)
        if not self._is_behind_call:
            self._raw += self._held[:n]
        self._held = self._held[n:]
        if not self._held:
            return False
        closer = self._dialect.closer
        if self._held[0] == "{" and not self._dialect.names_first:
            self._state, self._scan, self._n_sent = "call", _CallScan(), -1
            return True
        if closer and self._is_behind_call and self._held.startswith(closer):
            self._held = self._held[len(closer) :]
            self._state = "text"
            return True
        if closer and self._is_behind_call and closer.startswith(self._held) and not self._is_last:
            return False
        if self._dialect.names_first and not self._held.startswith("["):
            return self._named()
        self._give_up()
        return True

    def _named(self) -> bool:
        """A name, and then its arguments."""
        at = self._held.find("{", 0, _MAX_NAME)
        if at < 0 and len(self._held) < _MAX_NAME and not self._is_last:
            return False
        match = _NAME.fullmatch(self._held, 0, at) if at >= 0 else None
        if match is None:
            self._give_up()
            return True
        self._state, self._scan, self._n_sent = "call", _CallScan(match[1]), -1
        self._raw += self._held[:at]
        self._held = self._held[at:]
        return True

    def _call(self) -> bool:
        n = self._scan.read(self._held)
        if self._n_sent < 0:
            self._raw += self._held[:n]
        self._held = self._held[n:]
        if self._scan.name is not None:
            self._tell()
        if not self._scan.is_done:
            return False
        if self._n_sent < 0:
            self._give_up()
        else:
            self._end_call()
            self._state = "between"
        return True

    def _code(self) -> bool:
        code, end, rest = self._held.partition(CODE_END)
        if not end:
            return False
        calls = _calls_in(code, self._parameters)
        if calls is None:
            self._raw += code + end
            self._held = rest
            self._give_up()
            return True
        for name, arguments in calls:
            self._events.append(CallDelta(self._n_calls, name, json.dumps(arguments)))
            self._end_call()
        self._held, self._state = rest, "text"
        return True

    def _tell(self) -> None:
        """Emits the new part of the call that is being read."""
        arguments = self._scan.arguments
        if self._scan.is_done and not arguments:
            arguments = "{}"
        name = self._scan.name if self._n_sent < 0 else None
        new = arguments[max(self._n_sent, 0) :]
        if name is not None or new:
            self._events.append(CallDelta(self._n_calls, name, new))
        self._n_sent = len(arguments)

    def _end_call(self) -> None:
        self._n_calls += 1
        self._is_behind_call, self._raw = True, ""

    def _give_up(self) -> None:
        """Emits the held text: it was not a tool call."""
        raw, self._raw, self._state = self._raw, "", "text"
        self._say(raw)

    def _say(self, text: str) -> None:
        if text:
            self._is_behind_call = False
            self._events.append(text)


class _CallScan:
    """Reads {"name": …, "arguments": {…}} as it comes; if the name is given, the arguments alone.

    `arguments` grows while an object is read. Arguments that are not an object are known at their end.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name, self.arguments, self.is_done = name, "", False
        self._level = 0 if name is not None else 1  # that holds the arguments
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None  # whose value is read; None: a key is read, or nothing
        self._word = ""  # key or value, but for an object of arguments
        self._is_capturing = False

    def read(self, text: str) -> int:
        """Consumes a piece of text; returns how much of it belongs to the object."""
        for i, c in enumerate(text):
            if self._is_capturing:
                self.arguments += c
            elif self._depth == 1 and (self._in_string or c not in ":,}"):
                self._word += c
            if self._in_string:
                self._in_string = self._is_escaped or c != '"'
                self._is_escaped = c == "\\" and not self._is_escaped
            else:
                self._structure(c)
            if self.is_done:
                return i + 1
        return len(text)

    def _structure(self, c: str) -> None:
        """A character outside of strings."""
        if c == '"':
            self._in_string = True
        elif c in "{[":
            wanted = self._depth == self._level and (self._level == 0 or self._key in _ARGUMENTS)
            if c == "{" and wanted and not self.arguments:
                self._is_capturing, self.arguments, self._word = True, c, ""
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            if self._is_capturing and self._depth == self._level:
                self._is_capturing = False
            if self._depth == 0:
                self._end_value()
                self.is_done = True
        elif c == ":" and self._depth == 1 and self._key is None:
            key = _parsed(self._word)
            self._key, self._word = key if isinstance(key, str) else "", ""
        elif c == "," and self._depth == 1:
            self._end_value()

    def _end_value(self) -> None:
        key, word = self._key, self._word.strip()
        self._key, self._word = None, ""
        if self._level == 0 or not word:
            return
        if key == "name" and self.name is None:
            name = _parsed(word)
            self.name = name if isinstance(name, str) and name else None
        elif key in _ARGUMENTS and not self.arguments:
            value = _parsed(word)
            self.arguments = value if isinstance(value, str) else "{}" if value is None else word


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls_in(code: str, parameters: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls in lines of Python; None if they are anything but calls with plain values."""
    try:
        lines = ast.parse(code.strip()).body
        calls = [_call_in(line, parameters) for line in lines]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call_in(line: ast.stmt, parameters: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]] | None:
    value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "print" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    names = parameters.get(value.func.id, ())
    if len(value.args) > len(names) or any(keyword.arg is None for keyword in value.keywords):
        return None
    given = [*zip(names, value.args), *((k.arg or "", k.value) for k in value.keywords)]
    arguments = {name: ast.literal_eval(node) for name, node in given}
    json.dumps(arguments, allow_nan=False)  # raises ValueError or TypeError on what JSON has not
    return value.func.id, arguments
