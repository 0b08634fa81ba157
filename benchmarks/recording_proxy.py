"""A proxy between a client and a server, which records each request and its answer's status and times."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

# the first letter of a text, of reasoning, or of a call, in the events of any API
_TEXTS = rb"content|text|delta|arguments|partial_json|reasoning_content|thinking|name"
_TOKEN = re.compile(rb'"(?:' + _TEXTS + rb')": ?"[^"]')
_DROPPED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


@dataclass
class Exchange:
    """A request and its answer; bodies as bytes, seconds since the request came."""

    method: str
    path: str
    body: bytes
    status: int = 0
    first_token_s: float | None = None
    total_s: float | None = None
    answer: bytearray = field(default_factory=bytearray)


class RecordingProxy:
    """Listens on a free port of loopback, passes all on to `url`, and keeps it in `exchanges`, in order."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self._upstream = httpx.AsyncClient(base_url=url, timeout=None)
        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=_METHODS)])
        config = uvicorn.Config(app, port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        (server,) = self._server.servers
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Ends it."""
        self._server.should_exit = True
        self._thread.join(10)

    async def _pass_on(self, request: Request) -> Response:
        started_s = time.perf_counter()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        exchange = Exchange(request.method, path, await request.body())
        self.exchanges.append(exchange)
        headers = [(k, v) for k, v in request.headers.items() if k not in _DROPPED]
        made = self._upstream.build_request(request.method, path, headers=headers, content=exchange.body)
        answer = await self._upstream.send(made, stream=True)
        exchange.status = answer.status_code

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_bytes():
                    exchange.answer += chunk
                    if exchange.first_token_s is None and _TOKEN.search(exchange.answer):
                        exchange.first_token_s = time.perf_counter() - started_s
                    yield chunk
            finally:
                exchange.total_s = time.perf_counter() - started_s
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k not in _DROPPED | {"content-encoding"}}
        return StreamingResponse(chunks(), exchange.status, kept)
