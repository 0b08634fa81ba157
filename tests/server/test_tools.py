"""Tool calls of the real model, with the template of a model that calls tools, by the openai client."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.bodies import check_chat, check_chunk, check_error, events
from tests.server.live_server import MODEL

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
