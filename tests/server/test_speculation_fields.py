"""Guesses over HTTP: the same answers, counted in usage and metrics, and chosen by the request."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.lazy_imports import lazy_imports
from tests.server.live_server import MODEL, Served

with lazy_imports():
    import openai

TEXT = "The quick brown fox jumps over the lazy dog. A lazy dog sleeps in the sun all day long. "
MESSAGES: Any = [{"role": "user", "content": f"Repeat this text: {TEXT}"}]


@pytest.fixture(scope="module")
def plain(served: Served) -> Any:
    """The answer without guesses."""
    return served.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=60, extra_body={"speculation": "off"}
    )


def details(usage: Any) -> tuple[int, int]:
    of = usage.completion_tokens_details
    return of.accepted_prediction_tokens, of.rejected_prediction_tokens


def metric(served: Served, name: str) -> float:
    with served.http() as http:
        found = re.search(rf'^kukri_{name}{{model="{MODEL}"}} (\S+)$', http.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def count(served: Served, name: str) -> float:
    served.wait_until(lambda: not metric(served, "running_requests"))  # a stop string ends an answer sooner
    return metric(served, f"{name}_total")


def test_a_prediction_changes_no_token_and_is_counted(served: Served, plain: Any) -> None:
    """A prediction that is ignored, or that steers the answer; counts of other requests."""
    assert details(plain.usage) == (0, 0)
    text = plain.choices[0].message.content
    before = count(served, "accepted_tokens"), count(served, "drafted_tokens")
    n_accepted = n_rejected = 0
    for content in (text, [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]):
        answer = served.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=60,
            prediction={"type": "content", "content": content},
        )
        assert answer.choices == plain.choices
        accepted, rejected = details(answer.usage)
        assert accepted > 10
        assert answer.usage is not None
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        n_accepted, n_rejected = n_accepted + accepted, n_rejected + rejected
    after = count(served, "accepted_tokens"), count(served, "drafted_tokens")
    assert (after[0] - before[0], after[1] - before[1]) == (n_accepted, n_accepted + n_rejected)


def test_streams_hold_every_token_of_a_step(served: Served, plain: Any) -> None:
    """Text lost or said twice where several tokens come at once, or text after a stop string."""
    wanted = plain.choices[0].message.content
    for stop in (None, "lazy"):
        stream = served.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=60,
            stream=True,
            stop=stop,
            logprobs=True,
            prediction={"type": "content", "content": wanted},
            stream_options={"include_usage": True},
        )
        text, tokens, usage = "", [], None
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += (choice.logprobs.content or []) if choice.logprobs else []
        assert text == (wanted if stop is None else wanted.split(stop)[0])
        assert "".join(token.token for token in tokens).startswith(text)
        assert usage is not None
        assert details(usage)[0] > 0


@pytest.mark.full
def test_every_endpoint_lets_a_request_choose(served: Served) -> None:
    """A field that one endpoint forgets, or a wrong value that passes."""
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": TEXT * 2, "max_tokens": 20, "temperature": 0},
        "/v1/responses": {"input": TEXT * 2, "max_output_tokens": 20, "temperature": 0},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20, "temperature": 0},
    }
    with served.http() as http:
        for path, body in prompts.items():
            for kind, more in (("off", {}), ("ngram", {"max_draft_tokens": 4})):
                before = count(served, "drafted_tokens")
                response = http.post(path, json={"model": MODEL, "speculation": kind, **body, **more})
                assert response.status_code == 200
                assert (count(served, "drafted_tokens") > before) == (kind == "ngram")
            for kind in ("magic", "draft"):  # there is no draft model
                refused = http.post(path, json={"model": MODEL, "speculation": kind, **body})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation")


def test_a_prediction_without_speculation_is_refused(served: Served) -> None:
    """A prediction that is silently of no use."""
    with pytest.raises(openai.BadRequestError, match="speculation"):
        served.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            prediction={"type": "content", "content": "a"},
            extra_body={"speculation": "off"},
        )


@pytest.mark.full
def test_the_best_of_several_is_known_by_the_tokens_that_are_shown(served: Served) -> None:
    """A rank that counts tokens of a step beyond a stop string."""
    body = {
        "model": MODEL, "prompt": TEXT * 2, "temperature": 0.8, "seed": 1, "max_tokens": 40, "best_of": 4,
        "n": 2, "stop": ["dog"],
    }  # fmt: skip

    def choices(kind: str) -> Any:
        with served.http() as http:
            response: httpx.Response = http.post("/v1/completions", json={**body, "speculation": kind})
        return response.json()["choices"]

    assert choices("ngram") == choices("off")
