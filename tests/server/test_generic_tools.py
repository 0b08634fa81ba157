"""Tools of a model whose template knows none: the default model, asked as client libraries ask."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_chat, check_chunk, check_error, events
from tests.server.forcing import force
from tests.server.live_server import MODEL
from tests.server.test_tool_families import CALLS, NAMED, QUESTION, STRICT, TOOLS, ask, prompt_of

with lazy_imports():
    import anthropic


class User(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def written(calls: list[tuple[str, dict[str, Any]]]) -> str:
    objects = [json.dumps({"name": n, "arguments": given}, ensure_ascii=False) for n, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


@pytest.mark.representative(3)
@pytest.mark.full(only=["False"])
@pytest.mark.parametrize("stream", [False, True])
def test_conversations_that_wait_for_a_tool_are_kept(served, monkeypatch, stream):
    """Catches pages that others use while a tool runs, and answers without a call that are kept too."""
    kept = []
    monkeypatch.setattr(type(served.served.bridge.loop), "keep", lambda loop, request: kept.append(request))
    body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "stream": stream}
    for text, n in (("It is noon.", 0), (written(CALLS), 1)):
        force(served.served, monkeypatch, text)
        with served.http() as http:
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert len(kept) == n
    assert kept[0].answer.finish_reason == "stop"
    assert len(kept[0].sequence.page_keys) >= kept[0].n_prompt // 16


def test_the_system_prompt_shows_the_tools(served):
    """Catches tools that the model never sees, a system text that is lost, and tools shown without need."""
    system = {"role": "system", "content": "Be brief."}
    prompt = prompt_of(served, [system, *QUESTION], tools=TOOLS)
    assert prompt.count("<|im_start|>system") == 1
    assert "Be brief.\n\nYou can call functions." in prompt
    assert "The weather of a city" in prompt
    assert "get_weather" not in prompt_of(served, QUESTION, tools=TOOLS, tool_choice="none")


def test_history_is_plain_text(served):
    """Catches calls that are lost, a role that templates refuse, and turns that no longer alternate."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for i, (name, given) in enumerate(CALLS)
    ]
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "12 C"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
        {"role": "user", "content": "And now?"},
    ]
    prompt = prompt_of(served, history, tools=TOOLS)
    assert written(CALLS) in prompt
    results = "<tool_response>\n12 C\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd now?"
    assert prompt.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")
    assert written(CALLS) in prompt_of(served, history)


@pytest.mark.full
def test_calls_are_read_and_enforced(served, monkeypatch):
    """Catches a form that is not read, calls that are not enforced, and text that tools forbid."""
    force(served.served, monkeypatch, "Let me see.\n" + written(CALLS))
    for options in ({}, {"tools": STRICT}):
        assert ask(served, **options) == ("Let me see.", CALLS, "tool_calls")
    force(served.served, monkeypatch, written(CALLS))
    for required in ("required", "any"):  # Mistral's clients say any
        assert ask(served, tool_choice=required) == (None, CALLS, "tool_calls")
    force(served.served, monkeypatch, written(CALLS[1:]))
    assert ask(served, tool_choice=NAMED) == (None, CALLS[1:], "tool_calls")
    force(served.served, monkeypatch, "It is { noon }.")
    assert ask(served) == ("It is { noon }.", [], "stop")
    force(served.served, monkeypatch, written([("get_weather", {"city": 5})]))
    body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
    with served.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 500, "5 is no city"


@pytest.mark.full(only=["False"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_function_as_instructor_sends_it(served, stream):
    """Catches a request of instructor's mode TOOLS that is refused, and arguments outside of the type."""
    schema = User.model_json_schema()
    function = {"name": "User", "description": "Correctly extracted `User`", "parameters": schema}
    options: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "Jason is 25 years old."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "User"}},
        "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    if stream:
        with served.client.chat.completions.stream(**options) as chunks:
            message = chunks.get_final_completion().choices[0].message
    else:
        message = served.client.chat.completions.create(**options).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "User"
    assert isinstance(User.model_validate_json(call.function.arguments), User)


@pytest.mark.full
def test_output_tools_as_pydantic_ai_sends_them(served):
    """Catches output tools that cannot be required, and a history with a null content that is refused."""
    tool = {"name": "final_result", "description": "The final response", "strict": True}
    tool["parameters"] = User.model_json_schema() | {"additionalProperties": False}
    options: dict[str, Any] = {
        "model": MODEL, "stream": False, "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": "Jason is 25 years old."}]
    message = served.client.chat.completions.create(messages=messages, **options).choices[0].message
    (call,) = message.tool_calls
    User.model_validate_json(call.function.arguments)
    messages.append({"role": "assistant", "content": None, "tool_calls": [call.to_dict()]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Final result processed."})
    messages.append({"role": "user", "content": "And Ann, who is 30?"})
    again = served.client.chat.completions.create(messages=messages, **options).choices[0].message
    assert User.model_validate_json(again.tool_calls[0].function.arguments)


@pytest.mark.full
def test_several_calls_stream_and_all_endpoints_have_them(served):
    """Catches a form that only chats know, and bodies that do not fit the client's types."""
    functions = [{**tool["function"]} for tool in TOOLS]
    greedy = {"temperature": 0}
    options = {"messages": QUESTION, "model": MODEL, "tools": TOOLS, "tool_choice": "required"}
    with served.http() as http:
        check_chat(http.post("/v1/chat/completions", json=options | greedy | {"max_tokens": 60}).json())
        body = options | greedy | {"max_tokens": 60, "stream": True}
        for chunk in events(http.post("/v1/chat/completions", json=body)):
            check_chunk(chunk)
    answer = served.client.responses.create(
        model=MODEL, input="Weather?", tools=[{"type": "function", **f, "strict": None} for f in functions],
        tool_choice="required", parallel_tool_calls=False, max_output_tokens=100, **greedy,
    )  # fmt: skip
    assert [item.type for item in answer.output] == ["function_call"]
    message = anthropic.Anthropic(base_url=served.url, api_key="none").messages.create(
        model=MODEL, messages=QUESTION, max_tokens=100, extra_body=greedy,
        tools=[{"name": f["name"], "input_schema": f["parameters"]} for f in functions],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize(
    ("message", "param"),
    [({"role": "nonsense", "content": "x"}, "messages[1].role"), ({"role": "user"}, "messages[1].content")],
)
def test_errors_name_the_message_that_the_client_sent(served, message, param):
    """Catches a place counted among messages to which the one that shows the tools was added."""
    body = {"model": MODEL, "messages": [*QUESTION, message], "tools": TOOLS, "max_tokens": 1}
    with served.http() as http:
        check_error(http.post("/v1/chat/completions", json=body), 400, param)
