"""Readers of a tool call, one for each form that models write, which read while the text grows.

Each reads the body of a call and passes it to a `Call`: the name as soon as it is known, then the arguments
as JSON, while they grow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kukri.dialects.feed import EndOfText, Feed, Marks, Reading
from kukri.dialects.signatures import Signatures
from kukri.dialects.values import (
    KEYWORD_ENDS,
    POSITIONAL_ENDS,
    Ends,
    Malformed,
    Write,
    as_json,
    begin_object,
    end_object,
    ending,
    gap,
    ignore,
    plain_text,
    read_key,
    read_text,
    read_value,
    typed_json,
)

NAME_KEYS = ("name", "function", "tool", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "tool_input")
OTHER_KEYS = ("id", "type", "index", "call_id", "tool_call_id", "tool_calls")
_DESCRIBING_KEYS = (
    "description",
    "required",
    "additionalProperties",
    "strict",
)  # keys of a tool that a call does not have
_SCHEMA_BEGINS = ("type", "properties", "$schema")
_EMPTY_SCHEMA = {"type", "properties", "required", "additionalProperties", "$schema"}  # keys without contents
_MAX_NESTED = 3  # objects around a call
_MAX_NAME = 128
_NAME, _WORD, _DIGITS = (re.compile(pattern) for pattern in (r"[\w.\-]*", r"\w*", r"\d*"))
_BEFORE_NAMES = ("call:", "function<｜tool▁sep｜>")
_AFTER_NAMES = ("[ARGS]", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>")
_ATTRIBUTE = re.compile(r"""\s*["']?([^"'>]+?)["']?\s*""")
_ARGUMENT_ENDS = Marks([",", ")", "\n"])
_TAG_END = Marks([">"])
_PARAMETERS = ("<parameter=", "<parameter name=", "<param=", "<param name=")
_VALUE_ENDS = {
    tag: (f"\n</{name}>", f"</{name}>") for tag in _PARAMETERS for name in [re.split("[ =]", tag[1:])[0]]
}
_FUNCTION_ENDS = ("</function>", "</invoke>")
_KEY_END = Marks(["</arg_key>"])


class CallDelta(NamedTuple):
    """A piece of a call: its name at the beginning, then more of its arguments, which are JSON."""

    place: int  # among the calls, from 0
    name: str | None
    arguments: str


def merged(pieces: list[Any]) -> list[Any]:
    """Return the pieces, with neighbouring pieces of a call joined."""
    if len(pieces) < 2:
        return pieces
    found: list[Any] = []
    for place, group in groupby(pieces, lambda piece: getattr(piece, "place", -1)):
        same = list(group)
        if place < 0:
            found += same
        else:
            found.append(same[0]._replace(arguments="".join(piece.arguments for piece in same)))
    return found


class Call:
    """A call that is being read. Its name is passed on once; arguments before the name wait for it.

    With `is_own` the form is the model's own, so any name is taken and passed on at once. In other forms only
    names of tools are taken, and only when the arguments begin, because text may quote a tool's description.
    With `takes_any` the form may be the model's own or other JSON, so any name with arguments is taken.
    """

    def __init__(
        self,
        feed: Feed,
        place: int,
        tools: Signatures,
        tell: Callable[[CallDelta], None],
        *,
        is_own: bool,
        takes_any: bool = False,
    ) -> None:
        self._takes_any = is_own or takes_any
        self._feed, self._n_settled = feed, feed.n_read  # characters that the arguments or the form have
        self.place, self.tools, self.is_own = place, tools, is_own
        self.name: str | None = None
        self.is_told = False
        self._tell = tell
        self._waiting: list[str] = []
        self._told: list[str] = []  # the arguments so far
        self._has_arguments = False

    def begin(self, name: str, *, must_be_known: bool = False) -> None:
        """Sets the name. Raises Malformed if it cannot be one, or must be a tool's and is not."""
        if name not in self.tools and name.startswith("functions."):
            name = name.removeprefix("functions.")
        if not name or (name not in self.tools and (must_be_known or not self._takes_any)):
            raise Malformed
        self.name = name
        self.settle()
        if self.is_own or self._waiting:
            self._tell_name()

    def grow(self, text: str) -> None:
        """Pass on more of the arguments."""
        if not text:
            return
        self._has_arguments = True
        self.settle()
        if self.name is None:
            self._waiting.append(text)
            return
        if not self.is_told:
            self._tell_name()
        self._told.append(text)
        self._tell(CallDelta(self.place, None, text))

    def end(self) -> None:
        """End the call, whose arguments are {} if none came.

        Raises Malformed without a name, and without arguments for a name that other JSON may have.
        """
        if self.name is None or not (self._has_arguments or self.is_own or self.name in self.tools):
            raise Malformed
        if not self._has_arguments:
            self.grow("{}")

    def settle(self, n_ahead: int = 0) -> None:
        """Note that what was taken is in the arguments or the call's form, but for `n_ahead` characters."""
        self._n_settled = self._feed.n_read - n_ahead

    def complete(self) -> str:
        """Make JSON of arguments that cannot be read on, with the text that was taken and is not in them yet.

        Returns this text where the arguments are whole.
        """
        told, rest = "".join(self._told), self._feed.since(self._n_settled)
        added = ending(told, rest) if self._has_arguments else _as_object(rest, self)
        self.grow(added)
        return "" if added else rest

    def _tell_name(self) -> None:
        self.is_told = True
        self._told += self._waiting
        self._tell(CallDelta(self.place, self.name, "".join(self._waiting)))
        self._waiting.clear()


