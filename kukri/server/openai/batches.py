"""/v1/files and /v1/batches: files of requests that clients leave here, and their results.

Both lie in a directory of this server, with their metadata next to them as JSON, so that they outlive it: a
batch that a restart interrupts resumes from its last result. Everything belongs to the key that made it.
Batches run one after another, a few requests at a time, after the requests of others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI

from kukri.calls.batch_files import URLS, BatchLine, Results, files_of, read_batch
from kukri.errors import CapacityError, ConfigError, RequestError
from kukri.host.private_files import make_private, write_private
from kukri.server.asgi_client import AppResponse, answer_lines, post
from kukri.server.errors import LATE, NotFoundError
from kukri.server.keys import Client, KeyRing
from kukri.server.openai.owners import Owners

log = logging.getLogger("kukri.server")

_OUTPUT_PURPOSE = "batch_output"
_PRIORITY = 100  # of requests that name none: after those of others
_N_AT_ONCE = 8
_MAX_FILES = 1000  # that a client may upload; its batches' results always find room
_MAX_BATCHES = 1000  # per client
_WINDOW_S = 24 * 3600
_SAVE_S = 1.0  # between two notes of a batch's counts
_CANCELLED = "batch_cancelled", "the batch was cancelled before this request ran"
_N_TRIES, _PAUSE_S = 60, 1.0  # for a request that finds no room
_RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass
class StoredFile:
    """A file, as OpenAI's API describes it."""

    id: str
    owner: str  # see Owners
    filename: str
    bytes: int
    purpose: str
    created_at: int

    def described(self) -> dict[str, Any]:
        """The JSON of the API."""
        facts = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**facts, "object": "file", "status": "processed", "expires_at": None}


@dataclass
class Batch:
    """A batch, as OpenAI's API describes it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expired_at: int | None = None
    errors: dict[str, Any] | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})

    def enter(self, status: str) -> None:
        """Changes the status, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def described(self) -> dict[str, Any]:
        """The JSON of the API."""
        facts = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**facts, "object": "batch"}


