"""Thoughts of a model that has <think> and </think> as tokens: their budget, in each form of answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_message, check_message_event, events
from tests.server.live_server import MODEL, Served, serving
from tests.test_llm_safetensors import TINY, byte_tokenizer

with lazy_imports():
    import anthropic
    import torch
    import transformers as tr

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"""
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model that never ends by itself."""
    path = tmp_path_factory.mktemp("thinker")
    make(path)
    with LLM(path, n_threads=1, max_requests=2) as llm, serving(llm) as server:
        yield server


def make(path: Path) -> None:
    torch.manual_seed(1)
    tr.LlamaForCausalLM(tr.LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


def options(server: Served) -> dict:
    """Greedy answers of nothing but the letter a, but for what is forced."""
    letter = server.served.tokenizer.encode("a")[-1]
    return {"messages": QUESTION, "model": MODEL, "temperature": 0, "logit_bias": {str(letter): 100}}


@pytest.mark.parametrize(
    ("budget", "thoughts", "answer"),
    [(5, "aaaaa", "aaaaaa"), (0, None, "a" * 11), (11, "a" * 11, None), (None, "a" * 12, None)],
)
def test_a_budget_closes_the_thoughts(thinker, budget, thoughts, answer):
    """Catches thoughts that continue, one token too many or too few, and a close that is shown."""
    create = thinker.client.chat.completions.create
    more = {} if budget is None else {"thinking_token_budget": budget}
    given = options(thinker) | {"max_tokens": 12, "extra_body": more}
    whole = create(**given)
    message = whole.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (thoughts, answer)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    deltas = [chunk.choices[0].delta for chunk in create(stream=True, **given)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == (thoughts or "")
    assert "".join(d.content or "" for d in deltas) == (answer or "")


def test_who_does_not_think_has_no_budget_to_spend(thinker):
    """Catches a close that is forced on an answer."""
    given = options(thinker) | {"max_tokens": 8, "reasoning_effort": "none"}
    message = (
        thinker.client.chat.completions.create(extra_body={"thinking_token_budget": 2}, **given)
        .choices[0]
        .message
    )
    assert message.content == "a" * 8


def test_a_messages_thoughts_are_a_block(thinker):
    """Catches thoughts in the text, a budget that Anthropic's form loses, and events out of order."""
    client = anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0)
    given = {
        "messages": QUESTION, "model": MODEL, "max_tokens": 12,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }  # fmt: skip
    greedy = {"temperature": 0, "ignore_eos": True}
    whole = client.messages.create(**given, extra_body=greedy)
    thoughts, text = whole.content
    assert (thoughts.type, text.type) == ("thinking", "text")
    assert whole.usage.output_tokens == 12
    assert whole.stop_reason == "max_tokens"
    assert 0 < len(thoughts.thinking) <= 5
    with client.messages.stream(**given, extra_body=greedy) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    with thinker.http() as http:
        check_message(http.post("/v1/messages", json=given | greedy).json())
        told = list(events(http.post("/v1/messages", json=given | greedy | {"stream": True})))
    for event in told:
        check_message_event(event)
    deltas = [event["delta"]["type"] for event in told if event["type"] == "content_block_delta"]
    assert deltas == sorted(deltas, reverse=True), "first the thoughts, then the text"
    assert set(deltas) == {"thinking_delta", "text_delta"}
    silent = client.messages.create(**given | {"thinking": {"type": "disabled"}}, extra_body=greedy)
    assert [block.type for block in silent.content] == ["text"]
