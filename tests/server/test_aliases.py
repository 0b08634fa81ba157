"""Fields that other servers have on OpenAI's paths: each means the same here, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kukri.sampling.fields import MAX_COUNT
from kukri.server.aliases import CHAT_ALIASES, TEXT_ALIASES
from kukri.server.body import refusal_of
from kukri.server.llama_cpp.schema import LlamaCompletionBody
from kukri.server.openai.chat_completions import parse_chat
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.schema import HINTS, ChatBody, CompletionBody
from tests.server.bodies import check_error
from tests.server.live_server import ASK, CHAT, TEXT

HI = {"messages": [{"role": "user", "content": "Hi"}]}
ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"]
# what a client of llama.cpp, LM Studio, Ollama or OpenRouter sends, and the same in kukri's names
CHATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repeat_penalty": 1.5, "repetition_penalty": None}, {"repetition_penalty": 1.5}),
    ({"typ_p": 0.5}, {"typical_p": 0.5}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"num_predict": 7}, {"max_tokens": 7}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"n_predict": -1}, {}),
    ({"num_predict": -2}, {}),
    ({"max_tokens": -1}, {}),
    ({"max_completion_tokens": -1}, {}),
    ({"n_predict": 7, "max_tokens": 7}, {"max_tokens": 7}),
    ({"n_probs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"n_probs": 0}, {}),
    ({"samplers": "edskypmxt"}, {"samplers": ORDER}),
    ({"samplers": ["typ_p", "infill"]}, {"samplers": ["typical_p"]}),
    ({"reasoning_budget": 9}, {"thinking_token_budget": 9}),
    ({"reasoning_budget": -1}, {}),
    ({"thinking_budget": 9}, {"thinking_token_budget": 9}),
    ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"reasoning": {"max_tokens": 9}}, {"thinking_token_budget": 9}),
    ({"reasoning": {"enabled": False, "exclude": False}}, {"enable_thinking": False}),
    ({"reasoning_format": "auto", "lora": [], "t_max_predict_ms": 0, "parse_tool_calls": True}, {}),
    ({"keep_alive": "5m", "provider": {"sort": "price"}, "ttl": 300, "draft_model": "small"}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), CHATS, ids=str)
def test_a_chat_in_other_servers_names_is_the_same_request(theirs, ours):
    """Catches a name that means something else, and a value of it that asks for nothing taken literally."""
    assert parse_chat(ChatBody(**HI, **theirs)) == parse_chat(ChatBody(**HI, **ours))


def test_every_alias_is_in_the_table():
    """Catches a name that no test has ever sent."""
    sent = {name for theirs, _ in CHATS for name in theirs}
    assert set(CHAT_ALIASES) | set(TEXT_ALIASES) <= sent
    assert {"keep_alive", "provider", "ttl", "draft_model"} <= HINTS & sent


def test_texts_take_the_same_names():
    """Catches a limit below 0 that becomes the default of 16 tokens, and wrong log-probabilities."""
    body = CompletionBody(prompt="a", repeat_penalty=1.5, n_predict=-1, n_probs=2, samplers="kt")
    wanted = CompletionBody(
        prompt="a",
        repetition_penalty=1.5,
        max_tokens=MAX_COUNT,
        logprobs=2,
        samplers=["top_k", "temperature"],
    )
    assert body.model_dump() == wanted.model_dump()
    assert CompletionBody(prompt="a", n_probs=0).logprobs is None
    assert LlamaCompletionBody(prompt="a", samplers="yi").samplers == ["typical_p"]
    assert ResponseBody(input="a", repeat_penalty=1.5).repetition_penalty == 1.5


def test_a_context_and_usage_are_heard():
    """Catches num_ctx and OpenRouter's usage that are taken and change nothing."""
    assert parse_chat(ChatBody(**HI, num_ctx=99)).max_context == 99
    options = ChatBody(**HI, stream=True, usage={"include": True}).stream_options
    assert options is not None
    assert options.include_usage
    assert ChatBody(**HI, usage={"include": True}).stream_options is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_predict": 7, "max_tokens": 8}, "'n_predict' cannot be combined with 'max_tokens'"),
        ({"repeat_penalty": 2, "repetition_penalty": 1}, "'repeat_penalty' cannot be combined"),
        ({"reasoning_format": "none"}, "'reasoning_format' is not supported"),
        ({"reasoning": {"exclude": True}}, "'reasoning.exclude' is not supported"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "'lora' is not supported: use the adapter's name"),
        ({"t_max_predict_ms": 500}, "'t_max_predict_ms' is not supported"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_name(fields, message):
    """Catches a field that is taken and changes nothing, and one of two values that wins."""
    with pytest.raises(ValidationError) as caught:
        ChatBody(**HI, **fields)
    assert message in str(refusal_of(caught.value.errors()))


def test_errors_have_the_names_that_the_client_sent(served):
    """Catches an error about a field that is not in the body."""
    with served.http() as http:
        for path in (CHAT, TEXT):
            for name, value in (("repeat_penalty", 1000), ("n_predict", "a"), ("n_probs", 21)):
                answer = http.post(path, json={**ASK[path], "max_tokens": None, name: value})
                assert check_error(answer, 400, name).startswith(f"'{name}' must be")
            wrong = http.post(path, json={**ASK[path], "samplers": "kz"})
            assert "not 'z'" in check_error(wrong, 400, "samplers")
        body = {**ASK[CHAT], "max_tokens": -1, "num_ctx": 4, "temperature": 0}
        check_error(http.post(CHAT, json=body), 400, "messages")