class Batches:
    """The files and batches of a server. Belongs to the event loop, between `start` and `stop`."""

    def __init__(self, app: FastAPI, directory: Path, keys: KeyRing) -> None:
        """Raises ConfigError if the directory cannot be made or trusted."""
        self._app, self._directory = app, directory
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}
        self._queue: asyncio.Queue[Batch] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._saved_s = 0.0  # when a running batch's counts were noted last
        try:
            make_private(directory)
            self.owners = Owners(directory, keys)
            for path in sorted(directory.glob("*.json")):
                with suppress(ValueError, TypeError):  # damaged, or of another version
                    facts = json.loads(path.read_bytes())
                    if path.name.startswith("file-"):
                        self._files[path.stem] = StoredFile(**facts)
                    else:
                        self._batches[path.stem] = Batch(**facts)
        except OSError as error:
            raise ConfigError(f"batches cannot be kept in {directory}: {error.strerror}") from None

    def start(self) -> None:
        """Begins the work, with batches that an earlier process left."""
        for batch in sorted(self._batches.values(), key=lambda one: one.created_at):
            if batch.status in _RUNNING:
                self._queue.put_nowait(batch)
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Interrupts the work; the next start resumes it."""
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker

    # Files

    async def add_file(self, owner: str, filename: str, data: bytes, purpose: str) -> StoredFile:
        """Keeps a file. Raises RequestError if the client has too many, CapacityError on a full disk."""
        uploads = [one for one in self._files.values() if (one.owner, one.purpose) == (owner, purpose)]
        if purpose != _OUTPUT_PURPOSE and len(uploads) >= _MAX_FILES:
            raise RequestError(f"you have {len(uploads)} files here: delete some", code="too_many_files")
        stored = StoredFile(
            f"file-{uuid4().hex}", owner, filename[:200], len(data), purpose, int(time.time())
        )
        try:
            await asyncio.to_thread(write_private, self._data(stored.id), data)
            await asyncio.to_thread(self._save, stored)
        except OSError as error:
            self._data(stored.id).unlink(missing_ok=True)
            log.error("a file cannot be kept: %s", error)
            raise CapacityError("the server cannot store files now: try again later") from None
        self._files[stored.id] = stored
        return stored

    def files(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """A client's files, the newest first."""
        found = [one for one in self._files.values() if one.owner == owner]
        return [one for one in reversed(found) if purpose in (None, one.purpose)]

    def file(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        """A client's file. Raises NotFoundError."""
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"there is no file {file_id[:100]!r}", param=param)
        return found

    async def contents(self, owner: str, file_id: str) -> bytes:
        """The bytes of a client's file."""
        return await asyncio.to_thread(self._data(self.file(owner, file_id).id).read_bytes)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Removes a client's file. Raises RequestError if a batch is at work on it."""
        found = self.file(owner, file_id)
        if any(b.input_file_id == found.id and b.status in _RUNNING for b in self._batches.values()):
            raise RequestError("a batch is reading this file: cancel it first", param="file_id")
        del self._files[found.id]
        self._data(found.id).unlink(missing_ok=True)
        self._path(found.id).unlink(missing_ok=True)

    # Batches

    async def add_batch(
        self, owner: str, file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> Batch:
        """Queues a batch. Raises RequestError, NotFoundError."""
        if endpoint not in URLS:
            raise RequestError(f"endpoint must be one of {', '.join(URLS)}", param="endpoint")
        source = self.file(owner, file_id, "input_file_id")
        if len(self.batches(owner)) >= _MAX_BATCHES:
            message = f"you have {_MAX_BATCHES} batches here: delete some with DELETE /v1/batches/ID"
            raise RequestError(message, code="too_many_batches")
        now = int(time.time())
        batch = Batch(
            f"batch_{uuid4().hex}",
            owner,
            endpoint,
            source.id,
            window,
            now,
            now + _WINDOW_S,
            metadata,
        )
        await asyncio.to_thread(self._save, batch)
        self._batches[batch.id] = batch
        self._queue.put_nowait(batch)
        return batch

    def batches(self, owner: str) -> list[Batch]:
        """A client's batches, the newest first."""
        return [one for one in reversed(self._batches.values()) if one.owner == owner]

    def batch(self, owner: str, batch_id: str) -> Batch:
        """A client's batch. Raises NotFoundError."""
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"there is no batch {batch_id[:100]!r}", param="batch_id")
        return found

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Has a batch end after the requests that run; one that has ended stays as it is."""
        batch = self.batch(owner, batch_id)
        if batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
            await asyncio.to_thread(self._save, batch)
        return batch

    def delete_batch(self, owner: str, batch_id: str) -> None:
        """Forgets a batch that has ended; its files stay. Raises RequestError if it has not."""
        batch = self.batch(owner, batch_id)
        if batch.status in _RUNNING:
            raise RequestError("this batch has not ended: cancel it first", param="batch_id")
        del self._batches[batch.id]
        for path in (self._path(batch.id), *files_of(self._directory / f"{batch.id}.results")):
            path.unlink(missing_ok=True)

    # The work

    async def _work(self) -> None:
        while True:
            batch = await self._queue.get()
            try:
                await self._run(batch)
            except Exception as error:  # the next batch may fare better
                is_known = isinstance(error, ConfigError | CapacityError | OSError)
                log.error("batch failed: %s", error, extra={"batch": batch.id}, exc_info=not is_known)
                self._fail(batch, "server_error", "the server could not finish the batch; its log says why")

    async def _run(self, batch: Batch) -> None:
        """Runs a batch to its end. Raises ConfigError, CapacityError, OSError if files cannot be used."""
        source = self._files.get(batch.input_file_id)
        client = await self.owners.client(batch.owner)
        if client is None:
            self._fail(batch, "invalid_api_key", "the API key of the batch is no longer valid")
            return
        try:
            if source is None:
                raise ConfigError("the input file is gone")
            lines = await asyncio.to_thread(read_batch, self._data(source.id), batch.id)
        except ConfigError as error:
            reason = str(error).replace(str(self._data(batch.input_file_id)), "the file")
            self._fail(batch, "invalid_input", reason)
            return
        lines = [_for_endpoint(line, batch.endpoint) for line in lines]
        target = self._directory / f"{batch.id}.results"
        results = await asyncio.to_thread(Results, target, lines, batch.id)
        try:
            batch.request_counts["total"] = len(lines)
            if batch.status == "validating":
                batch.enter("in_progress")
            await self._count(batch, results)
            left = [line for line in lines if line.id not in results]
            sender = replace(client, usual_priority=max(client.first_priority or 0, _PRIORITY))
            await answer_lines(
                takewhile(lambda _: batch.status != "cancelling" and self.owners.are_valid(client), left),
                results,
                _N_AT_ONCE,
                lambda line: self._post(line, sender),
                lambda _: self._count_now_and_then(batch, results),
            )
            if not self.owners.are_valid(client):
                batch.enter("cancelling")
            was_cancelled = batch.status == "cancelling"
            for line in lines:
                if line.id not in results:
                    results.add(replace(line, error=_CANCELLED).result(None))
            if not was_cancelled:
                batch.enter("finalizing")
            await self._count(batch, results)
            await asyncio.to_thread(results.finish)
        finally:
            results.close()
        await self._keep_results(batch, target)
        batch.enter("cancelled" if was_cancelled else "completed")
        self._save(batch)
        log.info("batch ended", extra={"batch": batch.id, "status": batch.status, **batch.request_counts})

    async def _post(self, line: BatchLine, client: Client) -> AppResponse:
        """The response to a line; one that finds no room is tried again, one that took too long is not."""
        for _ in range(_N_TRIES - 1):
            response = await post(self._app, line.url, line.body, client)
            is_full = response.status == HTTPStatus.SERVICE_UNAVAILABLE
            if not is_full or response.body["error"]["code"] == LATE:
                return response
            await asyncio.sleep(_PAUSE_S)
        return await post(self._app, line.url, line.body, client)

    async def _count_now_and_then(self, batch: Batch, results: Results) -> None:
        if time.monotonic() - self._saved_s > _SAVE_S:
            self._saved_s = time.monotonic()
            await self._count(batch, results)

    async def _count(self, batch: Batch, results: Results) -> None:
        counts = batch.request_counts
        counts["failed"], counts["completed"] = results.n_failed, len(results) - results.n_failed
        await asyncio.to_thread(self._save, batch)

    async def _keep_results(self, batch: Batch, target: Path) -> None:
        """Makes a file of the answers and one of the errors, in the order of the requests."""
        answers: list[bytes] = []
        errors: list[bytes] = []
        for raw in (await asyncio.to_thread(target.read_bytes)).splitlines(keepends=True):
            result = json.loads(raw)
            is_answer = result["error"] is None and result["response"]["status_code"] < 400
            (answers if is_answer else errors).append(raw)
        for lines, kind in ((answers, "output"), (errors, "error")):
            if lines:
                name = f"{batch.id}_{kind}.jsonl"
                stored = await self.add_file(batch.owner, name, b"".join(lines), _OUTPUT_PURPOSE)
                setattr(batch, f"{kind}_file_id", stored.id)
        self._save(batch)
        target.unlink()

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        batch.enter("failed")
        error = {"code": code, "message": message, "line": None, "param": None}
        batch.errors = {"object": "list", "data": [error]}
        with suppress(OSError):
            self._save(batch)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _data(self, file_id: str) -> Path:
        return self._directory / f"{file_id}.data"

    def _save(self, one: StoredFile | Batch) -> None:
        write_private(self._path(one.id), json.dumps(asdict(one)).encode())


def _for_endpoint(line: BatchLine, endpoint: str) -> BatchLine:
    """The line, or its error if it is for another endpoint than the batch."""
    if line.error is None and line.url != endpoint:
        return replace(line, error=("invalid_url", f"the batch is for {endpoint}, this line for {line.url}"))
    return line
