"""Checks bodies of very many values in another process, before this process reads them.

Two megabytes of numbers, or of texts of one letter, take 20 ms to parse and more to check, in calls that no
other thread of the interpreter can interrupt: neither the event loop, which hands out tokens, nor the
engine. What is wrong with such a body is found elsewhere; one that is well is read here after all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from kukri.errors import CapacityError, KukriError, RequestError
from kukri.server.worker_process import WorkerProcess

log = logging.getLogger("kukri.server")

MANY_VALUES = 16_384  # commas
_SETTLE_S = 5.0  # from when the server takes requests
_ANSWER_S = 30.0
_MAX_LINE = 1 << 24  # bytes of an answer


class BodyCheck:
    """The process that checks bodies, which starts after `start_soon`, or with the first of them.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._start: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # one body after another

    def start_soon(self, kind: type) -> None:
        """Start the process once the server has settled, so that no body of the class waits for imports."""
        self._start = asyncio.create_task(self._start_later(kind))

    async def _start_later(self, kind: type) -> None:
        await asyncio.sleep(_SETTLE_S)
        with suppress(KukriError, RequestValidationError, OSError):  # nothing is in the body
            await self.check(kind, b"{}")

    async def check(self, kind: type, data: bytes) -> None:
        """Raises the error that reading the JSON of a body of this class would raise; returns if it is well.

        RequestValidationError, RequestError, RecursionError; and CapacityError if there is no answer in time.
        """
        async with self._turn:
            found, what = await self._outcome(f"{kind.__module__}:{kind.__qualname__}", data)
        if found == "invalid":
            raise RequestValidationError(what)
        if found == "refused":
            message, param, code = what
            raise RequestError(message, param=param, code=code)
        if found == "deep":
            raise RecursionError

    async def close(self) -> None:
        """Ends the process."""
        if self._start is not None and self._start is not asyncio.current_task():
            self._start.cancel()
            await asyncio.gather(self._start, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _outcome(self, name: str, data: bytes) -> tuple[str, Any]:
        answer = b""
        try:
            async with asyncio.timeout(_ANSWER_S):
                process = await self._running()
                await process.send(b"%s %d\n" % (name.encode(), len(data)), data)
                answer = await process.read_line()
        except TimeoutError:
            pass
        finally:  # one that was not heard out would give the next body the answer to this one
            if not answer:
                await self.close()
        if not answer:
            log.error(
                "the process that checks large bodies does not answer and is restarted for the next one"
            )
            raise CapacityError("the body could not be checked in time: try again later")
        found: tuple[str, Any] = json.loads(answer)
        return found

    async def _running(self) -> WorkerProcess:
        if self._process is not None and self._process.has_ended:
            await self.close()
        if self._process is None:
            self._process = await WorkerProcess.start("kukri.server.body_worker", _MAX_LINE)
        return self._process


class CheckedRoute(APIRoute):
    """A route whose GET answers HEAD, and whose bodies of very many values are checked elsewhere."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Route.matches; HEAD asks for the headers of a GET."""
        return super().matches({**scope, "method": "GET"} if self._is_head(scope) else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Route.handle; the answer to HEAD has no body."""
        if not self._is_head(scope):
            return await super().handle(scope, receive, send)

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self.app(scope, receive, send_head)

    def _is_head(self, scope: Scope) -> bool:
        return scope.get("method") == "HEAD" and "GET" in (self.methods or ())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that handles a request."""
        handle = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        if kind is None:
            return handle

        async def checked(request: Request) -> Response:
            if "json" in request.headers.get("content-type", ""):
                data = await request.body()
                if data.count(b",") > MANY_VALUES:
                    await request.app.state.bodies.check(kind, data)
            return await handle(request)

        return checked