def read_object_call(feed: Feed, call: Call, depth: int = 0) -> Reading[None]:
    """{"name": …, "arguments": {…}}, its keys in any order and under the names that models give them.

    Small models also fill a tool's description in, with arguments where the schema of its parameters was.
    """
    is_doubled = yield from begin_object(feed)
    has_arguments = describes = False
    others: list[str] = []  # keys that are arguments where nothing else is
    while True:
        yield from feed.space()
        begin = yield from feed.peek()
        if begin == "}":
            yield from end_object(feed, is_doubled)
            break
        if begin == ",":
            feed.take(1)
            continue
        key = yield from read_key(feed)
        yield from feed.space()
        if (yield from feed.peek()) != ":":
            raise Malformed
        feed.take(1)
        yield from feed.space()
        if not (yield from feed.peek()):
            raise EndOfText
        if key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from read_arguments(feed, call, may_be_schema=describes)
        elif key in NAME_KEYS and call.name is None:
            yield from _read_name(feed, call, depth)
        elif key in (*OTHER_KEYS, *NAME_KEYS, *_DESCRIBING_KEYS):
            describes = describes or key in _DESCRIBING_KEYS
            yield from read_value(feed, ignore)
            call.settle()
        elif call.is_own:
            value: list[str] = []
            yield from read_value(feed, value.append)
            others.append(f"{json.dumps(key, ensure_ascii=False)}: {''.join(value)}")
        else:
            raise Malformed
    if others and not has_arguments:
        call.grow("{" + ", ".join(others) + "}")
    if describes and not has_arguments and not call.is_own:
        raise Malformed
    if depth == 0:
        call.end()


def _read_name(feed: Feed, call: Call, depth: int) -> Reading[None]:
    """The name, or an object that holds the call, as {"function": {"name": …}}."""
    begin = yield from feed.peek()
    if begin == "{" and depth < _MAX_NESTED:
        yield from read_object_call(feed, call, depth + 1)
    elif begin in "\"'":
        call.begin((yield from read_text(feed)))
    else:
        yield from read_value(feed, ignore)


