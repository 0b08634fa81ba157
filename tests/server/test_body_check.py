"""Bodies of very many values, which another process checks before the server reads them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kukri import LLM
from kukri.server import body_check
from tests.processor_time import processor_seconds
from tests.server.live_server import CHAT, TEXT, Served, serving
from tests.tiny_gguf import write_tiny

BODIES: dict[str, tuple[str, Any]] = {
    "wrong items": (TEXT, {"prompt": [1.5] * 40}),
    "wrong messages": (CHAT, {"messages": [0] * 40}),
    "wrong keys of a bias": (TEXT, {"prompt": [1], "logit_bias": {f"a{i}": 1 for i in range(40)}}),
    "wrong biases": (TEXT, {"prompt": [1], "logit_bias": {str(i): "a" for i in range(40)}}),
    "unknown fields": (TEXT, {"prompt": [1], **{f"a{i}": 1 for i in range(40)}}),
    "a list": (TEXT, [0] * 40),
    "refused": (TEXT, {"prompt": [5] * 40, "n": 3, "best_of": 2}),
    "ids": (TEXT, {"prompt": [5] * 40, "max_tokens": 2, "temperature": 0}),
    "Ollama's": ("/api/generate", {"model": "tiny", "prompt": 3, "context": [1] * 40}),
    "a message's": ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [0] * 40}]}),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model."""
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(path) as llm, serving(llm) as server:
        yield server


def answer(http: httpx.Client, path: str, data: bytes) -> tuple[int, Any]:
    """The status and the body, without what differs each time."""
    response = http.post(path, content=data, headers={"content-type": "application/json"})
    said = response.json()
    return response.status_code, said.get("choices") or said.get("error") or said


def test_they_get_the_same_answers(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error that has another status, field, code or text when it is found in the other process."""
    bodies = [(path, json.dumps(body).encode()) for path, body in BODIES.values()]
    bodies.append((TEXT, b'{"prompt": [' + b"1," * 40 + b"]}"))  # is not JSON
    bodies.append((TEXT, b'{"prompt": "' + b"," * 40 + b'\xff"}'))  # is not UTF-8
    bodies.append((TEXT, b'{"prompt": [' + b"1," * 40 + b"[" * 100_000))  # too deep
    with site.http() as http:
        expected = [answer(http, *body) for body in bodies]
        monkeypatch.setattr(body_check, "MANY_VALUES", 8)
        assert [answer(http, *body) for body in bodies] == expected
    assert {status for status, _ in expected} == {200, 400}


@pytest.mark.full
def test_a_process_that_is_gone_is_started_again(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that takes no more large bodies once the process has been killed."""
    monkeypatch.setattr(body_check, "MANY_VALUES", 8)
    path, body = BODIES["ids"]
    data = json.dumps(body).encode()
    checks: list[body_check.BodyCheck] = []
    check = body_check.BodyCheck.check

    async def seen(self: body_check.BodyCheck, kind: type, data: bytes) -> None:
        checks.append(self)
        await check(self, kind, data)

    monkeypatch.setattr(body_check.BodyCheck, "check", seen)
    with site.http() as http:
        assert answer(http, path, data)[0] == 200
        assert checks[0]._process is not None
        os.kill(checks[0]._process.pid, signal.SIGKILL)
        assert answer(http, path, data)[0] in (200, 503)
        assert answer(http, path, data)[0] == 200


@pytest.mark.full
def test_the_process_is_there_before_the_first_large_body(tmp_path, monkeypatch) -> None:
    """Catches a first body that waits, next to a stream, for a process that imports its class."""
    monkeypatch.setattr(body_check, "_SETTLE_S", 0.0)
    made: list[body_check.BodyCheck] = []
    start_soon = body_check.BodyCheck.start_soon

    def noted(self: body_check.BodyCheck, kind: type) -> None:
        made.append(self)
        start_soon(self, kind)

    monkeypatch.setattr(body_check.BodyCheck, "start_soon", noted)
    data = json.dumps({"prompt": [[]] * 300_000}).encode()
    with LLM(write_tiny(tmp_path / "tiny.gguf")) as llm, serving(llm) as server, server.http() as http:
        (checks,) = made
        server.wait_until(lambda: checks._start is not None and checks._start.done())
        process = checks._process
        assert process is not None
        before_s = processor_seconds()  # what a neighbour of the test takes is no fault of the check's
        assert answer(http, TEXT, data)[0] == 400
        assert processor_seconds() - before_s < 1
        assert checks._process is process
