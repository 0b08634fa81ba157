"""A tool's grammar, in Lark's syntax, as a regular expression of a text, or of the text as a JSON string.

Grammars are read by a lexer that never goes back, and only the text's own rules say where it ends within
another text. So rules are inlined, and a grammar that refers to itself cannot be enforced.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import lru_cache

from kukri.sampling.grammar import lark_error

_RULE = re.compile(r"^[ \t]*[?!]?(\w+)[ \t]*:", re.MULTILINE)
_PIECE = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|->\s*\w+)
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<ignores_case>i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[imslux]*)
    |(?P<name>[A-Za-z_]\w*)
    |~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?
    |(?P<operator>[|()\[\]*+?])""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"^[ \t]*%import[ \t]+common\.(\w+)[ \t]*$", re.MULTILINE)
# Lark's own, of `common`
_COMMON = {
    "CR": r"/\r/", "LF": r"/\n/", "NEWLINE": r"/(\r?\n)+/", "WS": r"/[ \t\r\n]+/", "WS_INLINE": r"/[ \t]+/",
    "DIGIT": "/[0-9]/", "INT": "/[0-9]+/", "SIGNED_INT": "/[+-]?[0-9]+/", "LETTER": "/[A-Za-z]/",
    "LCASE_LETTER": "/[a-z]/", "UCASE_LETTER": "/[A-Z]/", "WORD": "/[A-Za-z]+/",
    "CNAME": "/[A-Za-z_][A-Za-z0-9_]*/", "HEXDIGIT": "/[A-Fa-f0-9]/",
}  # fmt: skip
_REGEX = re.compile(
    r"""\\(?P<named>[dDwWsS])
    |\\(?P<code>x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)
    |(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])
    |(?P<any>\.)
    |(?P<verbatim>\(\?:|\((?!\?)|[)|*+?]|\{\d+(?:,\d*)?\})
    |(?P<char>[^\\\[.(){}^$])""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {"(": "(?:", "[": "(?:", "]": ")?"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_ESCAPED = '"\\\n\t\r'  # characters that JSON escapes; further control characters are not written
_MOST = 50_000  # characters of a grammar, and of a regular expression
_DEEPEST = 100  # rules within rules


@lru_cache(maxsize=64)  # an agent sends its tools with each request
def tool_regex(source: str, *, in_json: bool) -> str:
    """Return a regular expression, to put between slashes, of the texts of a grammar.

    With `in_json` it is of the contents of the texts' JSON strings. Raises ValueError with the reason if
    there is no such expression.
    """
    try:
        found = _read(source, in_json=in_json).expanded("start")
    except (re.error, SyntaxError) as error:  # a wrong set of characters, or wrong escapes
        raise ValueError(str(error)) from None
    problem = lark_error(f"start: /{found}/")
    if problem:
        raise ValueError(problem)
    return found


def _read(source: str, *, in_json: bool) -> _Rules:
    """The rules of a grammar. Raises ValueError."""
    if len(source) > _MOST:
        raise ValueError("it is too large")
    source = re.sub(r"^[ \t]*//[^\n]*", "", source, flags=re.MULTILINE)
    bodies = {name: _COMMON[name] for name in _IMPORT.findall(source) if name in _COMMON}
    source = _IMPORT.sub("", source)
    starts = [*_RULE.finditer(source)]
    if not starts or source[: starts[0].start()].strip():
        raise ValueError("it does not begin with a rule")
    ends = [rule.start() for rule in starts[1:]] + [len(source)]
    bodies |= {rule[1]: source[rule.end() : end] for rule, end in zip(starts, ends)}
    return _Rules(bodies, in_json=in_json)


class _Rules:
    """Rules by name, each of which is inlined once."""

    def __init__(self, bodies: dict[str, str], *, in_json: bool) -> None:
        self._bodies, self._in_json = bodies, in_json
        self._found: dict[str, str | None] = {}  # None while it is being written out
        self._depth = 0

    def expanded(self, name: str) -> str:
        """The regular expression of a rule."""
        if name not in self._bodies:
            raise ValueError(f"{name} has no rule")
        if name not in self._found:
            self._found[name] = None
            self._depth += 1
            if self._depth > _DEEPEST:
                raise ValueError("it is too large")
            self._found[name] = f"(?:{''.join(map(self._written, _pieces(_PIECE, self._bodies[name])))})"
            self._depth -= 1
        found = self._found[name]
        if found is None:
            raise ValueError(f"the rule {name} refers to itself")
        if len(found) > _MOST:
            raise ValueError("it is too large")
        return found

    def _written(self, piece: re.Match[str]) -> str:
        if piece["text"]:
            return _flagged(_text(ast.literal_eval(piece["text"]), self._in_json), piece["ignores_case"])
        if piece["regex"]:
            return _regex(piece["regex"][1:-1], piece["flags"], self._in_json)
        if piece["name"]:
            return self.expanded(piece["name"])
        if piece["least"]:
            return f"{{{piece['least']},{piece['most'] or piece['least']}}}"
        operator = piece["operator"] or ""
        return _OPERATORS.get(operator, operator)


def _pieces(pattern: re.Pattern[str], source: str) -> Iterator[re.Match[str]]:
    """The pieces that a source consists of. Raises ValueError at anything else."""
    place = 0
    while place < len(source):
        piece = pattern.match(source, place)
        if piece is None:
            raise ValueError(f"{source[place : place + 20]!r} is not supported")
        yield piece
        place = piece.end()


def _flagged(regex: str, flags: str) -> str:
    return f"(?{flags}:{regex})" if flags else regex


def regex_of(text: str) -> str:
    """Return a regular expression, to put between slashes, of one text."""
    escaped = re.escape(text).replace("/", r"\/")
    for code, control in _CONTROLS.items():
        escaped = escaped.replace(f"\\{control}", f"\\{code}")
    return f"(?:{escaped})"


def _text(text: str, in_json: bool) -> str:
    return regex_of(json.dumps(text, ensure_ascii=False)[1:-1] if in_json else text)


def _regex(source: str, flags: str, in_json: bool) -> str:
    """One that stands between slashes."""
    if set(flags) - set("is"):
        raise ValueError(f"the flags {flags} of a regular expression are not supported")
    if not in_json:
        return _flagged(f"(?:{source})", flags)
    made: list[str] = []
    for piece in _pieces(_REGEX, source):
        if piece["named"] or piece["set"]:
            made.append(_one_of(piece["set"] or f"[{piece[0]}]"))
        elif piece["any"]:
            made.append(_one_of(r"[\s\S]" if "s" in flags else r"[^\n]"))
        else:
            made.append(piece["verbatim"] or _text(_decoded(piece["code"]) or piece[0], in_json=True))
    return _flagged(f"(?:{''.join(made)})", flags.replace("s", ""))


def _decoded(code: str | None) -> str:
    """The character of an escape in a regular expression, without its backslash; "" for None."""
    if code is None or len(code) > 1:
        return chr(int(code[1:], 16)) if code else ""
    if code.isalnum() and code not in _CONTROLS:
        raise ValueError(f"\\{code} in a regular expression is not supported")
    return _CONTROLS.get(code, code)


def _one_of(given: str) -> str:
    """Return the expression for a set of characters, with JSON's escapes."""
    read = re.compile(given)
    found = [_text(one, in_json=True) for one in _ESCAPED if read.fullmatch(one)]
    if any(read.fullmatch(chr(code)) for code in range(32, 0x300) if chr(code) not in _ESCAPED):
        found.append(rf"[{given}&&[^\"\\\x00-\x1f]]")
    return f"(?:{'|'.join(found)})"
