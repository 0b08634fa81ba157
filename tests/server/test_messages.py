"""/v1/messages by the real `anthropic` client, against the real model on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kukri import LLM
from kukri.server.anthropic.messages import parse_message
from kukri.server.anthropic.schema import PromptBody
from tests.lazy_imports import lazy_imports
from tests.server.bodies import (
    check_message,
    check_message_error,
    check_message_event,
    check_message_tokens,
    events,
)
from tests.server.live_server import MODEL, Served, serving
from tests.stopwatch import within

with lazy_imports():
    import anthropic

SYSTEM = "You are a helpful AI assistant."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# the client's newer versions know no temperature, top_p and top_k
GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}


def client(server: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.mark.representative(2)
def test_a_message_answers_as_the_model_does(served, offline):
    """Catches a system text, a parameter or a token lost on the way, and a wrong reason of the end."""
    messages = [{"role": "system", "content": SYSTEM}, *QUESTION]
    expected = offline.chat(messages, temperature=0, max_tokens=40)
    create = client(served).messages.create
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    for system in (SYSTEM, blocks):
        answer = create(messages=QUESTION, system=system, max_tokens=40, **GREEDY)
        assert [block.text for block in answer.content] == [expected.text]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert (answer.model, answer.role) == (MODEL, "assistant")
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(expected.prompt_token_ids)
        assert usage.output_tokens == len(expected.token_ids)
    assert usage.cache_read_input_tokens > 0, "the second time the prompt is known"
    assert answer._request_id.startswith("req_")
    short = create(messages=QUESTION, system=SYSTEM, max_tokens=3, **GREEDY)
    assert short.stop_reason == "max_tokens"
    assert expected.text.startswith(short.content[0].text)
    stopped = create(
        messages=QUESTION, system=SYSTEM, max_tokens=40, stop_sequences=["Rome", " is"], **GREEDY
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].text == expected.text.partition(" is")[0]


def test_turns_become_the_templates_messages(served, offline):
    """Catches blocks that are lost or out of order, and neighbours of one role that a template refuses."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    wanted = [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    n_tokens = len(offline.chat_template.encode(offline.tokenizer, wanted))
    counted = client(served).messages.count_tokens(messages=turns, model=MODEL)
    assert counted.input_tokens == n_tokens
    expected = offline.chat(wanted, temperature=0, max_tokens=8).text
    answer = client(served).messages.create(messages=turns, max_tokens=8, **GREEDY)
    assert answer.content[0].text == expected


def test_many_pieces_are_gathered_once():
    """Catches texts or calls that are copied for each piece: on the event loop, where all others wait."""
    use = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    n = 9_900  # a body has at most 10,000
    turns = [{"role": "user", "content": "a"}] * n + [{"role": "assistant", "content": [use] * n}]
    body = PromptBody.model_validate({"model": MODEL, "messages": [*turns, *QUESTION]})
    with within(2):  # 0.3 s where this was written
        asked, called, _ = parse_message(body).messages
    assert len(asked["content"]) == 2 * n - 1
    assert len(called["tool_calls"]) == n


def test_a_model_that_does_not_reason_keeps_any_budget(served):
    """Catches an agent that cannot use a small model, because it always asks for some thinking."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 4}}
    with served.http() as http:
        plain, asked = (http.post("/v1/messages", json=body | more).json() for more in ({}, thinking))
    assert plain["content"] == asked["content"]


@pytest.mark.full
def test_a_stream_tells_the_story_in_order(served, offline):
    """Catches an event that is missing, twice or in another place, and text that differs from the whole."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=8)
    body = {"messages": QUESTION, "max_tokens": 8, "stream": True, "model": MODEL, "temperature": 0}
    with served.http() as http:
        told = list(events(http.post("/v1/messages", json=body)))
    names = [event["type"] for event in told]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start, end = told[0]["message"], told[-2]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == len(
        expected.prompt_token_ids
    )
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 8
    for event in told:
        check_message_event(event)
    with client(served).messages.stream(messages=QUESTION, max_tokens=8, **GREEDY) as stream:
        assert "".join(stream.text_stream) == expected.text
        final = stream.get_final_message()
    whole = client(served).messages.create(messages=QUESTION, max_tokens=8, **GREEDY)
    assert final.content[0].text == whole.content[0].text == expected.text
    assert final.stop_reason == whole.stop_reason


