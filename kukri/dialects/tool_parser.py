"""`ToolParser`: splits an answer into content and tool calls as it grows.

It finds the marks of every family, not only the model's, because models also write other forms, or bare JSON.
A call in another form than the model's own has to name one of the tools. White space around calls belongs to
neither part. Everything else stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from kukri.dataclass import dataclass
from kukri.dialects.calls import (
    Call,
    CallDelta,
    merged,
    read_headed_call,
    read_object_call,
    read_tagged_call,
)
from kukri.dialects.feed import EndOfText, Feed, Marks, Reading
from kukri.dialects.signatures import Signatures
from kukri.dialects.values import Malformed, ignore

CODE, CODE_END = "<code>", "</code>"
FENCE = "```"
TAGS = ("<function=", "<function name=", "<invoke name=")  # tags that are part of the call
_LANGUAGES = ("json", "python", "tool_call", "tool_code", "xml")
_BARE = ("{", "[")
_TAG, _NAME = "a tag", "a name"
_ANY = (*_BARE, _NAME)  # possible text after an opener, besides tags
_CODE_END = Marks([CODE_END])
_EXTRA = re.compile(r"""["'}]*""")  # characters that models write again at the end of a call


@dataclass(frozen=True)
class CallMarks:
    """The marks that a parser looks for.

    `own` are the openers of the model's form; `openers` and `closers` are the marks of every form. With
    `begins_bare` an answer that begins with { or [ is a call in the model's own form too; with `reads_code`
    <code>name(key=value)</code> is a call.
    """

    own: frozenset[str]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    begins_bare: bool = False
    reads_code: bool = False


