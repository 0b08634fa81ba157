"""What was once an answer is always a legal history; other parts of it become notes; hints change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kukri.errors import RequestError
from kukri.server.anthropic.messages import parse_message
from kukri.server.anthropic.schema import MessagesBody, PromptBody
from kukri.server.ollama.answers import parse_ollama_chat
from kukri.server.ollama.schema import OllamaChatBody
from kukri.server.openai.chat_completions import parse_chat
from kukri.server.schema import ChatBody
from kukri.tokenizer import ChatTemplate
from kukri.tokenizer.messages import ROLES, checked_messages
from tests.server.bodies import check_error
from tests.server.live_server import CHAT, MODEL

HI = {"role": "user", "content": "Hi"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


ON, OFF = ({"enable_thinking": value, "thinking": value} for value in (True, False))


def told(messages: Any) -> list[dict[str, Any]]:
    """The messages as a model of text alone gets them."""
    return checked_messages(list(messages), frozenset(ROLES))


def chat(*messages: Any, **more: Any) -> list[dict[str, Any]]:
    return list(parse_chat(ChatBody.model_validate({"messages": list(messages), **more})).messages)


def message(*turns: Any, **more: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "max_tokens": 1, "messages": list(turns), **more}
    return list(parse_message(MessagesBody.model_validate(body)).messages)


def ollama(*messages: Any) -> list[dict[str, Any]]:
    body = OllamaChatBody.model_validate({"model": MODEL, "messages": list(messages)})
    return list(parse_ollama_chat(body).messages)


def test_parts_of_a_chats_history_become_notes():
    """Catches a conversation that ends forever with its first picture."""
    asked = {"role": "user", "content": [{"type": "text", "text": "Look:"}, PICTURE]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    heard = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    found = told(chat(asked, refused, HI, heard, HI))
    assert [one["content"] for one in found] == ["Look:\n[image]", "No.", "Hi", "[audio]", "Hi"]
    other = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert chat(other)[0]["content"] == ChatTemplate("{{ messages[0].content }}").render([other]) == "a\nb"
    result = {"role": "tool", "tool_call_id": "a", "content": [PICTURE]}
    assert told(chat(HI, result))[1]["content"] == "[image]"
    assert ChatTemplate("{{ messages[0].content }}").render([asked, refused, HI]) == "Look:\n[image]"


def test_a_part_of_the_newest_turn_is_named():
    """Catches an answer about a picture that nobody has seen, and an error in a library's words."""
    asked = {"role": "user", "content": [{"type": "text", "text": "?"}, PICTURE]}
    before = [HI, {"role": "assistant", "content": "a"}]
    for parse, messages, param in (
        (chat, [*before, asked], "messages[2].content[1]"),
        (message, [*before, {"role": "user", "content": [BLOCK]}], "messages[2].content[0]"),
        (ollama, [{**HI, "images": ["aGk="]}], "messages[0].images"),
        (lambda *m: ChatTemplate("x").render(m), [asked], "messages[0].content[1]"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match="the model reads and writes only text") as caught:
            told(parse(*messages))
        assert caught.value.param.startswith(param)


def test_blocks_of_a_messages_history_become_notes():
    """Catches a 400 for what Claude's own clients have in their histories."""
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Words."}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    answer = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "text", "text": "Yes.", "citations": [{"type": "char_location"}]},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "agent"}},
    ]
    turns = [
        {"role": "user", "content": [BLOCK, pdf, document]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [document]},
    ]
    found = told(message(*turns))
    assert found[0]["content"] == "[image]\n[document]\nWords."
    assert found[1]["content"] == "[server tool use]\nYes."
    assert found[1]["reasoning_content"] == "Hm."
    assert found[1]["tool_calls"][0]["function"]["name"] == "f"
    assert found[2] == {"role": "tool", "content": "[image]", "tool_call_id": "t"}
    assert found[3] == {"role": "assistant", "reasoning_content": "Hm.", "content": ""}
    assert found[4]["content"] == "Words."


def test_reasoning_has_two_names():
    """Catches thoughts of an earlier turn that vanish under vLLM's newer name."""
    for fields in (
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning": "x", "reasoning_content": "Hm."},
    ):
        (found,) = chat({"role": "assistant", "content": None, **fields})
        assert (found["reasoning_content"], "reasoning" in found) == ("Hm.", False)


def test_ollamas_pictures_become_notes():
    """Catches the same in Ollama's form, where pictures are next to the text and come first."""
    asked = {"role": "user", "content": "Look", "images": ["aGk=", "aGk="]}
    found = told(ollama(asked, {"role": "assistant", "content": "a"}, HI))
    assert found[0]["content"] == "[image]\n[image]\nLook"


