"""Who files and batches belong to: what is written down tells nobody a key."""

from __future__ import annotations

import asyncio
import os
from hashlib import scrypt
from pathlib import Path

from kukri.host.private_files import open_private, write_private
from kukri.server.keys import Client, KeyRing

_SALT_BYTES = 32
_COST = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}  # 16 MiB and some 50 ms for a guess


class Owners:
    """The owner that a client is: a slow, salted hash of its key, which outlives the server."""

    def __init__(self, directory: Path, keys: KeyRing) -> None:
        """The salt is a file of the directory. Raises OSError, ConfigError if others may write to it."""
        self._keys = keys
        self._known: dict[bytes, str] = {}
        path = directory / "salt"
        try:
            with open_private(path) as file:
                self._salt = file.read(_SALT_BYTES)
        except FileNotFoundError:
            self._salt = os.urandom(_SALT_BYTES)
            write_private(path, self._salt)

    async def of(self, client: Client) -> str:
        """A client's owner; without keys, files and batches are everybody's."""
        if client.digest and client.digest not in self._known:
            found = await asyncio.to_thread(scrypt, client.digest, salt=self._salt, **_COST)
            self._known[client.digest] = found.hex()
        return self._known.get(client.digest, "")

    async def client(self, owner: str) -> Client | None:
        """The client that is the owner now; None if its key is not valid any more."""
        if not self._keys:
            return None if owner else Client("local", "local")
        for client in self._keys.clients:
            if await self.of(client) == owner:
                return client
        return None

    def are_valid(self, client: Client) -> bool:
        """True as long as a client's key is."""
        return self._keys.holds(client) if client.digest else not self._keys