def test_the_async_client_gets_the_same(served, offline):
    """Catches a response that only the synchronous client can read."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=6).text

    async def ask() -> list[str]:
        options = {"messages": QUESTION, "max_tokens": 6, **GREEDY}
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as asked:
            whole = await asked.messages.create(**options)
            async with asked.messages.stream(**options) as stream:
                streamed = "".join([text async for text in stream.text_stream])
        return [whole.content[0].text, streamed]

    assert asyncio.run(ask()) == [expected, expected]


@pytest.mark.full
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_are_called_and_their_results_read(tooled, choice):
    """Catches a call outside of its schema, a streamed call that differs, a result that is not shown."""
    options = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER, TIME] if choice["type"] == "tool" else [WEATHER],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 120,
    }
    greedy = {"temperature": 0}
    answer = client(tooled).messages.create(**options, extra_body=greedy)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert set(call.input) == {"city", "unit"}
    assert call.input["unit"] in "CF"
    with client(tooled).messages.stream(**options, extra_body=greedy) as stream:
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in final.content] == [(call.name, call.input)]
    assert final.stop_reason == "tool_use"
    with tooled.http() as http:
        check_message(http.post("/v1/messages", json=options | greedy).json())
        told = list(events(http.post("/v1/messages", json=options | greedy | {"stream": True})))
    for event in told:
        check_message_event(event)
    names = [event["type"] for event in told]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert told[1]["content_block"] | {"id": ""} == {
        "type": "tool_use", "id": "", "name": "get_weather", "input": {},
    }  # fmt: skip
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == call.input

    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 C"}]}
    history = [
        *options["messages"],
        answer.to_param(),
        {"role": "user", "content": [result | {"is_error": True}, {"type": "text", "text": "And now?"}]},
    ]
    said = [
        *options["messages"],
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            ],
        },
        {"role": "tool", "name": "get_weather", "content": "Error: 12 C"},
        {"role": "user", "content": "And now?"},
    ]
    tokenizer, template = tooled.served.tokenizer, tooled.served.prompts.template
    counted = client(tooled).messages.count_tokens(model=MODEL, messages=history)
    assert counted.input_tokens == len(template.encode(tokenizer, said))
    with_tools = client(tooled).messages.count_tokens(model=MODEL, messages=history, tools=options["tools"])
    assert with_tools.input_tokens > counted.input_tokens, "the template saw the tools"
    follow_up = client(tooled).messages.create(
        model=MODEL, messages=history, tools=options["tools"], tool_choice={"type": "none"}, max_tokens=4
    )
    assert follow_up.usage.input_tokens + follow_up.usage.cache_read_input_tokens == counted.input_tokens


@pytest.mark.full
def test_an_answer_follows_its_schema(tooled):
    """Catches a format that is not enforced, thoughts that are not wanted, and another API's field named."""
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [7, 9]}}, "required": ["n"]}
    schema["additionalProperties"] = False

    def ask(schema: dict[str, Any], **more: Any) -> anthropic.types.Message:
        given = {"format": {"type": "json_schema", "schema": schema}}
        return client(tooled).messages.create(
            messages=QUESTION, max_tokens=60, output_config=given, model=MODEL, **more
        )

    for _ in range(6):  # the model would begin every second answer with thoughts
        answer = ask(schema, thinking={"type": "disabled"})
        assert [block.type for block in answer.content] == ["text"]
        assert answer.content[0].text.lstrip()[:1] == "{"
    answer = ask(schema, thinking={"type": "disabled"}, extra_body={"temperature": 0})
    assert json.loads(answer.content[0].text)["n"] in (7, 9)
    with pytest.raises(anthropic.BadRequestError, match=r"'output_config\.format' cannot be used"):
        ask({"$ref": "http://example.org/schema"})


def test_every_body_fits_the_schema(served):
    """Catches fields that Anthropic's API does not have, and nulls that are missing."""
    body = {"messages": QUESTION, "max_tokens": 4, "model": MODEL}
    with served.http() as http:
        check_message(http.post("/v1/messages", json=body).json())
        prompt = {"messages": QUESTION, "model": MODEL, "system": SYSTEM}
        assert check_message_tokens(http.post("/v1/messages/count_tokens", json=prompt).json()) > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "'messages[0].content[0]' must not be of type 'image': the model reads and writes only text",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "'messages[0].content' must be a text or a list",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "a block 'tool_use' must be in a message of the assistant",
        ),
        ({"tool_choice": {"type": "any"}}, "'tools' is required"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name' is required for the type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "must be below 'max_tokens' (8), not 8"),
        ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens' is required for the type"),
        ({"container": "a"}, "'container' is not supported"),
        ({"frequency_penalty": 3}, "'frequency_penalty' must be at most 2"),
        ({"messages": [{"role": "user", "content": "a " * 1100}]}, "prompt is too long: "),
    ],
)
def test_what_is_wrong_is_named(served, changes, message):
    """Catches a field that is taken and not heard, and errors in another API's form."""
    body = {"messages": QUESTION, "max_tokens": 8, "model": MODEL} | changes
    body = {name: value for name, value in body.items() if value is not None}
    with served.http() as http:
        assert message in check_message_error(http.post("/v1/messages", json=body), 400)


@pytest.mark.parametrize("content", [[], [{"type": "text", "text": ""}], 2 * [{"type": "text", "text": ""}]])
def test_an_empty_turn_is_an_empty_text(served, content):
    """Catches turns of empty blocks alone that are lost, and a 500 for a conversation of them."""
    count = client(served).messages.count_tokens
    (found, wanted) = (
        count(model=MODEL, messages=[{"role": "user", "content": one}]).input_tokens for one in (content, "")
    )
    assert found == wanted


