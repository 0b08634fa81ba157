"""uvicorn's connections, with a limit until headers are complete and a short way for a stream's chunks."""

from __future__ import annotations

import asyncio
from math import ceil
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kukri.server.settings import ServerSettings

_NAME = "kukri.connection"
_STOP_S = 5  # for connections to close once the bridge has ended what runs


def uvicorn_options(settings: ServerSettings) -> dict[str, Any]:
    """The options of `uvicorn.Config` for an application with these settings."""
    return {
        "http": protocol_with_timeout(settings.headers_s),
        "timeout_keep_alive": ceil(settings.idle_connection_s),
        "timeout_graceful_shutdown": ceil(settings.drain_s) + _STOP_S,
        "log_config": None,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "ws": "none",
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
    }


class Connection(Protocol):
    """The connection of a request, for the chunks of a response that has begun."""

    @property
    def takes_chunks(self) -> bool:
        """True if a chunk can be written now: the client keeps up with what has been written."""

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of the body before the last, past uvicorn's `send`; lost if the client has left."""


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None if it takes no chunks, or if the request came in another way."""
    found: Connection | None = scope.get("state", {}).get(_NAME)
    return found if scope.get("http_version") == "1.1" else None  # before it there are no chunks


def protocol_with_timeout(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for `uvicorn.Config(http=…)`, with a limit until headers are complete.

    uvicorn waits for them forever. The time runs from the connection, or from the first byte after an
    answer. Each request's scope has the connection in its state.
    """
    protocol: Any = AutoHTTPProtocol

    class HttpConnection(protocol):  # type: ignore[misc]  # which class it is depends on what is installed
        """One connection."""

        _header_timer: asyncio.TimerHandle | None = None

        def __init__(self, *, app_state: dict[str, Any], **options: Any) -> None:
            super().__init__(app_state={**app_state, _NAME: self}, **options)

        @property
        def takes_chunks(self) -> bool:
            """True if a chunk can be written now."""
            return not self.flow.write_paused

        def write_chunk(self, data: bytes) -> None:
            """Writes a chunk."""
            if not self.transport.is_closing():  # else uvloop raises RuntimeError
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def connection_made(self, transport: Any) -> None:
            """Begins to wait for headers."""
            super().connection_made(transport)
            self._watch_headers()

        def data_received(self, data: bytes) -> None:
            """Takes bytes, and waits for more of the headers or for none."""
            super().data_received(data)
            self._watch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            """Ends the wait."""
            super().connection_lost(exc)
            self._stop_timer()

        def _watch_headers(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(timeout_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return HttpConnection
