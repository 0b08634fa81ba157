"""Closes connections whose request does not arrive: uvicorn waits for the end of the headers for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def protocol_with_timeout(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for `uvicorn.Config(http=…)`, with a limit until headers are complete.

    The time runs from the connection, or from the first byte after an answer.
    """
    protocol: Any = AutoHTTPProtocol

    class Protocol(protocol):  # type: ignore[misc]  # which class it is depends on what is installed
        """One connection."""

        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begins to wait for headers."""
            super().connection_made(transport)
            self._watch_headers()

        def data_received(self, data: bytes) -> None:
            """Goes on to wait, or ends the wait."""
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

    return Protocol
