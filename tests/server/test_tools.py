"""Tool calls told apart from text, however it is cut, and those of the real model by the openai client."""

from __future__ import annotations

import json
import re
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
from tests.server.bodies import check_chat, check_chunk, check_error, events
from tests.server.live_server import MODEL

CODE = replace(HERMES, reads_code=True)
SIGNATURES = Signatures([{"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}])
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'


def split(dialect: Dialect, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """(what is said, the calls) of a text in pieces."""
    parser, text, calls = ToolParser(marks_of(dialect), SIGNATURES), "", []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.flush():
        if isinstance(event, CallDelta):
            if event.name is not None:
                assert event.place == len(calls)
                calls.append((event.name, ""))
            name, arguments = calls[event.place]
            calls[event.place] = name, arguments + event.arguments
        else:
            text += event
    return text, calls


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


# ---- the real model, with the template of a model that calls tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"$ref": "#/$defs/unit"},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"unit": {"enum": ["C", "F"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_weather(call: Any) -> None:
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in "CF"


@pytest.mark.full(but=["required"])
@pytest.mark.representative(3)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_comes_and_fits_its_schema(tooled, choice):
    """Catches a call that is text, arguments outside of the schema, and a $ref that points elsewhere."""
    for seed in range(4):
        options = {
            "messages": QUESTION,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "model": MODEL,
            "temperature": 1,
            "seed": seed,
            "max_tokens": 120,
        }
        answer = tooled.client.chat.completions.create(**options).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        if call.function.name == "get_weather" or choice != "required":
            check_weather(call)
        with tooled.client.chat.completions.stream(**options) as stream:
            whole = stream.get_final_completion().choices[0]
        (streamed,) = whole.message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        assert whole.finish_reason == "tool_calls"


def test_bodies_with_calls_fit_the_schema(tooled):
    """Catches fields of calls that the client's types do not have, or lack."""
    options = {
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 40,
    }
    with tooled.http() as http:
        check_chat(http.post("/v1/chat/completions", json=options).json())
        for chunk in events(http.post("/v1/chat/completions", json=options | {"stream": True})):
            check_chunk(chunk)


@pytest.mark.full
def test_an_answer_without_calls_is_plain(tooled):
    """Catches white space that tools take from an answer, and a reason that speaks of calls."""
    options = {"messages": QUESTION, "model": MODEL, "temperature": 0, "max_tokens": 30}
    plain = tooled.client.chat.completions.create(**options)
    chosen = tooled.client.chat.completions.create(tools=TOOLS, tool_choice="none", **options)
    assert chosen.choices[0].message == plain.choices[0].message
    auto = tooled.client.chat.completions.create(tools=TOOLS, **options)
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens, "the template saw the tools"
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    for seed in range(3):
        answer = tooled.client.chat.completions.create(
            messages=[{"role": "user", "content": "Call get_weather."}],
            tools=strict,
            model=MODEL,
            temperature=1,
            seed=seed,
            max_tokens=60,
        )
        for call in answer.choices[0].message.tool_calls or ():
            if answer.choices[0].finish_reason == "tool_calls":
                check_weather(call)


def test_history_with_results_reaches_the_template(tooled):
    """Catches arguments that are quoted twice, and results that lost the name of their tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": "é"}'}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    with tooled.http() as http:
        prompt = http.post("/apply-template", json={"messages": history}).json()["prompt"]
    assert '<tool_call>{"name": "get_time", "arguments": {"a": "\\u00e9"}}</tool_call>' in prompt.replace(
        "é", "\\u00e9"
    )
    answer = tooled.client.chat.completions.create(messages=history, model=MODEL, max_tokens=2)
    ids = tooled.served.tokenizer.encode("get_time: noon")
    assert answer.usage.prompt_tokens >= len(ids)
    assert "get_time: noon" in prompt


@pytest.mark.full
def test_thoughts_end_within_their_budget(tooled):
    """Catches a grammar that begins inside the thoughts, and a template variable that is lost."""
    answer = tooled.client.chat.completions.create(
        messages=QUESTION,
        model=MODEL,
        temperature=1,
        seed=1,
        max_tokens=400,
        response_format={"type": "json_object"},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "structured_outputs": None},
    ).choices[0]
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)
    else:
        assert answer.message.reasoning_content
    with tooled.http() as http:
        body = {"model": MODEL, "messages": QUESTION, "thinking_token_budget": 5}
        assert "<think>" in check_error(
            http.post("/v1/chat/completions", json=body), 400, "thinking_token_budget"
        )


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_wrong_tools_are_named(tooled, changes, param):
    """Catches a request about tools that fails late, or that is taken for another."""
    with tooled.http() as http:
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1} | changes
        check_error(http.post("/v1/chat/completions", json=body), 400, param)


HARD = {  # schemas that no grammar is made of
    "names": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unique": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "ahead": {"type": "string", "pattern": "^(?=a)b"},
    "format": {"type": "string", "format": "cron"},
    "none": {"not": {"type": "string"}},
    "wrong": {"type": "strin"},
    "elsewhere": {"$ref": "https://example.org/schema"},
    "empty": {"enum": []},
    "short": {"type": "string", "minLength": 5, "maxLength": 2},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "depends": {"type": "object", "dependentRequired": {"a": ["b"]}},
}


@pytest.mark.parametrize("name", HARD)
def test_no_schema_of_a_tool_fails_a_request(tooled, name, caplog):
    """Catches a 400 for one keyword in one of many tools, and other arguments that are free too."""
    properties = {"unit": {"enum": ["C", "F"]}, name: HARD[name]}
    parameters = {"type": "object", "properties": properties, "required": ["unit", name]}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "hard", "parameters": parameters}}]
    options = {"messages": QUESTION, "model": MODEL, "temperature": 0, "max_tokens": 40, "seed": 1}
    choice = {"type": "function", "function": {"name": "hard"}}
    answer = tooled.client.chat.completions.create(tools=tools, tool_choice=choice, **options)
    arguments = answer.choices[0].message.tool_calls[0].function.arguments
    assert re.match(r'\{\s*"unit"\s*:\s*"[CF]"', arguments), arguments
    assert "hard" in caplog.text or "enforced" in caplog.text


@pytest.mark.parametrize(
    "parameters", [{"type": "x"}, {"oneOf": [HARD["names"], HARD["ahead"]]}, {"not": {}}]
)
def test_a_schema_that_is_wrong_altogether_leaves_the_arguments_free(tooled, parameters):
    """Catches a request that fails for want of a schema."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = tooled.client.chat.completions.create(
        messages=QUESTION, model=MODEL, tools=tools, tool_choice="required", max_tokens=30, temperature=0
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "f"


def test_an_answers_schema_is_refused_with_its_place(tooled):
    """Catches a 400 that leaves the client to search a schema of a thousand lines."""
    inner = {"type": "object", "properties": {"a/b": {"type": "array", "items": HARD["unique"]}}}
    schema = {"type": "object", "properties": {"ok": {"type": "string"}, "deep": inner}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with tooled.http() as http:
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, "response_format": form}
        message = check_error(http.post("/v1/chat/completions", json=body), 400, "response_format")
    assert "at /properties/deep/properties/a~1b/items: " in message
    assert "uniqueItems" in message


def test_the_template_gets_the_tools_of_apply_template_and_tokenize(tooled):
    """Catches a prompt that is shown or counted without the tools that a chat would have."""
    body = {"messages": QUESTION, "tools": TOOLS}
    with tooled.http() as http:
        shown = http.post("/apply-template", json=body).json()["prompt"]
        counted = http.post("/tokenize", json=body).json()["count"]
    assert "The weather of a city" in shown
    answer = tooled.client.chat.completions.create(model=MODEL, max_tokens=1, **body)
    assert answer.usage.prompt_tokens == counted
