"""A server whose model is cut into stages, and a stage that is killed amid streams."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.errors import StageError
from kukri.stages.pipeline import Pipeline
from tests.server.live_server import Served, serving
from tests.tiny_gguf import tiny_config, write_tiny

OPTIONS: dict[str, Any] = {"n_threads": 1, "max_requests": 4}
N_STREAMS, N_TOKENS = 6, 400  # two streams more than are computed at a time


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("stages") / "tiny.gguf", tiny_config(512))


@pytest.fixture
def cut(path: Path) -> Iterator[tuple[LLM, Served]]:
    """A server of a model in two stages."""
    with LLM(path, stages=2, **OPTIONS) as llm, serving(llm) as server:
        yield llm, server


def body(i: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}
    return {"model": "smol", "prompt": f"stream {i}", "max_tokens": N_TOKENS, "ignore_eos": True, **sampling}


def streamed(server: Served, i: int, counts: list[int], found: list[Any]) -> None:
    """Stores the text of a stream, or the error that ended it; counts its events."""
    text = ""
    with server.http().stream("POST", "/v1/completions", json={**body(i), "stream": True}) as response:
        if response.status_code != 200:  # nothing of it was sent yet
            found[i] = json.loads(response.read())["error"]
            return
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    found[i] = event["error"]
                    return
                text += event["choices"][0]["text"]
                counts[i] += 1
    found[i] = text


def streams(server: Served, kill: Any) -> list[Any]:
    """Runs concurrent streams, calls `kill` amid them, and returns their outcomes."""
    counts, found = [0] * N_STREAMS, [None] * N_STREAMS
    threads = [threading.Thread(target=streamed, args=(server, i, counts, found)) for i in range(N_STREAMS)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: sum(count > 3 for count in counts) >= 3)
    kill()
    for thread in threads:
        thread.join(60)
    return found


def kill_stage(llm: LLM) -> None:
    (pid,) = llm._backend.pipeline.source.pids
    os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_streams_continue_when_a_stage_is_killed(path: Path, cut: tuple[LLM, Served]) -> None:
    """Catches streams that break, begin again, or continue with other tokens."""
    llm, server = cut
    with LLM(path, **OPTIONS) as whole:
        prompts = [body(i) for i in range(N_STREAMS)]
        expected = [
            whole.generate(
                one["prompt"],
                max_tokens=N_TOKENS,
                ignore_eos=True,
                temperature=one["temperature"],
                seed=one.get("seed"),
            ).text
            for one in prompts
        ]
    assert streams(server, lambda: kill_stage(llm)) == expected
    assert streams(server, lambda: kill_stage(llm)) == expected
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.full
def test_streams_end_with_an_error_if_a_stage_cannot_be_had_again(
    cut: tuple[LLM, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches streams that hang or end as if they were whole, and a server that is of no use afterwards."""
    llm, server = cut

    def refuse(pipeline: Any) -> None:
        raise StageError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "_connect", refuse)
        found = streams(server, lambda: kill_stage(llm))
    assert all("cannot be started again: no more" in one["message"] for one in found), found
    assert {one["type"] for one in found} == {"server_error"}
    with server.http() as http:
        answer = http.post("/v1/completions", json={**body(0), "max_tokens": 3})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
