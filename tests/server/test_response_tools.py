"""Tools in /v1/responses by the openai client: items, events, history, and thoughts next to them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_error, check_event, check_response, events
from tests.server.live_server import MODEL, Served
from tests.server.test_thinking import options, thinker  # noqa: F401  (a fixture)

with lazy_imports():
    import openai

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
REQUIRED = {
    "model": MODEL,
    "input": QUESTION,
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 120,
}


def check_weather(item: Any) -> None:
    assert (item.type, item.name, item.status) == ("function_call", "get_weather", "completed")
    arguments = json.loads(item.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in "CF"


@pytest.mark.full
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_is_an_item(tooled, choice):
    """Catches a call that is text or outside of its schema, and one that differs in a stream."""
    tools = [WEATHER, TIME] if isinstance(choice, dict) else [WEATHER]
    asked = REQUIRED | {"tools": tools, "tool_choice": choice, "temperature": 0}
    answer = tooled.client.responses.create(**asked)
    (call,) = answer.output
    check_weather(call)
    assert call.id.startswith("fc_")
    assert call.call_id.startswith("call_")
    assert (answer.status, answer.output_text) == ("completed", "")
    assert answer.parallel_tool_calls is False
    assert answer.tools[0].strict is True
    chosen = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.model_dump()
    assert chosen == choice
    with tooled.client.responses.stream(**asked) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
            return await client.responses.create(**asked)

    assert asyncio.run(ask()).output[0].arguments == call.arguments


@pytest.mark.full
def test_the_events_of_a_call_come_in_order(tooled):
    """Catches an event that is missing, twice or in another place, and arguments that come all at once."""
    asked = REQUIRED | {"temperature": 0, "speculation": "off"}  # tokens of drafts come together
    with tooled.http() as http:
        check_response(http.post("/v1/responses", json=asked).json())
        told = list(events(http.post("/v1/responses", json=asked | {"stream": True})))
    for event in told:
        check_event(event)
    names = [event["type"].removeprefix("response.") for event in told]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(names[3:-3]) == {"function_call_arguments.delta"}
    assert len(names) > 10
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    begun, ended = told[2]["item"], told[-2]["item"]
    assert (begun["arguments"], begun["status"], begun["name"]) == ("", "in_progress", "get_weather")
    assert begun | {"arguments": ended["arguments"], "status": "completed"} == ended
    assert "".join(event["delta"] for event in told[3:-3]) == ended["arguments"] == told[-3]["arguments"]
    assert {event["item_id"] for event in told[3:-2]} == {begun["id"]}
    assert told[-1]["response"]["output"] == [ended]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    is_cold: bool


@pytest.mark.full
def test_a_type_of_the_client_is_a_tool(tooled):
    """Catches a schema that the client made and the server does not take, or does not follow."""
    answer = tooled.client.responses.parse(
        **REQUIRED | {"tools": [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]},
        temperature=0,
    )
    (call,) = answer.output
    assert isinstance(Weather.model_validate_json(call.arguments), Weather)


@pytest.mark.full
def test_results_of_calls_reach_the_template(tooled):
    """Catches a call or a result that is lost, or not next to the turn it belongs to."""
    answer = tooled.client.responses.create(**REQUIRED, temperature=0)
    (call,) = answer.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    history = [*QUESTION, *answer.output, result, {"role": "user", "content": "And now?"}]
    said = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "name": "get_weather", "content": "12 C"},
        {"role": "user", "content": "And now?"},
    ]
    service = tooled.served
    n_tokens = len(service.prompts.template.encode(service.tokenizer, said))
    plain = tooled.client.responses.create(model=MODEL, input=history, max_output_tokens=1)
    assert plain.usage.input_tokens == n_tokens
    with_tools = REQUIRED | {"input": history, "max_output_tokens": 1}
    assert tooled.client.responses.create(**with_tools).usage.input_tokens > n_tokens
    none = tooled.client.responses.create(**with_tools | {"tool_choice": "none"})
    assert none.usage.input_tokens == n_tokens
    assert none.output[0].type == "message"


def test_pieces_of_a_turn_are_one_message():
    """Catches thoughts, text and calls of one turn that become three turns, and two turns that become one."""
    from kukri.server.openai.responses import parse_response
    from kukri.server.openai.responses_schema import ResponseBody

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "b"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        call("f"),
        call("g"),
        {"type": "function_call_output", "call_id": "g", "output": "1"},
        {"type": "function_call_output", "call_id": "f", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"role": "user", "content": "i"},
    ]
    chat = parse_response(ResponseBody.model_validate({"model": MODEL, "input": items}))
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in "fg"]
    assert chat.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "b", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "g", "content": "1"},
        {"role": "tool", "tool_call_id": "f", "content": "2"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "reasoning_content": "h", "content": ""},
        {"role": "user", "content": "i"},
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"name": "a"}], "tool_choice": "auto"}, "tools[0].type"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_wrong_tools_are_named(tooled, changes, param):
    """Catches a request about tools that fails late, or that is taken for another."""
    with tooled.http() as http:
        check_error(http.post("/v1/responses", json=REQUIRED | changes), 400, param)


# ---- thoughts


def ask(server: Served, **more: Any) -> dict[str, Any]:
    given = options(server)
    body = {"model": MODEL, "input": given["messages"], "max_output_tokens": 12, "temperature": 0}
    return {**body, "thinking_token_budget": 5, "ignore_eos": True, **more}


@pytest.mark.full
def test_thoughts_are_an_item_of_their_own(thinker):  # noqa: F811
    """Catches thoughts in the message, events out of order, and log-probabilities of thoughts."""
    with thinker.http() as http:
        for more in ({}, {"top_logprobs": 1}):
            body = ask(thinker, **more)
            whole = http.post("/v1/responses", json=body).json()
            check_response(whole)
            told = list(events(http.post("/v1/responses", json=body | {"stream": True})))
            for event in told:
                check_event(event)
            thoughts, message = whole["output"]
            assert (thoughts["type"], thoughts["status"]) == ("reasoning", "completed")
            assert (message["type"], message["status"]) == ("message", "incomplete")
            assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
            streamed = told[-1]["response"]["output"]
            assert [{**item, "id": ""} for item in streamed] == [
                {**item, "id": ""} for item in whole["output"]
            ]
            done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
            assert done == streamed
            (part,) = message["content"]
            spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
            assert spelled.decode("utf-8", "replace") == (part["text"] if more else "")
            for kind, name in (("reasoning", "reasoning_text"), ("message", "output_text")):
                (item,) = (item for item in streamed if item["type"] == kind)
                deltas = [event for event in told if event["type"] == f"response.{name}.delta"]
                assert "".join(event["delta"] for event in deltas) == item["content"][0]["text"]
                assert {event["item_id"] for event in deltas} == {item["id"]}


def test_thoughts_can_be_sent_back(thinker):  # noqa: F811
    """Catches items of this server's output that it does not take as input."""
    create = thinker.client.responses.create
    greedy = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    first = create(input="Hi", max_output_tokens=4, include=["reasoning.encrypted_content"], **greedy)
    assert [item.type for item in first.output] == ["reasoning"]
    again = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "So?"}]
    assert create(input=again, max_output_tokens=2, **greedy).status == "incomplete"