def test_what_asks_for_nothing_is_taken(served, offline):
    """Catches clients that always send a field, and get an error for its default."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=4).text
    answer = client(served).messages.create(
        messages=QUESTION,
        max_tokens=4,
        thinking={"type": "disabled"},
        service_tier="auto",
        metadata={"user_id": "u"},
        tool_choice={"type": "none"},
        cache_control={"type": "ephemeral"},
        extra_body={"top_p": 1.0, "top_k": 1},
        model=MODEL,
    )
    assert answer.content[0].text == expected


@pytest.mark.full
def test_errors_have_the_form_of_their_api(smollm2_path):
    """Catches OpenAI's form at Anthropic's paths or the other way round, and a key that is not read."""
    with (
        LLM(smollm2_path, max_context=128) as llm,
        serving(llm, api_keys=("k1",), rate_limit=4, max_body_bytes=2000) as server,
        server.http() as http,
    ):
        key = {"x-api-key": "k1"}
        with pytest.raises(anthropic.AuthenticationError):
            client(server, "wrong").messages.create(messages=QUESTION, model=MODEL, max_tokens=1)
        answer = client(server, "k1").messages.create(messages=QUESTION, model=MODEL, max_tokens=1)
        assert answer.usage.output_tokens == 1
        with pytest.raises(anthropic.NotFoundError) as caught:
            client(server, "k1").messages.create(messages=QUESTION, model="other", max_tokens=1)
        assert caught.value.body["error"]["type"] == "not_found_error"
        check_message_error(http.post("/v1/messages/what", json={}, headers=key), 404)
        too_large = http.post("/v1/messages", content=b"x" * 3000, headers=key)
        assert "at most 2000 bytes" in check_message_error(too_large, 413)
        assert too_large.json()["error"]["type"] == "request_too_large"
        limited = http.post("/v1/messages", json={}, headers=key)
        assert "4 POST requests a minute" in check_message_error(limited, 429)
        assert limited.json()["error"]["type"] == "rate_limit_error"
        assert limited.headers["retry-after"]
        both = (key | {"authorization": value} for value in ("Bearer k1", "Bearer x", "Basic x"))
        for headers in (key, {"authorization": "Bearer k1"}, *both):
            assert http.get("/v1/models", headers=headers).status_code == 200
        for headers in (
            {},
            {"x-api-key": ""},
            {"x-api-key": "Bearer k1"},
        ):
            refused = http.get("/v1/models", headers=headers)
            assert (refused.status_code, set(refused.json())) == (401, {"error"})


@pytest.mark.full
def test_tool_runners_go_on_without_a_thread(tooled):
    """Catches a refusal of `thread` that the client does not know, after which it gives up."""
    asked: list[str] = []

    @anthropic.beta_tool
    def get_time(city: str) -> str:
        """The time in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "noon"

    runner = client(tooled).beta.messages.tool_runner(
        tools=[get_time],
        tool_choice={"type": "tool", "name": "get_time"},
        messages=[{"role": "user", "content": "What time is it in Paris?"}],
        max_tokens=100,
        max_iterations=2,
        **GREEDY,
    )
    answers = list(runner)
    assert [one.stop_reason for one in answers] == ["tool_use", "tool_use"]
    assert len(asked) >= 1


def test_a_thread_is_refused_as_anthropics_api_does(served):
    """Catches an error by which no client knows that it may send the whole conversation."""
    body = {"model": MODEL, "max_tokens": 1, "messages": QUESTION, "thread": {"type": "create"}}
    with served.http() as http:
        for path in ("/v1/messages?beta=true", "/v1/messages", "/v1/messages/count_tokens"):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            wanted = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert answer.json()["error"]["details"] == wanted


def test_unknown_fields_of_a_beta_are_named(served, caplog):
    """Catches a beta's field that ends an agent, or vanishes; without a beta a typo is still an error."""
    caplog.set_level(logging.INFO, "kukri.server")
    prompt = {"model": MODEL, "messages": QUESTION, "fallbacks": [], "new\nfield": 1}
    body = {**prompt, "max_tokens": 1}
    with served.http() as http:
        for path, sent in (("/v1/messages", body), ("/v1/messages/count_tokens", prompt)):
            answer = http.post(f"{path}?beta=true", json=sent)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-fields-left-out"] == "fallbacks, new_field"
            refused = http.post(path, json=sent)
            assert refused.status_code == 400
            assert "'fallbacks' is not supported" in check_message_error(refused, 400)
        known = http.post("/v1/messages?beta=true", json={**body, "container": "c"})
        assert "'container' is not supported" in check_message_error(known, 400)
        inside = [{"role": "user", "content": "Hi", "new": 1}]
        assert http.post("/v1/messages", json={**body, "messages": inside}).status_code == 400
    lines = [one.fields_left_out for one in caplog.records if hasattr(one, "fields_left_out")]
    assert lines[:2] == ["fallbacks, new_field"] * 2
