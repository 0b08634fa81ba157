"""Thoughts that a template begins: apart from the answer in each form of it, and templates given."""

from __future__ import annotations

import pytest

from kukri import LLM
from tests.server.bodies import check_chat, check_response, events
from tests.server.forcing import force
from tests.server.live_server import ASK, CHAT, MODEL, RESPONSE, serving


@pytest.fixture(scope="module")
def thinking(smollm2_path):
    """A server whose template begins the model's thoughts, so that all it says are thoughts."""
    with LLM(smollm2_path, max_context=512) as llm:
        assert llm.tokenizer.chat_template is not None
        llm.tokenizer.chat_template += (
            "{% if enable_thinking %}<think>\n{% endif %}"
            "{% if messages[0].role == 'assistant_tool_call' %}!{% endif %}"
        )
        with serving(llm) as server:
            yield server


def test_another_template_can_be_given(smollm2_path):
    """Catches a template that is loaded and not used."""
    with LLM(smollm2_path, max_context=64, chat_template="{{ messages[0].content }}!") as llm:
        assert llm.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_roles_of_the_template_are_taken(thinking):
    """Catches a list of roles in the server, where the template knows others."""
    with thinking.http() as http:
        said = {"role": "assistant_tool_call", "content": "x"}
        prompt = http.post("/apply-template", json={"messages": [said]}).json()["prompt"]
        assert "<|im_start|>assistant_tool_call\nx<|im_end|>" in prompt
        assert prompt.endswith("!")
        answer = http.post(CHAT, json=ASK[CHAT] | {"messages": [said], "max_tokens": 2})
        assert answer.status_code == 200, answer.text


def test_thoughts_are_no_content(thinking):
    """Catches thoughts in the answer, and template variables that do not arrive."""
    body = ASK[CHAT] | {"max_tokens": 6, "chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
    with thinking.http() as http:
        answer = http.post(CHAT, json=body).json()
        check_chat(answer)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"]
        assert message["content"] is None
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
        deltas = [
            chunk["choices"][0]["delta"] for chunk in events(http.post(CHAT, json=body | {"stream": True}))
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        plain = http.post(CHAT, json=body | {"chat_template_kwargs": {"enable_thinking": False}}).json()
        assert plain["choices"][0]["message"]["content"]
        assert "reasoning_content" not in plain["choices"][0]["message"]


def test_thoughts_are_an_item_of_a_response(thinking):
    """Catches a reasoning effort that does not reach the template, and events the client cannot read."""
    body = ASK[RESPONSE] | {"max_output_tokens": 6, "reasoning": {"effort": "low"}, "temperature": 0}
    with thinking.http() as http:
        answer = check_response(http.post(RESPONSE, json=body).json())
    assert answer.output[0].type == "reasoning"
    assert answer.output[0].content[0].text
    with thinking.client.responses.stream(
        model=MODEL, input="Hi", max_output_tokens=6, reasoning={"effort": "low"}, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
    assert text == answer.output[0].content[0].text


def test_stop_strings_count_after_the_thoughts_in_every_api(served, monkeypatch):
    """Catches an API in which a thought that mentions a stop string leaves no answer."""
    force(served.served, monkeypatch, "<think>A Question: who?</think>Rome. Question: next")
    told, stop = {"model": MODEL, "messages": ASK[CHAT]["messages"], "stream": False}, ["Question:"]
    with served.http() as http:
        ask = lambda path, body: http.post(path, json=told | body).json()  # noqa: E731
        message = ask(CHAT, {"stop": stop})["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Rome. ", "A Question: who?")
        answer = ask("/v1/messages", {"stop_sequences": stop, "max_tokens": 50})
        assert [one.get("text") for one in answer["content"]] == [None, "Rome. "]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Question:")
        answer = ask("/api/chat", {"options": {"stop": stop}})["message"]
        assert (answer["content"], answer["thinking"]) == ("Rome. ", "A Question: who?")
        plain = {"model": MODEL, "prompt": "Hi", "stream": False}
        answer = http.post("/api/generate", json=plain | {"options": {"stop": stop}}).json()
        assert (answer["response"], answer["thinking"]) == ("Rome. ", "A Question: who?")
        answer = http.post("/v1/completions", json=plain | {"stop": stop, "max_tokens": 50}).json()
        assert answer["choices"][0]["text"] == "<think>A ", "a plain text has no thoughts"
        answer = http.post("/completion", json=plain | {"stop": stop, "n_predict": 50}).json()
        assert answer["content"] == "<think>A "
