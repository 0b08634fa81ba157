"""Who files, batches and responses belong to: what is written down tells nobody a key."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from hashlib import scrypt
from pathlib import Path

from kukri.errors import ConfigError
from kukri.host.files import remove_file
from kukri.host.os_calls import locked
from kukri.host.private_files import UNFINISHED, make_private, open_private, write_private
from kukri.server.keys import Client, KeyRing

_SALT_BYTES = 32
_COST = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}  # 16 MiB and some 50 ms for a guess


class Owners:
    """The owner that a client is: a slow, salted hash of its key, which outlives the server.

    The directory with what belongs to them is this server's alone, until `close`.
    """

    def __init__(self, directory: Path, keys: KeyRing, kind: str) -> None:
        """Makes the directory for things of a `kind`, and removes what a server that ended was writing there.

        The salt is a file of the directory. Raises ConfigError if it cannot be used, others may write to it,
        or another server has it.
        """
        self._keys = keys
        self._known: dict[bytes, str] = {}
        self._lock = ExitStack()
        try:
            make_private(directory)
            if self._lock.enter_context(locked(directory, wait=False)) is False:
                raise ConfigError(
                    f"the directory {str(directory)!r} must be used by one server, for batches or for "
                    "responses: stop the other server, or choose another directory"
                )
            for unfinished in directory.glob(f"{UNFINISHED}*"):
                remove_file(unfinished)
            self._salt = _salt(directory / "salt")
        except OSError as error:
            raise ConfigError(f"{kind} cannot be kept in {directory}: {error.strerror}") from None

    def close(self) -> None:
        """Lets another server have the directory."""
        self._lock.close()

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


def _salt(path: Path) -> bytes:
    """The salt in a file, which is made if it is not there. Raises OSError, ConfigError."""
    try:
        with open_private(path) as file:
            return file.read(_SALT_BYTES)
    except FileNotFoundError:
        salt = os.urandom(_SALT_BYTES)
        write_private(path, salt)
        return salt
