"""The connection between a front and a replica: JSON messages over TCP, each after its length in bytes.

A message is an object with a `kind`. Both sides send one each second, so that a silent channel is a dead
one. Neither encrypts: like Ray's own, it belongs in a network of machines that trust one another. A secret,
which Ray carries, keeps others out.
"""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import suppress
from typing import Any

BEAT_S = 1.0  # between two messages, at most
SILENCE_S = 15.0  # after which the other side counts as dead
_MAX_BYTES = 1 << 28  # of a message
_MAX_FIRST_BYTES = 1 << 16  # of one from somebody who has not shown the secret
_LENGTH = struct.Struct(">I")


class Channel:
    """One side of a connection. Belongs to the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, without waiting; a closed channel loses it."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self, *, is_first: bool = False) -> dict[str, Any] | None:
        """The next message; None if the channel has ended, is silent for long, or sends something else."""
        try:
            async with asyncio.timeout(SILENCE_S):
                (n_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if n_bytes > (_MAX_FIRST_BYTES if is_first else _MAX_BYTES):
                    return None
                message = json.loads(await self._reader.readexactly(n_bytes))
        except (OSError, EOFError, TimeoutError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the connection."""
        with suppress(OSError, RuntimeError):
            self._writer.close()


async def connect(host: str, port: int) -> Channel:
    """Opens a channel to a front. Raises OSError if none listens there."""
    return Channel(*await asyncio.open_connection(host, port))
