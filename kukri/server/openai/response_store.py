"""Responses that `previous_response_id` continues: in memory, and on disk if wanted. The oldest go first."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from kukri.dataclass import asdict, dataclass
from kukri.errors import CapacityError, ConfigError, RequestError
from kukri.host.files import remove_file
from kukri.host.private_files import open_private, write_private
from kukri.server.errors import NotFoundError
from kukri.server.keys import Client, KeyRing
from kukri.server.openai.owners import Owners

log = logging.getLogger("kukri.server")
_ID = re.compile(r"resp_[0-9A-Za-z]{1,64}")
MAX_BYTES = 64 << 20  # all responses together, as JSON
_MAX_CONVERSATION = 8 << 20  # bytes of the responses that one continues


@dataclass(frozen=True)
class StoredResponse:
    """A response. `items` are its own input and output; those before it are its `previous`'."""

    owner: str
    previous: str | None
    items: list[dict[str, Any]]
    n_input: int  # items of the input
    response: dict[str, Any]
    n_bytes: int

    @property
    def id(self) -> str:
        """The name by which others continue it."""
        name: str = self.response["id"]
        return name


class ResponseFiles:
    """Responses on disk: a private file each, written and removed on a thread, in order.

    A file that is damaged is removed; a file that cannot be read, or is another version's, stays as it is. A
    version that gives a field another meaning writes a `version`, which this version leaves out.
    Attributes: owners, what is written down of clients.
    """

    def __init__(self, directory: Path, keys: KeyRing) -> None:
        """Raises ConfigError, as Owners does."""
        self.directory = directory
        self.owners = Owners(directory, keys, "responses")
        self._thread = ThreadPoolExecutor(1, "kukri-responses")

    def load(self) -> Iterator[StoredResponse]:
        """The responses of earlier processes, those used last at the end."""
        paths = [path for path in self.directory.glob("*.json") if _ID.fullmatch(path.stem)]
        for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns):
            try:
                with open_private(path) as file:
                    digest, _, data = file.read(MAX_BYTES).partition(b"\n")
                if sha256(data).hexdigest().encode() == digest:
                    yield StoredResponse(**json.loads(data))
                else:
                    log.warning("a stored response is removed: %s is damaged", path)
                    remove_file(path)
            except (TypeError, ValueError):
                log.warning("a stored response of another version stays, but is not served: %s", path)
            except (OSError, ConfigError) as error:
                log.warning("a stored response stays, but is not served: %s", error)

    def save(self, stored: StoredResponse) -> Future[bool]:
        """Write a response, and return whether it is on the disk; the log says why not."""
        return self._do(lambda: write_private(self._path(stored.id), _written(stored)))

    def remove(self, response_id: str) -> Future[bool]:
        """Remove a response, and return whether it is gone; the log says why not."""
        return self._do(lambda: remove_file(self._path(response_id)))

    def touch(self, response_id: str) -> None:
        """Notes that a response was used."""
        self._do(lambda: os.utime(self._path(response_id)))

    def close(self) -> None:
        """Waits until all is done."""
        self._thread.shutdown()
        self.owners.close()

    def _path(self, response_id: str) -> Path:
        return self.directory / f"{response_id}.json"

    def _do(self, work: Callable[[], None]) -> Future[bool]:
        """Whether the work was done, which is to be known later."""

        def run() -> bool:
            try:
                work()
            except Exception as error:  # a response is finished, whatever becomes of its file
                log.warning("responses in %s: %r", self.directory, error)
                return False
            return True

        return self._thread.submit(run)


def _written(stored: StoredResponse) -> bytes:
    """A response's file: the hash of the line that follows."""
    data = json.dumps(asdict(stored)).encode()
    return sha256(data).hexdigest().encode() + b"\n" + data


class ResponseStore:
    """The responses of all clients, each seen only by its owner. Belongs to the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES, files: ResponseFiles | None = None) -> None:
        """`files` keeps them on disk, too, and has those of earlier processes."""
        self._max_bytes, self._n_bytes, self._files = max_bytes, 0, files
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # those used last at the end
        for stored in files.load() if files is not None else ():
            self._put(stored)

    async def owner(self, client: Client) -> str:
        """The owner that a client is."""
        return client.owner if self._files is None else await self._files.owners.of(client)

    def close(self) -> None:
        """Waits until all is on the disk."""
        if self._files is not None:
            self._files.close()

    async def add(
        self,
        owner: str,
        previous: str | None,
        given: list[dict[str, Any]],
        response: dict[str, Any],
    ) -> bool:
        """Keep a response with its own input `given`, for which others may be forgotten.

        Returns whether it is kept, and on the disk, if it is to be: one that is too large is not.
        """
        items = [*given, *response["output"]]
        n_bytes = len(json.dumps(items)) + len(json.dumps(response))
        if n_bytes > self._max_bytes // 4:
            return False
        stored = StoredResponse(owner, previous, items, len(given), response, n_bytes)
        if self._files is not None and not await asyncio.wrap_future(self._files.save(stored)):
            return False
        self._put(stored)
        return True

    def _put(self, stored: StoredResponse) -> None:
        self._stored[stored.id] = stored
        self._n_bytes += stored.n_bytes
        while self._n_bytes > self._max_bytes:
            oldest = next(iter(self._stored))
            self._drop(oldest)
            if self._files is not None:
                self._files.remove(oldest)

    def _drop(self, response_id: str) -> None:
        self._n_bytes -= self._stored.pop(response_id).n_bytes

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """A response. Raises NotFoundError if the owner has none of that id."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFoundError(
                f"the response {response_id[:100]!r} was not found", code="response_not_found"
            )
        return stored

    async def forget(self, owner: str, response_id: str) -> None:
        """Removes a response, from the disk too. Raises NotFoundError, CapacityError."""
        self.find(owner, response_id)
        if self._files is not None and not await asyncio.wrap_future(self._files.remove(response_id)):
            raise CapacityError("the server cannot remove responses now: try again later")
        self.find(owner, response_id)  # which another request may have removed meanwhile
        self._drop(response_id)

    def items_before(self, owner: str, previous: str | None) -> list[dict[str, Any]]:
        """The items of a conversation up to a response, which counts as used. Raises RequestError."""
        chain: list[StoredResponse] = []
        one, n_bytes = previous, 0
        while one is not None:
            try:
                chain.append(self.find(owner, one))
            except NotFoundError:
                raise RequestError(
                    f"the response {one[:100]!r} was not found, or has expired: send its items as 'input'",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            self._stored.move_to_end(one)
            if self._files is not None:
                self._files.touch(one)
            one, n_bytes = chain[-1].previous, n_bytes + chain[-1].n_bytes
            if n_bytes > _MAX_CONVERSATION:
                raise RequestError(
                    f"the conversation must be at most {_MAX_CONVERSATION} bytes: begin another",
                    param="previous_response_id",
                )
        return [item for stored in reversed(chain) for item in stored.items]

    def items_by_id(self, owner: str, wanted: set[str]) -> dict[str, dict[str, Any]]:
        """The items of an owner's responses that have these ids."""
        return {
            item["id"]: item
            for stored in self._stored.values()
            if stored.owner == owner
            for item in stored.items
            if item.get("id") in wanted
        }
