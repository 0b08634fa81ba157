"""Random answers of each family: read whole, streamed, and equal to what was meant."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from typing import Any

import pytest

from kukri.dialects.families import dialect_of
from kukri.dialects.signatures import Signatures
from tests.dialects.families import FAMILIES, Family
from tests.dialects.test_families import split

WORDS = (
    *(
        "a",
        "the",
        "Zürich",
        "日本",
        "👩‍🚀",
        "x1",
        "null",
        "true",
        "False",
        "None",
        "12",
        "-0.5",
        "1e5",
        "007",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        '"',
        "'",
        "\\",
        '\\"',
        "\\n",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "=",
    ),
    *(
        "<b>",
        "</b>",
        "<",
        ">",
        "< ",
        "</",
        "&amp;",
        "#",
        "//",
        "/*",
        "*/",
        "`",
        "```",
        "f(x)",
        '{"a": 1}',
        "$1",
        "%",
    ),
    *(
        "print('hi')",
        'print("hi")',
        'say "hi" now',
        "a, b=c",
        "C:\\new",
        "it's",
        ";",
        "|",
        "—",
        "\u200b",
        "\r\n",
    ),
)
PLAIN = (
    "I",
    "see",
    "noon",
    "3",
    "<",
    "4",
    "Zürich",
    "日本",
    "it's",
    "it.",
    '"so"',
    "(a)",
    "{",
    "}",
    "[1]",
    ",",
    "x = y",
)
KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")


def _text(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.choice((0, 1, 1, 2, 3, 5, 12))))


def _said(draw: random.Random) -> str:
    """A text around calls: words that no family takes for a mark, and no white space at its ends."""
    return " ".join(draw.choices(PLAIN, k=draw.randint(1, 9))).strip()


def _value(draw: random.Random, kind: str, depth: int = 0) -> Any:
    if kind == "string":
        return _text(draw)
    if kind == "integer":
        return draw.choice((0, -1, 7, 2**31, 2**53 + 1, -(10**20), draw.randint(-999, 999)))
    if kind == "number":
        return draw.choice((0.5, -2.5e-3, 1e100, 3, math.pi, round(draw.uniform(-9, 9), draw.randint(1, 9))))
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "null":
        return None
    kinds = KINDS if depth < 2 else KINDS[:5]
    values = [_value(draw, draw.choice(kinds), depth + 1) for _ in range(draw.randint(0, 3))]
    if kind == "array":
        return values
    return {draw.choice(("a", "b c", "ключ", "d_1", "type", "E")) + str(i): v for i, v in enumerate(values)}


def _tools(draw: random.Random) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """Functions as a client describes them, and the kinds of their parameters."""
    kinds = {
        name: {f"p{i}": draw.choice(KINDS) for i in range(draw.randint(0, 4))}
        for name in draw.sample(("save", "get_time", "find", "send_mail"), k=draw.randint(1, 3))
    }
    functions = []
    for name, parameters in kinds.items():
        properties = {key: {"type": kind} for key, kind in parameters.items()}
        functions.append({"name": name, "parameters": {"type": "object", "properties": properties}})
    return functions, kinds


def answer(family: Family, draw: random.Random) -> tuple[str, Signatures, str, str, list[tuple[str, Any]]]:
    """(text, tools, thoughts, content, calls) of a random answer as the family writes it."""
    functions, kinds = _tools(draw)
    thoughts = _said(draw) if draw.random() < 0.5 else ""
    text = thoughts.join(family.thinks) if thoughts else ""
    calls: list[tuple[str, Any]] = []
    content = ""
    if draw.random() < 0.8:
        for name in draw.choices(list(kinds), k=draw.randint(1, family.most_calls)):
            given = {key: _value(draw, kind) for key, kind in kinds[name].items()}
            if family.dialect == "seed":  # a line break at either end of a text may belong to the form
                given = {k: v.strip("\n") if isinstance(v, str) else v for k, v in given.items()}
            calls.append((name, given))
        if family.before and draw.random() < 0.3:
            content = "Let me see."
            text += family.before
        text += family.write(calls)
    else:
        content = _said(draw)
        text += content.join(family.says)
    return text, Signatures(functions), thoughts, content, calls


def _check(name: str, seed: int) -> str:
    """What is wrong with the answer of a seed; nothing if it is read as it was meant, however it is cut."""
    family, draw = FAMILIES[name], random.Random(f"{name}: {seed}")
    text, tools, thoughts, content, calls = answer(family, draw)
    form = dialect_of(family.template, dict.fromkeys((*family.control, *family.plain), 0))
    whole = split(form, [text], tools=tools)
    places = sorted({0, len(text), *(draw.randint(0, len(text)) for _ in range(draw.randint(0, 12)))})
    cut = split(form, [text[a:b] for a, b in pairwise(places)], tools=tools)
    if cut != whole:
        return f"{seed}: {text!r}: whole {whole!r}, cut at {places} {cut!r}"
    if split(form, text, tools=tools) != whole:
        return f"{seed}: {text!r}: not the same by character"
    try:
        found = whole[0], whole[1], [(called, json.loads(arguments)) for called, arguments in whole[2]]
    except ValueError as error:
        return f"{seed}: {text!r}: {whole[2]!r} is no JSON: {error}"
    if found != (thoughts, content, calls):
        return f"{seed}: {text!r}: {found!r} in place of {(thoughts, content, calls)!r}"
    return ""


@pytest.mark.parametrize("name", FAMILIES)
def test_random_answers_are_read_as_they_were_meant(name: str) -> None:
    """Catches a value that changes, text that is lost, and anything that depends on where a chunk ends."""
    wrong = [one for seed in range(200) if (one := _check(name, seed))]
    assert not wrong, f"{len(wrong)} of 200:\n" + "\n".join(wrong[:5])


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_thousand_random_answers_are_read_as_they_were_meant(name: str) -> None:
    """Catches what takes more than 200 answers to be met; the families share the 20,000."""
    n = 20_000 // len(FAMILIES)
    wrong = [one for seed in range(200, 200 + n) if (one := _check(name, seed))]
    assert not wrong, f"{len(wrong)} of {n}:\n" + "\n".join(wrong[:5])
