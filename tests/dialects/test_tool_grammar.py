"""The grammars of custom tools as regular expressions, of texts and of these as JSON writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kukri.dialects.tool_grammar import tool_regex

llguidance: Any = pytest.importorskip("llguidance")

GRAMMARS = {
    "texts": ('start: "a\\"b" /c/? ["x/y"]', ['a"b', 'a"bc', 'a"bcx/y', 'a"bx/y'], ['a"', "ab", 'a"bcc']),
    "lines": (
        "start: line+\nline: /[^\\n]+/ NL\nNL: /\\r?\\n/",
        ["é\t\\\n", 'a "q"\r\nb\n'],
        ["a", "\n", "a\n\n"],
    ),
    "sets": (r"start: /[\s\d]+[^\\\/\"]\/./s", ["1\n \t2x/\n", "\nx//"], ["x/a", '1"/a', "1\\/a"]),
    "counts": (
        'start: ("a" | "B"i)~2..3 x~2 // no more\nx: "\\\\"',
        ["ab\\\\", "BBa\\\\"],
        ["a\\\\", "abab\\\\"],
    ),
    "common": (
        '%import common.INT\n%import common.WS\n?start: INT (WS INT)* -> numbers',
        ["1", "1 2\n34"],
        ["", "1 ", "a"],
    ),
    "escapes": (r"start: /\x41é+\.\n(?:\w|\-){2}/", ["Aéé.\nx-", "Aé.\n--"], ["Bé.\nxx", "Aéx\nxx"]),
}  # fmt: skip


def accepts(regex: str, text: str) -> bool:
    """Whether a whole text is of a regular expression, followed by a quote."""
    grammar = json.dumps({"grammars": [{"lark_grammar": f'start: /{regex}"/'}]})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.get_error()
    for byte in [*text.encode(), *b'"']:
        if matcher.validate_tokens([byte]) != 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("in_json", [False, True])
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_texts_whatever_writes_them(name: str, in_json: bool) -> None:
    """Catches a character that JSON escapes and the expression does not, and a set that loses one."""
    source, right, wrong = GRAMMARS[name]
    regex = tool_regex(source, in_json=in_json)
    for text in (*right, *wrong):
        written = json.dumps(text, ensure_ascii=False)[1:-1] if in_json else text
        assert accepts(regex, written) == (text in right), text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('start: "(" start? ")"', "refers to itself"),
        ('start: "a" other', "other has no rule"),
        ('first: "a"', "start has no rule"),
        ("hello", "does not begin with a rule"),
        ('start: "a"\n%ignore " "', "is not supported"),
        ("start: <|im_end|>", "is not supported"),
        ("start: /(?=a)b/", "is not supported"),
        ("start: /a$/", "is not supported"),
        (r"start: /(a)\1/", "is not supported"),
        ("start: /a/m", "flags m"),
        ("start: /[z-a]/", "bad character range"),
        ('start: "\\x"', "truncated"),
        ('start: "\\ud800"', "hex escape"),
        pytest.param('start: "a"' + "\n" * 100_000, "too large", id="100,000 lines"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(2000)) + 'a2000: "a"', "too large"),
        (
            "start: a0 a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "a"',
            "too large",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_says_why(source: str, words: str) -> None:
    """Catches a rule that is left out in silence, a control token, and a grammar that takes all memory."""
    with pytest.raises(ValueError, match=words):
        tool_regex(source, in_json=True)
