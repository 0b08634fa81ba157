"""Answers requests by their model, and keeps streams alive while it is loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kukri.errors import KukriError
from kukri.server.answers.reply import EVENTS, StreamForm, disconnected, wait_for_work
from kukri.server.answers.rows import SILENCE, while_connected
from kukri.server.errors import response_of
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...


class _Streamable(_Body, Protocol):
    @property
    def stream(self) -> bool | None: ...


_B = TypeVar("_B", bound=_Body)
_S = TypeVar("_S", bound=_Streamable)
Work = Callable[[ServedModel, _B, Request], Coroutine[Any, Any, Response]]


def by_model(work: Work[_B]) -> Callable[[_B, Request], Awaitable[Response]]:
    """Return the function that answers a body by its model, which is loaded first if need be.

    A client that leaves ends the work.
    """

    async def handle(body: _B, http: Request) -> Response:
        served = await registry_of(http).served(body.model, http.scope)
        response = await while_connected(http, work(served, body, http))
        return SILENCE if response is None else response

    return handle


def streamed(work: Work[_S], form: StreamForm = EVENTS) -> Callable[[_S, Request], Awaitable[Response]]:
    """Return the function that answers a body by its model, as `answered` does."""

    async def handle(body: _S, http: Request) -> Response:
        return await answered(body, http, work, form)

    return handle


async def answered(body: _S, http: Request, work: Work[_S], form: StreamForm = EVENTS) -> Response:
    """The response of `work` with the body's model, which is loaded first if need be.

    While a stream's model is loaded, the stream begins with keep-alives. Raises as `acquire` and `work` do.
    """
    registry = registry_of(http)
    entry = await registry.catalog.find(body.model, http.scope)

    async def response() -> Response:
        return await work(await registry.acquire(entry, http.scope), body, http)

    if body.stream and not entry.is_ready:
        return LoadingReply(response, form, registry.settings.keep_alive_s)
    return await response()


class LoadingReply(Response):
    """Waits for a model, and then sends the response that is made with it. A client that leaves ends it."""

    def __init__(
        self, response: Callable[[], Awaitable[Response]], form: StreamForm, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._response, self._form, self._keep_alive_s = response, form, keep_alive_s
        self._send: Send
        self._has_begun = self._is_error = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        self._send = send
        work = asyncio.ensure_future(self._response())
        left = asyncio.create_task(disconnected(receive))
        try:
            await wait_for_work(work, left, self._keep_alive_s, self._keep_alive)
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
