"""Reads values of tool calls in JSON, Python or Gemma's own form, and writes them as JSON.

Small models write JSON with single quotes, a comma too many, a line break in a string or Python's `True`.
All of that is read. Text that is JSON already is passed on unchanged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container
from typing import NamedTuple

from kukri.dialects.feed import EndOfText, Feed, Marks, Reading, whole

Write = Callable[[str], None]

_QUOTES = ('"""', "'''", '"', "'", '<|"|>', "<escape>")
_RAW_QUOTES = {text: Marks([text]) for text in ('<|"|>', "<escape>")}  # Gemma's: no escapes between them
_MAX_DEPTH = 60
_OTHER_BRACKET = {"[": "]", "(": ")"}
_PLAIN = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]*"),
}
_BARE_KEY = re.compile(r"(?:[^\s:=,{}\[\]()\"']| )*")  # Gemma writes all keys so, and some have spaces
_WORD = re.compile(r"[^,\[\]{}()\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_COMMENT_ENDS = {"//": Marks(["\n"]), "/*": Marks(["*/"]), "# ": Marks(["\n"])}
_BETWEEN = (*_COMMENT_ENDS, r"\n", r"\t", r"\r")  # text that models write between values besides white space
_SPACES = re.compile(r"^(?:\s|\\[ntr])*")
_MAX_KEY = 100  # characters
# the next key of an object after a text, and the beginning of one
_NEXT_KEY = re.compile(r""",?(?:\s|\\[ntr])*(?:(["'])[^"'\n]*\1|\w+)\s*[:=]|,\s*(?:[}\]]|//|/\*|# )""")
_NEXT_KEY_BEGINS = re.compile(r""",?(?:\s|\\[ntr])*(?:[/#]|\\?(?:(["'])[^"'\n]*(?:\1\s*)?|\w*\s*))""")
_TOKEN = re.compile(r"""[{}\[\],:]|"(?:[^"\\]|\\.)*("?)|[^\s{}\[\],:"]+""", re.DOTALL)
_HEX = re.compile(r"[0-9a-fA-F]+")
_WORDS = {
    "true": "true", "True": "true", "false": "false", "False": "false",
    "null": "null", "None": "null", "undefined": "null",
}  # fmt: skip


class Ends(NamedTuple):
    """The characters that may follow a text; with `has_keys` a comma must come before a key."""

    chars: str = ""
    has_keys: bool = False


_NO_ENDS, _OBJECT_ENDS = Ends(), Ends(",}", has_keys=True)
KEYWORD_ENDS, POSITIONAL_ENDS = Ends(",)", has_keys=True), Ends(",)")


class Malformed(Exception):
    """What comes is not of the form that is read."""


def json_text(text: str) -> str:
    """A text between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def ignore(_: str) -> None:
    """Writes nothing."""


def read_value(feed: Feed, write: Write, depth: int = 0, ends: Ends = _NO_ENDS) -> Reading[None]:
    """Reads one value, whose first character has come; `ends` is what may follow a text.

    Raises EndOfText and Malformed.
    """
    if depth > _MAX_DEPTH:
        raise Malformed
    begin = yield from feed.peek()
    if begin == "{":
        yield from _read_object(feed, write, depth)
    elif begin in _OTHER_BRACKET:
        yield from _read_list(feed, write, depth, ends.chars.replace(",", ""))
    elif quote := (yield from feed.takes(_QUOTES)):
        write('"')
        yield from _read_string(feed, write, quote, ends)
        write('"')
    else:
        word = yield from feed.run(_WORD)
        if not word.strip():
            raise EndOfText if not (yield from feed.peek()) else Malformed
        if (yield from feed.peek()) == "(":  # code: f("a", "b")
            write(json.dumps(word.lstrip() + (yield from _read_parentheses(feed)), ensure_ascii=False))
            return
        bare = word.rstrip()
        if not (yield from feed.peek()):
            raise EndOfText
        write(literal(bare) + word[len(bare) :])


def read_text(feed: Feed) -> Reading[str]:
    """Reads a string in quotes, and returns it."""
    quote = yield from feed.takes(_QUOTES)
    if not quote:
        raise EndOfText if not (yield from feed.peek()) else Malformed
    pieces: list[str] = []
    yield from _read_string(feed, pieces.append, quote)
    try:
        return str(json.loads(f'"{"".join(pieces)}"'))
    except ValueError:
        raise Malformed from None


def literal(word: str) -> str:
    """A word without quotes as JSON: a number, true, null, or else a string."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return word
    try:  # Python's numbers: 1_000, .5, 0x1f
        number = (
            int(word, 0) if not any(c in word for c in ".eE") or word[:2] in ("0x", "0X") else float(word)
        )
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(number if math.isfinite(number) else word)


def as_json(text: str) -> str:
    """Return a text as JSON: its value, or a string if it is not one value."""
    pieces: list[str] = []

    def reader(feed: Feed) -> Reading[None]:
        yield from feed.space()
        yield from read_value(feed, pieces.append)

    try:
        _, rest = whole(reader, text + "\n")  # a word ends where a line does
    except (EndOfText, Malformed):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if rest.strip() else "".join(pieces).strip()


def typed_json(text: str, types: Container[str]) -> str:
    """Return a text as JSON of one of these types of JSON Schema; of any type if none is named.

    Where a text is allowed too, null and None are null, objects and arrays are such. A number or a boolean
    is one if writing it gives the same characters: "007", "1e5" and " 12" are texts.
    """
    word = text.strip()
    if "boolean" in types and "string" not in types and word.lower() in ("true", "false"):
        return word.lower()
    read = as_json(text)
    if "string" not in types:
        is_number = "integer" in types or "number" in types
        return json.dumps(text, ensure_ascii=False) if is_number and word.startswith("+") else read
    value = json.loads(read)
    is_same = word[:1] == read[:1] in "{[" or json.dumps(value) == text or (value is None and word == "None")
    number = ("integer", "number") if isinstance(value, int) else ("number",)
    kinds = {"{": ("object",), "[": ("array",), '"': (), "n": ("null",), "t": ("boolean",), "f": ("boolean",)}
    is_allowed = any(kind in types for kind in kinds.get(read[:1], number))
    return read if is_allowed and is_same else json.dumps(text, ensure_ascii=False)


def _read_object(feed: Feed, write: Write, depth: int) -> Reading[None]:
    """{key: value, …}; keys may lack quotes."""
    is_doubled = yield from begin_object(feed)
    write("{")
    comma = ""  # not yet written: one before the end is dropped
    is_after_value = False
    while True:
        space = yield from gap(feed)
        begin = yield from feed.peek()
        if begin == "}":
            write(space + "}")
            yield from end_object(feed, is_doubled)
            return
        if begin == "]" and depth:  # this ends the list around: the object's own end is missing
            write(space + "}")
            return
        if begin == "," and not comma:
            comma = (space + feed.take(1)) * is_after_value  # one before the first key is dropped
            continue
        if not begin:
            raise EndOfText
        if is_after_value and not comma:
            comma = ", "
        write(comma + space)
        comma, is_after_value = "", True
        write(json.dumps((yield from read_key(feed)), ensure_ascii=False))
        write((yield from gap(feed)))
        if (yield from feed.peek()) in (":", "="):
            feed.take(1)
        elif not (yield from feed.starts(_QUOTES)):
            raise Malformed
        write(":" + (yield from gap(feed)))
        if (yield from feed.starts((",", "}"))):
            write('""')  # Gemma writes an empty text as nothing
        else:
            yield from read_value(feed, write, depth + 1, _OBJECT_ENDS)


def begin_object(feed: Feed) -> Reading[bool]:
    """Takes { or {{; True for the latter. Qwen2.5-Coder's template shows its calls with doubled braces."""
    feed.take(1)
    return bool((yield from feed.takes(("{",))))


def end_object(feed: Feed, is_doubled: bool) -> Reading[None]:
    """Takes }, or }} if it `is_doubled`."""
    feed.take(1)
    if is_doubled:
        yield from feed.takes(("}",))


def read_key(feed: Feed) -> Reading[str]:
    """Reads a key, with or without quotes, and returns it."""
    if (yield from feed.starts(_QUOTES)):
        return (yield from read_text(feed))
    word = (yield from feed.run(_BARE_KEY)).rstrip()
    if not (yield from feed.peek()):
        raise EndOfText
    if not word:
        raise Malformed
    return word


def _read_list(feed: Feed, write: Write, depth: int, outer: str) -> Reading[None]:
    """[value, …], or a tuple of Python; one of `outer`, which ends what is around, ends it too."""
    end = _OTHER_BRACKET[feed.take(1)]
    write("[")
    comma = ""
    is_after_value = False
    while True:
        space = yield from gap(feed)
        begin = yield from feed.peek()
        if begin and begin in end + outer:
            feed.take(begin == end)
            write(space + "]")
            return
        if begin == "," and is_after_value:
            comma, is_after_value = space + feed.take(1), False
            continue
        if not begin:
            raise EndOfText
        if is_after_value:
            raise Malformed
        write(comma + space)
        comma, is_after_value = "", True
        yield from read_value(feed, write, depth + 1, Ends(f",{end}{outer}"))


def gap(feed: Feed) -> Reading[str]:
    """Take the text between values, and return its white space without comments and escapes."""
    space = yield from feed.space()
    while begin := (yield from feed.takes(_BETWEEN)):
        if begin in _COMMENT_ENDS:
            yield from feed.through(_COMMENT_ENDS[begin], ignore)
        space += yield from feed.space()
    return space


def _read_parentheses(feed: Feed) -> Reading[str]:
    """Takes an expression of code from its ( to the ) that belongs to it."""
    pieces: list[str] = []
    depth, quote = 0, ""
    while True:
        char = yield from feed.peek()
        if not char:
            raise EndOfText
        pieces.append(feed.take(1))
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth += 0 if quote else (char == "(") - (char == ")")
        if depth == 0:
            return "".join(pieces)


def _read_string(feed: Feed, write: Write, quote: str, ends: Ends = _NO_ENDS) -> Reading[None]:
    """The rest of a string, up to and with its closing quote, as JSON between quotes.

    A quote after which none of `ends` comes is a part of the text: models forget to escape those in code.
    """
    if quote in _RAW_QUOTES:
        yield from feed.through(_RAW_QUOTES[quote], plain_text(write))
        return
    plain = _PLAIN[quote[0]]
    while True:
        yield from feed.run_into(plain, write)
        char = yield from feed.peek()
        if not char:
            raise EndOfText
        if (yield from feed.starts((quote,))) and (not ends.chars or (yield from _is_end(feed, quote, ends))):
            feed.take(len(quote))
            return
        if char == "\\":
            write((yield from _read_escape(feed)))
        else:  # another quote, or a character that JSON has only escaped
            write(json_text(feed.take(1)))


def _is_end(feed: Feed, quote: str, ends: Ends) -> Reading[bool]:
    """Return True if the next quote ends a text: one of `ends`, or the next key, follows it."""
    n = len(quote) + 1
    comments = (*_COMMENT_ENDS, "</", "\n<") if ")" in ends.chars else ("//", "/*", "</", "\n<")
    while True:
        text = yield from feed.ahead(n)
        after = _SPACES.sub("", text[len(quote) :])
        is_complete = len(text) < n  # nothing more comes
        if not after:
            if is_complete:
                return True
        elif after[0] == ")" and ")" in ends.chars:  # print("a") in a text has both too
            if is_complete or len(after) > 1:
                return after[1:2] != quote[0] and (after[1:2] != ")" or ends.chars != KEYWORD_ENDS.chars)
        elif after[0] in ends.chars and not (after[0] == "," and ends.has_keys):
            return True
        elif after[0] in "\"'," and ends.has_keys:  # a comma may be missing
            key = _NEXT_KEY.match(after)
            if key is not None or is_complete or n > _MAX_KEY:
                return key is not None or is_complete
            if not _NEXT_KEY_BEGINS.fullmatch(after):
                return False
        elif after.startswith(comments):
            return True
        elif is_complete or after not in ("/", "<", "\\", "#"):
            return False
        n += 1


def ending(written: str, rest: str = "") -> str:
    """What makes an object of its beginning, which is JSON so far; `rest` is text that could not be read.

    The rest becomes the value that is missing, or else one under the key "text" (or "text_", where that is
    there), so that nothing is lost.
    """
    expected, ends, is_open = "value", [], False
    for match in _TOKEN.finditer(written):
        token = match[0]
        if token in "{[":
            ends.append({"{": "}", "[": "]"}[token])
            expected = "key" if token == "{" else "value"
        elif token in "}]":
            ends.pop()
            expected = "nothing"
        elif token == ",":
            expected = "key" if ends[-1:] == ["}"] else "value"
        elif token == ":":
            expected = "value"
        else:
            is_open = match[1] == ""  # no quote ends the text
            expected = "colon" if expected == "key" else "nothing"
    rest, key = rest.strip(), "text"
    while f'"{key}"' in written:
        key += "_"
    added = json_text(rest) + '"' if is_open else ""
    value = "" if is_open else json.dumps(rest, ensure_ascii=False) if rest else ""
    if expected == "colon":
        added += f": {value or 'null'}"
    elif expected == "value" and (value or written):
        added += value or "null"
    elif expected == "key" and (value or written.rstrip().endswith(",")):
        added += f'"{key}": {value or "null"}'
    elif expected == "nothing" and value and ends:
        added += f', "{key}": {value}' if ends[-1] == "}" else f", {value}"
    if not ends and not written:
        return f'{{"text": {value}}}' if value else "{}"
    return added + "".join(reversed(ends))


def _read_escape(feed: Feed) -> Reading[str]:
    r"""A character after a backslash, as JSON: Python's \x and \' too; other backslashes are just that."""
    two = yield from feed.ahead(2)
    if len(two) < 2:
        raise EndOfText
    kind = two[1]
    n_digits = {"u": 4, "x": 2}.get(kind)
    if n_digits is not None:
        digits = (yield from feed.ahead(2 + n_digits))[2:]
        if len(digits) == n_digits and _HEX.fullmatch(digits):
            feed.take(2 + n_digits)
            return f"\\u{digits:0>4}"
        if len(digits) < n_digits and _HEX.fullmatch(digits or "0"):
            raise EndOfText
        feed.take(1)
        return r"\\"
    if kind in '"\\/bfnrt':
        return feed.take(2)
    feed.take(1)
    if kind == "\n":  # Python continues the line
        feed.take(1)
        return ""
    if kind == "'":
        return feed.take(1)
    return r"\\"


def plain_text(write: Write) -> Write:
    """Writes a text's pieces as the inside of a JSON string."""
    return lambda text: write(json_text(text))
