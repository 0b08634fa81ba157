"""A stream of events that one coroutine makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kukri.errors import KukriError
from kukri.server.answers.reply import EVENTS, disconnected, wait_for_work
from kukri.server.errors import error_body


class EventReply(Response):
    """Sends events as they are made, and keep-alives between them. A client that leaves ends the work.

    A KukriError becomes the last event.
    """

    def __init__(self, events: AsyncGenerator[bytes], keep_alive_s: float) -> None:
        super().__init__()
        self._events, self._keep_alive_s = events, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS.headers})
        left = asyncio.create_task(disconnected(receive))
        data: bytes | None = b""
        try:
            while data is not None:
                data = await self._next(left, send)
                if left.done():
                    return
                await send({"type": "http.response.body", "body": data or b"", "more_body": data is not None})
        finally:
            left.cancel()
            await self._events.aclose()

    async def _next(self, left: asyncio.Task[None], send: Send) -> bytes | None:
        """The next event, None after the last; keep-alives are sent until it is there, or the client left."""
        event = asyncio.ensure_future(anext(self._events, None))
        try:
            silence = {"type": "http.response.body", "body": EVENTS.keep_alive, "more_body": True}
            await wait_for_work(event, left, self._keep_alive_s, lambda: send(silence))
            return event.result() if event.done() else None
        except KukriError as error:
            return EVENTS.failure(error_body(str(error), 500))
        finally:
            if not event.done():
                event.cancel()
                await asyncio.wait({event})
