"""Complaints that other servers' issue trackers have, each as a test of this one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ContextLengthError
from kukri.kernels.cpu.compile import features
from tests.server.forcing import force
from tests.server.live_server import MODEL, Served, serving
from tests.tiny_gguf import tiny_config, write_tiny

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "The cat sat on the mat. " * 300  # most of the 1,024 tokens that the model takes


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": asked(LONG)}),
        (TEXT, {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": asked(LONG), "max_tokens": 5}),
        ("/v1/embeddings", {"input": LONG}),
        ("/api/chat", {"messages": asked(LONG)}),
        ("/api/generate", {"prompt": LONG}),
    ],
)
def test_silent_truncation_ollama_3839(served: Served, path: str, body: dict[str, Any]) -> None:
    """An answer to the end of a prompt whose beginning was dropped, without a word."""
    with served.http() as http:
        response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert "1024" in response.text.replace(",", "")


def test_silent_truncation_of_a_long_conversation_ollama_3839(offline: LLM) -> None:
    """The same from Python."""
    with pytest.raises(ContextLengthError, match="1024"):
        offline.chat(asked(LONG))


def test_quota_threads_ollama_17916(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each of the machine's cores in a container that may use two."""
    monkeypatch.setattr(features, "allowed_cores", lambda: 40)
    monkeypatch.setattr(features, "cpu_quota", lambda: 2.0)
    with LLM(write_tiny(tmp_path / "tiny.gguf")) as llm:
        assert llm._backend.pool.n_threads == 2


def test_embeddings_beyond_512_tokens_llama_cpp_25293(tmp_path: Path) -> None:
    """A text longer than a step that is refused, cut, or has another vector than in one step."""
    path = write_tiny(tmp_path / "tiny.gguf", replace(tiny_config(), max_context=2048))
    text = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 1300)))  # a token each
    with LLM(path, max_step_tokens=2048) as whole:
        want, beginning = whole.embed([text, text[:512]])
    with LLM(path) as llm, serving(llm) as server:
        assert llm.engine_config.max_step_tokens == 512
        found = server.client.embeddings.create(model=MODEL, input=text, encoding_format="float")
    assert found.usage.prompt_tokens == 1300
    np.testing.assert_array_equal(np.array(found.data[0].embedding, np.float32), want)
    assert np.abs(want - beginning).max() > 1e-3


UNSUPPORTED: list[dict[str, Any]] = [
    {"type": "object", "not": {"type": "string"}},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"type": "objekt"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "array", "uniqueItems": True},
]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=lambda schema: json.dumps(schema)[:40])
def test_schema_that_fails_open_llama_cpp_19051(served: Served, schema: dict[str, Any]) -> None:
    """An answer of any form, as if no schema had been given, for one that cannot be enforced."""
    named = {"name": "a", "schema": schema}
    with served.http() as http:
        for path, body in (
            (CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": named}}),
            (TEXT, {"prompt": "A", "structured_outputs": {"json": schema}}),
            ("/v1/responses", {"input": "A", "text": {"format": {"type": "json_schema", **named}}}),
            ("/api/chat", {"messages": QUESTION, "format": schema, "stream": False}),
        ):
            response = http.post(path, json={"model": MODEL, **body})
            assert response.status_code == 400, (path, response.text)


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "no end',
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_parse_errors_ollama_17638(
    tooled: Served, monkeypatch: pytest.MonkeyPatch, said: str, stream: bool
) -> None:
    """A 500, or an answer that is lost, for a call that the model wrote wrongly."""
    force(tooled.served, monkeypatch, said)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": MODEL, "messages": QUESTION, "tools": [tool], "max_tokens": 60, "stream": stream}
    with tooled.http() as http:
        response = http.post(CHAT, json=body)
    assert response.status_code == 200
    if stream:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        answers = [json.loads(line) for line in lines]
        assert not any("error" in answer for answer in answers), response.text
        deltas = [choice["delta"] for answer in answers for choice in answer["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    else:
        message = response.json()["choices"][0]["message"]
        text, calls = message["content"] or "", message.get("tool_calls") or []
    assert text == said or calls, "what the model said comes, as text or as a call"


@pytest.mark.full
def test_nondeterminism_by_slot_llama_cpp_7052(served: Served, offline: LLM) -> None:
    """An answer that depends on its place in a batch, and on what its neighbours are."""
    wanted = [offline.generate("One, two,", max_tokens=24, temperature=t, seed=7).text for t in (0.0, 1.0)]

    def ask(i: int) -> tuple[int, str]:
        temperature = (0.0, 1.0)[i % 2]
        prompt = "One, two," if i % 3 else f"{i} other words before,"
        create = served.client.completions.create
        answer = create(model=MODEL, prompt=prompt, max_tokens=24, temperature=temperature, seed=7)
        return i, answer.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        for i, text in pool.map(ask, range(24)):
            assert i % 3 == 0 or text == wanted[i % 2]
