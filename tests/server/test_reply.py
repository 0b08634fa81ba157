"""A reply without a server or a model: what is written of a call, whenever it ends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.errors import KukriError
from kukri.server.answers.reply import Reply
from kukri.server.models.bridge import LiveCall


class Writer:
    """Notes whether it was asked to take what came."""

    def __init__(self) -> None:
        self.has_taken = False

    def advance(self) -> bytes:
        self.has_taken = True
        return b"data: text\n\n"

    async def settle(self) -> None:
        pass

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def body(self) -> dict[str, Any]:
        return {"has_text": self.has_taken}

    def fail(self, error: KukriError) -> bytes:
        return b"failed: " + str(error).partition(":")[0].encode()


async def sent_by(reply: Reply) -> bytes:
    """The body that a reply sends to a client who stays."""
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    await asyncio.wait_for(reply({"type": "http", "kukri.log": {}}, receive, send), 5)
    return b"".join(parts)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ended_first_is_written(stream):
    """Catches a text that is lost because the call was done before its response began."""

    async def changed() -> None:
        pass

    call: Any = SimpleNamespace(
        is_done=True, is_gone=False, error=None, changed=changed, read_out=changed, close=lambda: None,
        n_prompt_tokens=1, n_generated=1, first_token_s=0.0, arrived_s=0.0, outcome=(0.0, []),
    )  # fmt: skip
    service: Any = SimpleNamespace(
        metrics=SimpleNamespace(on_end=lambda *_: None), settings=SimpleNamespace(keep_alive_s=60.0)
    )
    writer: Any = Writer()
    body = asyncio.run(sent_by(Reply(service, call, writer, stream=stream)))
    if stream:
        assert body == b"data: text\n\ndata: [DONE]\n\n"
    else:
        assert json.loads(body) == {"has_text": True}


class Numbers(Writer):
    """Writes a number each time, and fails at `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.n, self._fails_at = 0, fails_at

    def advance(self) -> bytes:
        self.n += 1
        if self.n == self._fails_at:
            raise ZeroDivisionError
        return b"%d " % self.n


class FakeConnection:
    """Takes chunks while `takes_chunks`."""

    takes_chunks = True

    def __init__(self, written: list[bytes]) -> None:
        self._written = written

    def write_chunk(self, data: bytes) -> None:
        self._written.append(data.upper() + b"(chunk) ")


async def written(tokens: list[bool], writer: Numbers, version: str = "1.1") -> bytes:
    """The bytes of a stream of some tokens, each with whether the client keeps up with it."""
    parts: list[bytes] = []
    connection = FakeConnection(parts)
    answer: Any = SimpleNamespace(
        request=SimpleNamespace(id=1, n_prompt=1, sequence=SimpleNamespace(spans=NO_SPANS)),
        n_tokens=0, finish_reason=None, index=0,
    )  # fmt: skip
    bridge: Any = SimpleNamespace(drop=lambda call: None)
    call = LiveCall(bridge, [answer], 1, "log")
    service: Any = SimpleNamespace(
        metrics=SimpleNamespace(on_end=lambda *_: None), settings=SimpleNamespace(keep_alive_s=60.0)
    )

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "kukri.log": {}, "http_version": version}
    scope["state"] = {"kukri.connection": connection}
    run = asyncio.create_task(Reply(service, call, writer, stream=True)(scope, receive, send))
    for keeps_up in tokens:
        connection.takes_chunks = keeps_up
        for _ in range(5):
            await asyncio.sleep(0)
        call.advance()
    for _ in range(5):
        await asyncio.sleep(0)
    answer.finish_reason = "stop"
    call.wake()
    await asyncio.wait_for(run, 5)
    return b"".join(parts)


def test_chunks_go_to_the_connection_once_the_response_has_begun():
    """Catches a first chunk before the head, chunks out of order, and a slow client who is not waited for."""
    assert asyncio.run(written([True, True, False, True], Numbers())) == (
        b"1 2 (chunk) 3 4 (chunk) 5 data: [DONE]\n\n"
    )


def test_a_client_of_an_older_http_gets_no_chunks():
    """Catches sizes of chunks within the body of HTTP/1.0."""
    assert asyncio.run(written([True, True], Numbers(), "1.0")) == b"1 2 3 data: [DONE]\n\n"


def test_an_error_between_two_tokens_ends_its_own_response():
    """Catches a writer's error that ends the delivery of others' tokens, or a stream that waits forever."""
    assert asyncio.run(written([True, True], Numbers(fails_at=2))) == b"1 failed: writing the answer failed"