@pytest.mark.parametrize(
    ("fields", "effort", "variables"),
    [
        ({"enable_thinking": False}, "none", OFF),
        ({"think": True}, "medium", ON),
        ({"think": "low"}, "low", ON),
        ({"thinking": {"type": "disabled"}}, "none", OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "medium", ON),
        ({"thinking": False, "reasoning_effort": "high"}, "high", OFF),
        (
            {"think": False, "chat_template_kwargs": {"enable_thinking": True}},
            "none",
            {"enable_thinking": True, "thinking": False},
        ),
        ({}, None, {}),
    ],
)  # fmt: skip
def test_switches_of_thinking_mean_the_templates(fields, effort, variables):
    """Catches a 400 for other servers' spellings of whether to reason, and one that changes nothing."""
    found = parse_chat(ChatBody.model_validate({"messages": [HI], **fields}))
    assert (found.effort, found.template_variables) == (effort, variables)
    assert found.thinking_budget == (5 if "budget_tokens" in str(fields) else None)


def test_names_of_tools_may_be_those_of_mcp():
    """Catches names with dots, or of up to 128 characters, that are refused."""
    for name in ("mcp.server.read-file", "a" * 128):
        tool = {"type": "function", "function": {"name": name}}
        asked = parse_chat(
            ChatBody.model_validate(
                {"messages": [HI], "tools": [tool], "tool_choice": {"type": "function", "name": name}}
            )
        )
        assert asked.tool_name == name


def test_the_billing_header_is_kept_out_of_the_prompt():
    """Catches a system prompt that differs with each request, so that no prefix is ever found again."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}},
    ]
    assert message(HI, system=system)[0] == {"role": "system", "content": "Be brief."}
    amid = [HI, {"role": "assistant", "content": "a"}, {"role": "system", "content": "New."}, HI]
    assert [one["role"] for one in message(*amid, system=system)] == [
        *("system", "user", "assistant", "system", "user")
    ]


def test_hosted_tools_are_left_out_and_said(served):
    """Catches an agent refused for a tool that the server cannot run, or not told that it was left out."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    body = {"model": MODEL, "max_tokens": 1, "messages": [HI], "tools": tools}
    with served.http() as http:
        answer = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b"})
        assert answer.status_code == 200
        assert answer.headers["x-tools-left-out"] == "web_search"
        nameless = [{"type": "json"}, {"type": "\r\n"}, {"type": ""}]  # which no header may have as they are
        said = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1, "tools": nameless})
        assert said.headers["x-tools-left-out"] == "json, __, _"
        plain = http.post("/v1/messages", json={**body, "tools": []})
        assert "x-tools-left-out" not in plain.headers
        counted = http.post(
            "/v1/messages/count_tokens", json={key: body[key] for key in ("model", "messages", "tools")}
        )
        usage = answer.json()["usage"]
        assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        long = {**body, "messages": [{"role": "user", "content": "a " * 1100}]}
        message_ = http.post("/v1/messages", json=long).json()["error"]["message"]
        assert message_.startswith("prompt is too long: 1")
        assert message_.endswith(" tokens > 1024 maximum")
        found = http.post("/v1/chat/completions", json={"messages": long["messages"]})
        assert found.json()["error"]["code"] == "context_length_exceeded"


def test_hints_are_taken(served):
    """Catches clients refused for a field that cannot change an answer."""
    body = {"model": MODEL, "messages": [HI], "max_tokens": 1, "stream": True}
    with served.http() as http:
        options = {"include_obfuscation": True}
        assert http.post("/v1/chat/completions", json={**body, "stream_options": options}).status_code == 200
        hints = {
            "speed": "fast",
            "inference_geo": "us",
            "thinking": {"type": "adaptive", "display": "omitted"},
        }
        assert http.post("/v1/messages", json={**body, **hints}).status_code == 200
        check_error(http.post("/v1/chat/completions", json={**body, "nonsense": 1}), 400, "nonsense")


def test_a_prompt_body_knows_hosted_tools():
    """Catches count_tokens that refuses what messages take."""
    body = {"messages": [HI], "tools": [{"type": "bash_20250124", "name": "bash"}]}
    assert parse_message(PromptBody.model_validate(body)).functions == []


@pytest.mark.full
def test_an_image_in_a_result_is_refused_or_noted(served):
    """Catches a template without a role for tools whose results lose their images, or fail by them."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "seen"}, image]}
    history: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, image]},
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": [call]},
        result,
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    later = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Thanks"}]
    with served.http() as http:
        for more in ({}, {"tools": tools}):
            newest = http.post(CHAT, json={"messages": history, "max_tokens": 1, **more})
            assert newest.status_code == 400
            assert "the model reads and writes only text" in newest.json()["error"]["message"]
            body = {"messages": [*history, *later], "max_tokens": 1, "verbose": True, **more}
            told = http.post(CHAT, json=body).json()["__verbose"]["prompt"]
            assert "seen" in told
            assert told.count("[image]") == 2
