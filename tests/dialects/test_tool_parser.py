"""Tool calls told apart from text, however the text is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.dialects.answer_parser import marks_of
from kukri.dialects.calls import CallDelta
from kukri.dialects.dialect import Dialect
from kukri.dialects.families import HERMES, LLAMA_3, MISTRAL, MISTRAL_NAMES
from kukri.dialects.signatures import Signatures
from kukri.dialects.tool_parser import ToolParser
from tests.dialects.test_families import gathered

CODE = replace(HERMES, reads_code=True)
SIGNATURES = Signatures([{"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}])
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'


def split(dialect: Dialect, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """(what is said, the calls) of a text in pieces."""
    parser = ToolParser(marks_of(dialect), SIGNATURES)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    return gathered(events)[1:]


CASES: list[tuple[Dialect, str, str, list[tuple[str, Any]]]] = [
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", {"city": "Paris"})]),
    (HERMES, "Hello there. \n", "Hello there. \n", []),
    (
        HERMES,
        f"Let me see.\n\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>"
        '{"name": "f", "arguments": {"x": "</tool_call> {\\"", "y": [{}, "}"]}}</tool_call>\nDone. ',
        "Let me see.\nDone. ",
        [("weather", {"city": "Paris"}), ("f", {"x": '</tool_call> {"', "y": [{}, "}"]})],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": \"é\"}"}', "", [("f", {"a": "é"})]),
    (HERMES, '<tool_call>{"id": {"name": "no"}, "name": "f", "parameters": {}}', "", [("f", {})]),
    (HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (HERMES, "<tool_call>{broken}</tool_call> b", "<tool_call>{broken}</tool_call> b", []),
    (HERMES, '<tool_call>{"no": "name"}</tool_call>', '<tool_call>{"no": "name"}</tool_call>', []),
    (HERMES, 'x <tool_call>\n{"name": "f', 'x <tool_call>\n{"name": "f', []),
    (HERMES, "if a <tool", "if a <tool", []),
    (LLAMA_3, ' {"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    (
        LLAMA_3,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (LLAMA_3, 'Say {"name": "f"}.', 'Say {"name": "f"}.', []),
    (LLAMA_3, '{"answer": 42} is JSON', '{"answer": 42} is JSON', []),
    (
        MISTRAL,
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}] ',
        "Well.",
        [("f", {"a": [1]}), ("g", {})],
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL', "[TOOL", [("f", {})]),
    (
        MISTRAL_NAMES,
        '[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        "",
        [("f", {"a": {"b": "}"}}), ("g", {})],
    ),
    (MISTRAL_NAMES, "[TOOL_CALLS] what is this? {", "[TOOL_CALLS] what is this? {", []),
    (
        CODE,
        "<code>\nadd(1, b='x')\nr = f(c=[1, None])\n</code>",
        "",
        [("add", {"a": 1, "b": "x"}), ("f", {"c": [1, None]})],
    ),
    (CODE, "See <code>x + 1</code> there", "See <code>x + 1</code> there", []),
    (CODE, "<code>add(1, 2, 3)</code>", "<code>add(1, 2, 3)</code>", []),
    (CODE, "<code>add(1e999)</code>", "<code>add(1e999)</code>", []),
    (CODE, "<code>import os\nos.remove('x')</code>", "<code>import os\nos.remove('x')</code>", []),
]


@pytest.mark.parametrize(("dialect", "text", "said", "calls"), CASES)
def test_calls_are_found_whole_and_letter_by_letter(dialect, text, said, calls):
    """Catches a family's form that is read wrongly, and text that is taken for a call or lost with one."""
    for pieces in ([text], text):
        found, found_calls = split(dialect, *pieces)
        assert found == said
        assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "[ARGS]",
    "<code>",
    "</code>",
    WEATHER,
    WEATHER[:20],
    '{"name": "f", "arguments": {}}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ";",
    ":",
    " ",
    "\n",
    "f",
    "add(1)",
    "<tool",
    "[TOOL",
]


@pytest.mark.representative(2)
@settings(max_examples=300)
@given(
    dialect=st.sampled_from([HERMES, LLAMA_3, MISTRAL, MISTRAL_NAMES, CODE]),
    text=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_however_a_text_is_cut_the_calls_are_the_same(dialect, text, cuts):
    """Catches anything that depends on where a chunk ends, and text that is neither said nor called."""
    whole = split(dialect, text)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert split(dialect, *(text[a:b] for a, b in pairwise(places))) == whole
    assert split(dialect, *text) == whole
    if not whole[1]:
        assert whole[0] == text


def test_arguments_are_streamed():
    """Catches arguments that are held back until the call is whole."""
    parser = ToolParser(marks_of(HERMES), SIGNATURES)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": "some ') == [
        CallDelta(0, "f", '{"a": "some ')
    ]
    assert parser.push("more") == [CallDelta(0, None, "more")]
    assert parser.push('"}}</tool_call>') == [CallDelta(0, None, '"}')]
    assert parser.flush() == []