class ToolParser:
    """Splits a text into content and calls: the same ones however it is cut.

    `missed` are the marks of what looks like calls and was not taken.
    """

    def __init__(self, marks: CallMarks, tools: Signatures) -> None:
        self.missed: list[str] = []
        self._marks, self._tools = marks, tools
        code = (CODE,) if marks.reads_code else ()
        self._finds = Marks([*marks.openers, *TAGS, *code, FENCE, "\n"])
        self._inner = (*marks.openers, *marks.closers)
        self._after = Marks([*self._inner, "\n"])
        self._feed = Feed()
        self._is_cut = self._is_stopped = False
        self._n_calls = 0
        self._is_after_call = self._has_said = False
        self._may_repeat = False  # another call may follow the last one without a mark
        self._held: list[str] = []  # white space that is content if more content follows
        self._events: list[str | CallDelta] = []
        self._run: Iterator[None] = self._read()

    def push(self, text: str) -> list[str | CallDelta]:
        """The new content and calls, in order."""
        self._feed.add(text)
        return self._advance()

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[str | CallDelta]:
        """The content and calls held back, when no more text comes.

        `is_cut`: the answer was not complete, so a call is left as it is; otherwise its end is added. With
        `is_stopped` a stop string has cut the answer: what begins a further call is dropped likewise.
        """
        self._feed.is_last, self._is_cut, self._is_stopped = True, is_cut, is_stopped
        return self._advance()

    def _advance(self) -> list[str | CallDelta]:
        next(self._run, None)
        events, self._events = self._events, []
        return merged(events)

    def _tell(self, delta: CallDelta) -> None:
        self._held.clear()
        self._is_after_call = True
        self._events.append(delta)

    def _say(self, text: str) -> None:
        """Emit content. White space at its end is held until more comes, and is dropped after a call.

        Text that remains within or right after a call belongs to the call's form, and is not content.
        """
        if self._is_after_call and (self._is_cut or (self._is_stopped and self._begins_call(text))):
            return
        if self._is_after_call:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            if self._is_after_call and self._has_said:
                self._held.append("\n")  # the call stood between two texts
            self._is_after_call, self._has_said = False, True
            self._events.append("".join((*self._held, solid)))
            self._held.clear()
        if len(text) > len(solid):
            self._held.append(text[len(solid) :])

    def _begins_call(self, text: str) -> bool:
        """Return True if a text begins with a mark of a call, or is the beginning of such a mark."""
        text = text.lstrip()
        return text.startswith(self._inner) or any(mark.startswith(text) for mark in self._inner)

    # Readers: each takes something off the feed, and says or tells it.

    def _read(self) -> Reading[None]:
        feed = self._feed
        yield from self._line(takes_any=self._marks.begins_bare)
        while found := (yield from feed.until(self._finds, self._say)):
            if found == "\n":
                yield from self._line(takes_any=False)
            elif found == FENCE:
                yield from self._fenced()
            elif found == CODE:
                yield from self._code()
            elif not (yield from self._calls(found)):
                self.missed.append(found)
        if not self._is_after_call and self._held:
            self._events.append("".join(self._held))

    def _line(self, *, takes_any: bool) -> Reading[None]:
        """The beginning of a line: { or [ may be calls."""
        self._say((yield from self._feed.space()))
        begin = yield from self._feed.starts((*self._marks.openers, *_BARE))
        if begin in _BARE:
            yield from self._calls(begin, takes_any=takes_any)

    def _fenced(self) -> Reading[None]:
        """Calls in a fence of Markdown."""
        self._feed.keep()
        self._feed.take(len(FENCE))
        yield from self._feed.takes(_LANGUAGES)
        yield from self._feed.space()
        begin = yield from self._feed.starts((*_BARE, *self._marks.openers, *TAGS))
        if begin:
            yield from self._calls(begin, is_kept=True)
        else:
            self._say(self._feed.kept())

    def _code(self) -> Reading[None]:
        """Lines of Python between <code> and </code>: all of them calls, or text."""
        feed = self._feed
        feed.keep()
        feed.take(len(CODE))
        code: list[str] = []
        end = yield from feed.until(_CODE_END, code.append)
        feed.take(len(end))
        calls = calls_in_code("".join(code), self._tools) if end else None
        raw = feed.kept()
        if calls is None:
            self._say(raw)
        for name, arguments in calls or ():
            self._tell(CallDelta(self._n_calls, name, json.dumps(arguments)))
            self._n_calls += 1

    def _calls(self, begin: str, *, takes_any: bool = False, is_kept: bool = False) -> Reading[bool]:
        """Read calls from a mark, { or [ on, with the text between and around them.

        Text that turns out to be no call is emitted. Returns False if there are no calls.
        """
        feed, n_before = self._feed, self._n_calls
        if not is_kept:
            feed.keep()
        is_own = begin in self._marks.own
        may_come: tuple[str, ...] = _BARE if begin in _BARE else ()  # how the next call may begin
        is_list = False
        is_text = True  # the kept characters are text unless a call comes
        while True:
            if not is_text:
                feed.keep()
            if mark := (yield from feed.starts(self._inner)):
                may_come = _ANY if mark in self._marks.openers else ()
                is_text = is_text or bool(may_come)
                feed.take(len(mark))
                continue
            kind = yield from self._kind()
            if (
                kind == " "
                or (kind == "," and not is_text)
                or (kind == FENCE and (not is_text or _NAME in may_come))
            ):
                feed.take(len(kind))
                if kind == FENCE:
                    yield from feed.takes(_LANGUAGES)
            elif kind == "]" and is_list:
                feed.take(1)
                is_list, may_come = False, ()
            elif kind == "[" and kind in may_come:
                feed.take(1)
                is_list, may_come = True, ("{", _NAME)
            elif kind in may_come or kind == _TAG:
                is_text = not (yield from self._call(kind, is_own, takes_any))
                if is_text:
                    break
                yield from feed.run(_EXTRA)
                may_come = (kind,) if is_list or self._may_repeat else ()
            else:
                break
        raw = feed.kept()
        if is_text:
            self._say(raw)
        return self._n_calls > n_before

    def _kind(self) -> Reading[str]:
        """What comes next: _TAG, _NAME, FENCE, " " for white space, "," for a separator, or the character."""
        if (yield from self._feed.starts((FENCE,))):
            return FENCE
        if (yield from self._feed.starts(TAGS)):
            return _TAG
        char = yield from self._feed.peek()
        if char.isalnum() or char == "_":
            return _NAME
        return " " if char.isspace() else "," if char == ";" else char

    def _call(self, kind: str, is_own: bool, takes_any: bool) -> Reading[bool]:
        """One call; False if it turns out not to be one."""
        feed = self._feed
        call = Call(feed, self._n_calls, self._tools, self._tell, is_own=is_own, takes_any=takes_any)
        self._may_repeat = True
        left = ""  # text for which the arguments have no place
        try:
            if kind == "{":
                yield from read_object_call(feed, call)
            elif kind == _TAG:
                yield from feed.takes(TAGS)
                yield from read_tagged_call(feed, call)
            else:
                self._may_repeat = yield from read_headed_call(feed, call, self._marks.closers)
        except EndOfText:
            if call.is_told and not self._is_cut:
                left = call.complete()
        except Malformed:
            # it is too late to take back what is told
            if call.is_told and ((yield from feed.until(self._after, ignore)) or not self._is_cut):
                left = call.complete()
        self._n_calls += call.is_told
        for mark in self._inner:
            left = left.replace(mark, "")
        if any(map(str.isalnum, left)):
            self._say(left)
        return call.is_told


def calls_in_code(code: str, tools: Signatures) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls in lines of Python; None if they are anything but calls with plain values."""
    try:
        lines = ast.parse(code.strip()).body
        calls = [_call_in(line, tools) for line in lines]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call_in(line: ast.stmt, tools: Signatures) -> tuple[str, dict[str, Any]] | None:
    value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "print" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    names = tools.parameters(value.func.id)
    if len(value.args) > len(names) or any(keyword.arg is None for keyword in value.keywords):
        return None
    given = [*zip(names, value.args, strict=False), *((k.arg or "", k.value) for k in value.keywords)]
    arguments = {name: ast.literal_eval(node) for name, node in given}
    json.dumps(arguments, allow_nan=False)  # raises ValueError or TypeError on what JSON has not
    return value.func.id, arguments
