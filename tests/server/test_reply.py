"""A reply without a server or a model: what is written of a call, whenever it ends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kukri.server.reply import Reply


class Writer:
    """Notes whether it was asked to take what came."""

    def __init__(self) -> None:
        self.has_taken = False

    def advance(self) -> bytes:
        self.has_taken = True
        return b"data: text\n\n"

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def body(self) -> dict[str, Any]:
        return {"has_text": self.has_taken}


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
