"""A server that speaks OpenAI's API as a test wants it: raw HTTP from a thread, every send on record."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from time import perf_counter
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Behaviour = Callable[["Exchange"], Awaitable[None]]


def chunk(text: str | None = None, *, reason: str | None = None, **more: Any) -> bytes:
    """An event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(n_prompt: int, n_generated: int) -> bytes:
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_generated}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


class Exchange:
    """A request and the way to answer it. Attributes: path, headers, body, came_s, sent_s (sends)."""

    def __init__(self, path: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> None:
        self.path, self.headers, self.body, self._writer = path, headers, body, writer
        self.came_s = perf_counter()
        self.sent_s: list[float] = []

    @property
    def n_words(self) -> int:
        return len(str(self.body.get("prompt") or self.body["messages"][-1]["content"]).split())

    async def begin(self) -> None:
        await self.raw(HEAD)

    async def send(self, data: bytes) -> None:
        self.sent_s.append(perf_counter())
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self, *events: bytes) -> None:
        for event in events:
            await self.send(event)
        await self.raw(b"0\r\n\r\n")

    async def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        await self.raw(head.encode() + data)

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def hang_up(self) -> None:
        self._writer.close()


class FakeAPI:
    """A running one. `exchanges` are the requests but those for models; `behaviour` answers them, and
    `list_models` those for models."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.list_models: Behaviour = lambda exchange: exchange.reply(
            200, {"data": [{"id": "first"}, {"id": "second"}]}
        )
        self.exchanges: list[Exchange] = []
        self.n_now = self.n_most = 0  # requests at a time

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for exchange in _exchanges(reader, writer):
                if exchange.path.endswith("/models"):
                    await self.list_models(exchange)
                    continue
                self.exchanges.append(exchange)
                self.n_now += 1
                self.n_most = max(self.n_most, self.n_now)
                try:
                    await self.behaviour(exchange)
                finally:
                    self.n_now -= 1
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _exchanges(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[Exchange]:
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        yield Exchange(first.split()[1], headers, json.loads(body or b"{}"), writer)


@contextmanager
def fake_api(behaviour: Behaviour):
    """(URL, FakeAPI) of a server within the `with` block."""
    api, loop, started = FakeAPI(behaviour), asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    def run_to_end() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            for left in asyncio.all_tasks(loop):
                left.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    task = loop.create_task(run())
    thread = threading.Thread(target=run_to_end)
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}/v1", api
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
