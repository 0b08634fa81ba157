"""Streams whose chunks have several tokens."""

from __future__ import annotations

import json

import pytest

from kukri import LLM
from kukri.errors import ConfigError
from kukri.server.settings import ServerSettings
from tests.server.live_server import MODEL, serving


def chunks_of(server, **fields):
    """The texts of a stream's chunks, without those that have none."""
    body = {"model": MODEL, "prompt": "Once upon a time", "stream": True, "temperature": 0, **fields}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return [text for event in events if (text := json.loads(event)["choices"][0]["text"])]


@pytest.mark.full
def test_chunks_have_several_tokens_and_the_same_text(smollm2_path):
    """Would catch tokens lost between chunks, an end that waits, an interval without effect."""
    wanted = {"max_tokens": 12, "ignore_eos": True}
    with LLM(smollm2_path, max_context=512) as llm, serving(llm) as server:
        each = chunks_of(server, **wanted)
        three = chunks_of(server, max_tokens=3, ignore_eos=True)
    with LLM(smollm2_path, max_context=512) as llm, serving(llm, stream_interval=5) as server:
        held = chunks_of(server, **wanted)
        stopped = chunks_of(server, **wanted, stop=[each[3].strip()])
        short = chunks_of(server, max_tokens=3, ignore_eos=True)
    assert "".join(held) == "".join(each)
    assert len(held) <= 4 < len(each)  # 1, 5, 5 and 1 tokens; a slow reader gets longer chunks
    assert "".join(stopped) == "".join(each).split(each[3].strip())[0]
    assert "".join(short) == "".join(three)


def test_an_interval_is_at_least_one():
    """Would catch a stream that never sends."""
    with pytest.raises(ConfigError, match="'stream_interval' must be at least 1"):
        ServerSettings(stream_interval=0)