def read_arguments(
    feed: Feed, call: Call, *, may_be_schema: bool = False, ends: Sequence[str] = ()
) -> Reading[None]:
    """Read an object, or a text that holds one, as in OpenAI's API; a bare text ends at one of `ends`.

    A call of a tool without parameters with the tool's empty schema has no arguments, unless the text
    `may_be_schema`, which belongs to a description.
    """
    call.settle()
    begin = yield from feed.peek()
    name = call.name or ""
    if begin == "{" and name in call.tools and not call.tools.parameters(name) and not may_be_schema:
        given: list[str] = []
        yield from read_value(feed, given.append)
        is_empty = not json.loads("".join(given)).keys() - _EMPTY_SCHEMA
        call.grow("{}" if is_empty else "".join(given))
    elif begin == "{":
        yield from read_value(feed, call.grow if call.is_own else _but_no_schema(call))
    elif begin in "\"'":
        call.grow(_as_object((yield from read_text(feed)), call))
    else:
        pieces: list[str] = []
        yield from (feed.until(Marks(ends), pieces.append) if ends else read_value(feed, pieces.append))
        value = "".join(pieces).strip()
        call.grow(_as_object(json.loads(value) if value.startswith('"') else value, call))


def _as_object(text: str, call: Call) -> str:
    """Arguments that came as a text: the object in it, or else the text as the first of the parameters."""
    if text.strip() in ("", "null", "[]"):
        return "{}"
    read = as_json(text)
    if read.startswith("{"):
        return read
    name = next(iter(call.tools.parameters(call.name or "")), "text")
    return json.dumps({name: text}, ensure_ascii=False)


def _but_no_schema(call: Call) -> Write:
    """Writes the arguments of a call. Raises Malformed if they begin as the schema of a tool's parameters."""
    first: list[str] = []  # up to the first key

    def write(text: str) -> None:
        if first and first[-1].startswith('"'):
            call.grow(text)
            return
        first.append(text)
        own = call.tools.parameters(call.name or "")
        if any(text == json.dumps(key) and key not in own for key in _SCHEMA_BEGINS):
            raise Malformed
        if text.startswith('"') or text.endswith("}"):
            call.grow("".join(first))

    return write


def read_headed_call(feed: Feed, call: Call, ends: tuple[str, ...]) -> Reading[bool]:
    """A name and its arguments: name{…}, name(key=value) or name<arg_key>…, or a name alone before an end.

    After a mark that stands between both, any text is the arguments of a tool that is known. Returns True for
    name(key=value), which another may follow without a mark.
    """
    yield from feed.takes(_BEFORE_NAMES)
    name = yield from feed.run(_NAME)
    if (yield from feed.takes((":",))):  # Kimi counts its calls
        yield from feed.run(_DIGITS)
    yield from feed.space()
    if (yield from feed.takes(("[CALL_ID]",))):
        yield from feed.run(_WORD)
    is_marked = bool((yield from feed.takes(_AFTER_NAMES)))
    yield from feed.space()
    is_fenced = bool((yield from feed.takes(("```json", "```"))))
    yield from feed.space()
    if not name or len(name) > _MAX_NAME:
        raise Malformed
    begin = yield from feed.starts(("{", "(", "<arg_key>"))
    is_alone = not begin and bool((yield from feed.starts(ends)))
    if not (begin or is_alone or is_marked or is_fenced):
        raise Malformed
    call.begin(name, must_be_known=not begin)
    if begin == "(":
        yield from _read_python_arguments(feed, call)
    elif begin == "<arg_key>":
        yield from _read_keys(feed, call)
    elif not is_alone:
        yield from read_arguments(feed, call, ends=(*ends, "```"))
    call.end()
    if is_fenced:
        yield from feed.space()
        yield from feed.takes(("```",))
    return begin == "("


