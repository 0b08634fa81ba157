"""Answers requests by their model, and keeps streams alive while it is loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kukri.errors import KukriError
from kukri.server.errors import response_of
from kukri.server.registry import ModelEntry, ModelRegistry
from kukri.server.reply import EVENTS, StreamForm
from kukri.server.service import Service

Make = Callable[[Service], Awaitable[Response]]


async def answered(
    registry: ModelRegistry,
    model: str | None,
    http: Request,
    make: Make,
    *,
    stream: bool | None = False,
    form: StreamForm = EVENTS,
) -> Response:
    """The response that `make` gives with the model, which is loaded first if need be.

    While a stream's model is loaded, the stream begins with keep-alives. Raises as `acquire` and `make` do.
    """
    entry = registry.find(model)
    if stream and not entry.is_ready:
        return LoadingReply(registry, entry, http, make, form)
    return await make(await registry.acquire(entry, http.scope))


class LoadingReply(Response):
    """Waits for a model, and then sends the response that is made with it. A client that leaves ends it."""

    def __init__(
        self, registry: ModelRegistry, entry: ModelEntry, http: Request, make: Make, form: StreamForm
    ) -> None:
        super().__init__()
        self._registry, self._entry, self._http, self._make, self._form = registry, entry, http, make, form
        self._send: Send
        self._has_begun = self._is_error = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        self._send = send
        work = asyncio.create_task(self._response())
        left = asyncio.create_task(disconnected(receive))
        try:
            while not work.done() and not left.done():
                await asyncio.wait(
                    {work, left},
                    timeout=self._registry.settings.keep_alive_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not work.done() and not left.done():
                    await self._keep_alive()
            if not work.done():
                return
        finally:
            left.cancel()
            work.cancel()
        try:
            response = work.result()
        except KukriError as error:
            if not self._has_begun:
                raise
            response = response_of(error)
        await response(scope, receive, self._send_rest)

    async def _response(self) -> Response:
        return await self._make(await self._registry.acquire(self._entry, self._http.scope))

    async def _keep_alive(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._form.headers})
        await self._send({"type": "http.response.body", "body": self._form.keep_alive, "more_body": True})

    async def _send_rest(self, message: Message) -> None:
        """Sends what follows keep-alives: no second head, and an error as the stream's last event."""
        if self._has_begun and message["type"] == "http.response.start":
            self._is_error = message["status"] != 200
            return
        if self._is_error:
            body = self._form.failure(json.loads(message["body"]))
            message = {**message, "body": body}
        await self._send(message)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
