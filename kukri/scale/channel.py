"""The connection between a front and a replica: JSON messages over TCP, each after its length in bytes.

A message is an object with a `kind`. Both sides send one each second, so that a silent channel is a dead
one. Neither encrypts: like Ray's own, it belongs in a network of machines that trust one another. Both prove
first that they know a secret, which Ray carries (`kukri.stages.greeting`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from contextlib import suppress
from typing import Any, Self

from kukri.stages.greeting import ANSWER_BYTES, HELLO_BYTES, VERDICT_BYTES, Guest, Host

log = logging.getLogger("kukri.scale")
BEAT_S = 1.0  # between two messages, at most
SILENCE_S = 15.0  # after which the other side counts as dead
_MAX_BYTES = 1 << 28  # longest message
_MAX_UNSENT = 1 << 26  # bytes that wait for a slow peer, beyond one message
_LENGTH = struct.Struct(">I")


class Channel:
    """One side of a connection. Belongs to the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connected(cls, host: str, port: int, secret: str) -> Self:
        """A channel to a front. Raises OSError if none listens there, ValueError if it has another secret."""
        made = cls(*await asyncio.open_connection(host, port))
        guest = Guest(secret.encode(), "replica")
        try:
            made._write(guest.answer(await made._read(HELLO_BYTES)))
            guest.check(await made._read(VERDICT_BYTES))
        except BaseException:
            made.close()
            raise
        return made

    async def admits(self, secret: str) -> bool:
        """Return True if the other side is a replica that knows the secret, and send it the verdict."""
        host = Host(secret.encode())
        self._write(host.hello)
        try:
            verdict, is_welcome = host.verdict(await self._read(ANSWER_BYTES), "replica")
        except OSError:
            return False
        self._write(verdict)
        return is_welcome

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, without waiting; a closed channel loses it.

        A peer that has not taken what was sent before, above a bound, counts as dead: the channel ends.
        """
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            log.warning("a channel has ended, because the other side takes no messages")
            self._writer.transport.abort()
            return
        data = json.dumps(message, separators=(",", ":")).encode()
        self._write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None if the channel has ended, is silent for long, or sends something else."""
        try:
            (n_bytes,) = _LENGTH.unpack(await self._read(_LENGTH.size))
            message = json.loads(await self._read(n_bytes)) if n_bytes <= _MAX_BYTES else None
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _write(self, data: bytes) -> None:
        """Writes the data; it is lost once the channel closes, where uvloop would raise RuntimeError."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _read(self, n_bytes: int) -> bytes:
        """Reads `n_bytes` bytes. Raises OSError if the channel ends before, or is silent for long."""
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self._reader.readexactly(n_bytes)
        except (EOFError, TimeoutError) as error:
            raise ConnectionError(str(error) or "the other side is silent") from None

    def close(self) -> None:
        """Ends the connection."""
        with suppress(OSError, RuntimeError):
            self._writer.close()