def _read_python_arguments(feed: Feed, call: Call) -> Reading[None]:
    """(key=value, …) as an object; values without a key belong to the tool's other parameters in order."""
    feed.take(1)
    call.settle()
    names = call.tools.parameters(call.name or "")
    begin = "{"
    while True:
        yield from gap(feed)
        char = yield from feed.peek()
        if not char:
            raise EndOfText
        if char == ")":
            feed.take(1)
            break
        if char == ",":
            feed.take(1)
            continue
        word = yield from feed.run(_WORD)
        space = yield from feed.space()
        after = yield from feed.ahead(2)
        if not after:
            raise EndOfText
        if word.isidentifier() and after[:1] == "=" and after != "==":
            feed.take(1)
            yield from feed.space()
            key, begun, ends = word, "", KEYWORD_ENDS
        else:
            key, begun, ends = next(iter(names), ""), word and word + space, POSITIONAL_ENDS
            if not key:
                raise Malformed
        names = [name for name in names if name != key]
        call.grow(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        call.settle(len(begun))
        begin = ", "
        yield from _read_rest(feed, call, begun, ends)
    call.grow("{}" if begin == "{" else "}")


def _read_rest(feed: Feed, call: Call, begun: str, ends: Ends) -> Reading[None]:
    """A value of which some characters have been taken."""
    if not begun:
        return (yield from read_value(feed, call.grow, ends=ends))
    pieces = [begun]
    if not (yield from feed.until(_ARGUMENT_ENDS, pieces.append)):
        raise EndOfText
    call.grow(as_json("".join(pieces).strip()))
    return None


def read_tagged_call(feed: Feed, call: Call) -> Reading[None]:
    """<function=name><parameter=key>value</parameter>…</function>; <invoke name="…"> is read too."""
    call.begin((yield from _read_attribute(feed)))
    begin = "{"
    while True:
        yield from feed.space()
        tag = yield from feed.takes(_PARAMETERS)
        if not tag:
            break
        key = yield from _read_attribute(feed)
        call.grow(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        begin = ", "
        yield from feed.takes(("\n",))
        known = [one for one in call.tools.parameters(call.name or "") if one != key]
        nexts = [f"\n{tag}{one}" for name in known for one in (f"{name}>", f'"{name}"')]
        yield from _read_tagged_value(feed, call, key, _VALUE_ENDS[tag], [*nexts, "\n</function>\n</"])
    yield from _check_more(feed, "<parameter=")
    yield from feed.takes(_FUNCTION_ENDS)
    call.grow("{}" if begin == "{" else "}")
    call.end()


def _read_attribute(feed: Feed) -> Reading[str]:
    """The name in a tag whose beginning has been taken, up to its >."""
    pieces: list[str] = []
    yield from feed.through(_TAG_END, pieces.append)
    match = _ATTRIBUTE.fullmatch("".join(pieces))
    if match is None:
        raise Malformed
    return match[1].strip()


def _read_tagged_value(
    feed: Feed, call: Call, key: str, ends: Sequence[str], nexts: Sequence[str]
) -> Reading[None]:
    """A value up to the end of its tag: a text as it comes, anything else when it is whole.

    Where a model has forgotten the tag's end, the value ends before one of `nexts`, which is not taken.
    """
    marks = Marks([*ends, *nexts])
    types = call.tools.types(call.name or "", key)
    if types == {"string"}:
        call.grow('"')
        yield from feed.through(marks, plain_text(call.grow), nexts)
        call.grow('"')
    else:
        pieces: list[str] = []
        yield from feed.through(marks, pieces.append, nexts)
        call.grow(typed_json("".join(pieces), types))


def _read_keys(feed: Feed, call: Call) -> Reading[None]:
    """<arg_key>key</arg_key><arg_value>value</arg_value>…"""
    begin = "{"
    while (yield from feed.takes(("<arg_key>",))):
        pieces: list[str] = []
        yield from feed.through(_KEY_END, pieces.append)
        key = "".join(pieces).strip()
        yield from feed.space()
        if not (yield from feed.takes(("<arg_value>",))):
            raise Malformed
        call.grow(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        begin = ", "
        yield from _read_tagged_value(feed, call, key, ("</arg_value>",), ("\n<arg_key>", "\n</tool_call>"))
        yield from feed.space()
    yield from _check_more(feed, "<arg_key>")
    call.grow("}")


def _check_more(feed: Feed, tag: str) -> Reading[None]:
    """Raises EndOfText if the text ends before it is known whether a tag comes."""
    rest = yield from feed.ahead(len(tag))
    if len(rest) < len(tag) and tag.startswith(rest):
        raise EndOfText
