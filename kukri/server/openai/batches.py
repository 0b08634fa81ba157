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
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from http import HTTPStatus
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from kukri.calls.batch_files import URLS, BatchFileError, BatchLine, Results, files_of, read_batch
from kukri.dataclass import asdict, dataclass, field, replace
from kukri.errors import CapacityError, ConfigError, RequestError
from kukri.host.files import clear, remove_file
from kukri.host.private_files import write_private, writing_private
from kukri.server.asgi_client import AppResponse, answer_lines, post
from kukri.server.errors import LATE, NotFoundError
from kukri.server.keys import Client, KeyRing
from kukri.server.openai.owners import Owners
from kukri.server.openai.uploads import Form, read_form

log = logging.getLogger("kukri.server")

PURPOSE = "batch"
_OUTPUT_PURPOSE = "batch_output"
_PRIORITY = 100  # for requests that name none: after those of others
_N_AT_ONCE = 8
_MAX_FILES = 1000  # that a client may upload; its batches' results always find room
_MAX_UPLOADED = 10  # times the largest file: what a client's uploads may take together
_MAX_LINES = 50_000  # in a batch
_MAX_BATCHES = 1000  # per client
_MIN_LIFE_S, _MAX_LIFE_S = 3600, 30 * 24 * 3600  # for a file that is to expire
_WINDOW_S = 24 * 3600
_SAVE_S = 1.0  # between two notes of a batch's counts
_CANCELLED = "batch_cancelled", "the batch was cancelled before this request ran"
_N_TRIES, _PAUSE_S = 60, 1.0  # for a request that finds no room
_RETRY_S = 60.0  # until an expired file that a batch reads is looked at again
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
    expires_at: int | None = None

    def described(self) -> dict[str, Any]:
        """The JSON of the API."""
        facts = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**facts, "object": "file", "status": "processed"}


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
    output_life_s: int | None = None  # its results' time; None keeps them
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})

    def enter(self, status: str) -> None:
        """Changes the status, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def described(self) -> dict[str, Any]:
        """The JSON of the API."""
        facts = {
            name: value for name, value in asdict(self).items() if name not in ("owner", "output_life_s")
        }
        return {**facts, "object": "batch"}


class Batches:
    """The files and batches of a server. Belongs to the event loop, between `start` and `stop`."""

    def __init__(
        self, app: FastAPI, directory: Path, keys: KeyRing, max_upload_bytes: int, max_body_bytes: int
    ) -> None:
        """Raises ConfigError, as Owners does, or if a note in the directory cannot be read.

        A note that is damaged, or of another version, stays as it is.
        """
        self._app, self._directory = app, directory
        self._max_upload_bytes, self._max_body_bytes = max_upload_bytes, max_body_bytes
        self._incoming: list[str] = []  # the owner of each upload under way
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}
        self._queue: asyncio.Queue[Batch] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._saved_s = 0.0  # when a running batch's counts were noted last
        self.owners = Owners(directory, keys, "batches")
        try:
            # uploads that ended with their server
            alone = [path for path in directory.glob("file-*.data") if not path.with_suffix(".json").exists()]
            for path in alone:
                remove_file(path)
            for path in sorted(directory.glob("*.json")):
                try:
                    facts = json.loads(path.read_bytes())
                    if path.name.startswith("file-"):
                        self._files[path.stem] = StoredFile(**facts)
                    else:
                        self._batches[path.stem] = Batch(**facts)
                except (ValueError, TypeError):
                    log.warning("a note that is damaged or of another version stays, unused: %s", path)
            for batch in self._batches.values():
                if batch.status in ("completed", "cancelled"):  # and ended with its server just then
                    remove_file(directory / f"{batch.id}.results")
        except OSError as error:
            raise ConfigError(f"batches cannot be kept in {directory}: {error.strerror}") from None

    def start(self) -> None:
        """Begins the work, with batches that an earlier process left."""
        for batch in sorted(self._batches.values(), key=lambda one: one.created_at):
            if batch.status in _RUNNING:
                self._queue.put_nowait(batch)
        for stored in list(self._files.values()):
            self._await_expiry(stored)
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Interrupts the work; the next start resumes it."""
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker
        self.owners.close()

    # Files

    async def upload(self, owner: str, content_type: str, pieces: AsyncIterator[bytes]) -> StoredFile:
        """Keeps the file of a form, as it arrives.

        Raises RequestError if the form is wrong, or the client has too much here; CapacityError.
        """
        self._check_room(owner)
        stored = StoredFile(f"file-{uuid4().hex}", owner, "upload", 0, PURPOSE, int(time.time()))
        self._incoming.append(owner)
        try:
            async with _off_the_loop(writing_private(self._data(stored.id))) as file:
                form = await read_form(content_type, pieces, file, self._max_upload_bytes)
                if form.fields.get("purpose") != PURPOSE:
                    raise RequestError.of("purpose", f"must be {PURPOSE!r}")
                stored.filename, stored.bytes = (form.filename or "upload")[:200], form.n_bytes
                if (life_s := _life_s(form)) is not None:
                    stored.expires_at = stored.created_at + life_s
            await self._keep(stored)
        except ClientDisconnect:
            raise RequestError("the upload must not be cut off before its end") from None
        except OSError as error:
            raise self._no_room(stored, error) from None
        finally:
            self._incoming.remove(owner)
        return stored

    def _check_room(self, owner: str) -> None:
        """Raises RequestError unless a client may upload one more file of the largest size."""
        uploads = [one for one in self._files.values() if (one.owner, one.purpose) == (owner, PURPOSE)]
        n_incoming = self._incoming.count(owner)
        if len(uploads) + n_incoming >= _MAX_FILES:
            raise RequestError(
                f"you already have {len(uploads)} files, the most that is supported: delete some",
                code="too_many_files",
            )
        n_bytes = sum(one.bytes for one in uploads) + n_incoming * self._max_upload_bytes
        most = (_MAX_UPLOADED - 1) * self._max_upload_bytes
        if n_bytes > most:
            message = f"your files take up to {n_bytes} bytes, and another one requires at most {most}: "
            raise RequestError(f"{message}delete some (--max-upload)", code="too_many_files")

    async def _keep(self, stored: StoredFile) -> None:
        """Notes a file whose contents are there."""
        await asyncio.to_thread(self._save, stored)
        self._files[stored.id] = stored
        self._await_expiry(stored)

    def _no_room(self, stored: StoredFile | Batch, error: OSError) -> CapacityError:
        clear(self._data(stored.id))
        log.error("a file cannot be kept: %s", error)
        return CapacityError("the server cannot store files now: try again later")

    def _await_expiry(self, stored: StoredFile) -> None:
        """Has a file removed when its time is over."""
        if stored.expires_at is not None:
            left_s = max(stored.expires_at - time.time(), 0)
            asyncio.get_running_loop().call_later(left_s, self._expire, stored)

    def _expire(self, stored: StoredFile) -> None:
        if self._files.get(stored.id) is not stored:  # but none, or a later one of the same batch
            return
        with suppress(CapacityError):
            if not self._is_read(stored):  # a batch that has begun is finished
                return self._remove(stored)
        asyncio.get_running_loop().call_later(_RETRY_S, self._expire, stored)

    def files(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """A client's files, the newest first."""
        found = [one for one in self._files.values() if one.owner == owner]
        return [one for one in reversed(found) if purpose in (None, one.purpose)]

    def file(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        """A client's file. Raises NotFoundError."""
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"the file {file_id[:100]!r} was not found", param=param)
        return found

    def path(self, owner: str, file_id: str) -> Path:
        """Where a client's file is."""
        return self._data(self.file(owner, file_id).id)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Removes a client's file. Raises RequestError if a batch is at work on it; CapacityError."""
        found = self.file(owner, file_id)
        if self._is_read(found):
            raise RequestError(
                "the file cannot be deleted while a batch reads it: cancel the batch first", param="file_id"
            )
        self._remove(found)

    def _is_read(self, stored: StoredFile) -> bool:
        return any(b.input_file_id == stored.id and b.status in _RUNNING for b in self._batches.values())

    def _remove(self, stored: StoredFile) -> None:
        _remove_all(self._path(stored.id))
        del self._files[stored.id]
        clear(self._data(stored.id))  # which somebody may be reading: the next start removes it then

    # Batches

    async def add_batch(
        self,
        owner: str,
        file_id: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        output_life_s: int | None = None,
    ) -> Batch:
        """Queues a batch. Raises RequestError, NotFoundError, CapacityError."""
        if endpoint not in URLS:
            raise RequestError.of("endpoint", f"must be one of {', '.join(URLS)}")
        source = self.file(owner, file_id, "input_file_id")
        if len(self.batches(owner)) >= _MAX_BATCHES:
            message = (
                f"you have {_MAX_BATCHES} batches already, the most that is supported: delete some with "
                "DELETE /v1/batches/ID"
            )
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
            output_life_s=output_life_s,
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
            raise NotFoundError(f"the batch {batch_id[:100]!r} was not found", param="batch_id")
        return found

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """End a batch after its running requests; a batch that has ended stays as it is. Raises
        CapacityError.
        """
        batch = self.batch(owner, batch_id)
        if batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
        if batch.status == "cancelling":  # perhaps since a request whose note found no room
            await asyncio.to_thread(self._save, batch)
        return batch

    def delete_batch(self, owner: str, batch_id: str) -> None:
        """Forgets a batch that has ended; its files stay. Raises RequestError if it runs; CapacityError."""
        batch = self.batch(owner, batch_id)
        if batch.status in _RUNNING:
            raise RequestError("the batch cannot be deleted while it runs: cancel it", param="batch_id")
        _remove_all(*files_of(self._directory / f"{batch.id}.results"), self._path(batch.id))
        del self._batches[batch.id]

    # The work

    async def _work(self) -> None:
        while True:
            batch = await self._queue.get()
            try:
                await self._run(batch)
            except Exception as error:  # the next batch may fare better
                is_passing = isinstance(error, CapacityError | OSError | BatchFileError)
                is_known = is_passing or isinstance(error, ConfigError)
                log.error("batch failed: %s", error, extra={"batch": batch.id}, exc_info=not is_known)
                if is_passing:  # what is answered stays, and the disk may have room again
                    asyncio.get_running_loop().call_later(_RETRY_S, self._queue.put_nowait, batch)
                else:
                    self._fail(batch, "server_error", "the server could not finish the batch: see its log")

    async def _run(self, batch: Batch) -> None:
        """Runs a batch to its end. Raises ConfigError, CapacityError, OSError if files cannot be used."""
        source = self._files.get(batch.input_file_id)
        client = await self.owners.client(batch.owner)
        if client is None:
            self._fail(batch, "invalid_api_key", "the API key of the batch is no longer valid")
            return
        try:
            if source is None:
                raise ConfigError("the input file was not found")
            lines = await asyncio.to_thread(
                read_batch,
                self._data(source.id),
                batch.id,
                max_lines=_MAX_LINES,
                max_line_bytes=self._max_body_bytes,
            )
        except ConfigError as error:
            if isinstance(error, BatchFileError):
                raise
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
        ended = replace(batch)
        ended.enter("cancelled" if was_cancelled else "completed")
        self._save(ended)  # a restart makes the same files of the results until this is written
        self._batches[batch.id] = ended
        clear(target)
        log.info("batch ended", extra={"batch": batch.id, "status": ended.status, **batch.request_counts})

    async def _post(self, line: BatchLine, client: Client) -> AppResponse:
        """The response to a line; one that finds no room is tried again, one that took too long is not."""
        body = await asyncio.to_thread(line.read_body)
        for _ in range(_N_TRIES - 1):
            response = await post(self._app, line.url, body, client)
            is_full = response.status == HTTPStatus.SERVICE_UNAVAILABLE
            if not is_full or response.body["error"]["code"] == LATE:
                return response
            await asyncio.sleep(_PAUSE_S)
        return await post(self._app, line.url, body, client)

    async def _count_now_and_then(self, batch: Batch, results: Results) -> None:
        if time.monotonic() - self._saved_s > _SAVE_S:
            self._saved_s = time.monotonic()
            await self._count(batch, results)

    async def _count(self, batch: Batch, results: Results) -> None:
        counts = batch.request_counts
        counts["failed"], counts["completed"] = results.n_failed, len(results) - results.n_failed
        await asyncio.to_thread(self._save, batch)

    async def _keep_results(self, batch: Batch, target: Path) -> None:
        """Makes a file of the answers and one of the errors, in the order of the requests.

        Their ids are made from the batch's, so that a run which repeats this makes no other files.
        """
        for kind in ("output", "error"):
            now = int(time.time())
            expires_at = None if batch.output_life_s is None else now + batch.output_life_s
            stored = StoredFile(
                f"file-{batch.id.removeprefix('batch_')}-{kind}",
                batch.owner,
                f"{batch.id}_{kind}.jsonl",
                0,
                _OUTPUT_PURPOSE,
                now,
                expires_at,
            )
            data = self._data(stored.id)
            try:
                stored.bytes = await asyncio.to_thread(_copy_results, target, data, kind == "output")
                if stored.bytes:
                    await self._keep(stored)
                    setattr(batch, f"{kind}_file_id", stored.id)
                else:
                    remove_file(data)
            except OSError as error:
                raise self._no_room(stored, error) from None

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        batch.enter("failed")
        error = {"code": code, "message": message, "line": None, "param": None}
        batch.errors = {"object": "list", "data": [error]}
        with suppress(CapacityError):
            self._save(batch)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _data(self, file_id: str) -> Path:
        return self._directory / f"{file_id}.data"

    def _save(self, one: StoredFile | Batch) -> None:
        try:
            write_private(self._path(one.id), json.dumps(asdict(one)).encode())
        except OSError as error:
            raise self._no_room(one, error) from None


@asynccontextmanager
async def _off_the_loop(context: AbstractContextManager[BinaryIO]) -> AsyncIterator[BinaryIO]:
    """A context that is entered and left by a thread: the disk may take its time."""
    file = await asyncio.to_thread(context.__enter__)
    try:
        yield file
    except BaseException as error:
        context.__exit__(type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)


def _remove_all(*paths: Path) -> None:
    """Removes files. Raises CapacityError if the system does not let it."""
    try:
        for path in paths:
            remove_file(path)
    except OSError as error:
        log.error("a file cannot be removed: %s", error)
        raise CapacityError("the server cannot remove files now: try again later") from None


def _copy_results(source: Path, target: Path, of_answers: bool) -> int:
    """Copies the lines that are answers, or those that are errors; returns their bytes."""
    n_bytes = 0
    with open(source, "rb") as lines, writing_private(target) as file:
        for raw in lines:
            result = json.loads(raw)
            is_answer = result["error"] is None and result["response"]["status_code"] < 400
            if is_answer == of_answers:
                n_bytes += file.write(raw)
    return n_bytes


def _life_s(form: Form) -> int | None:
    """Seconds for which a form wants its file kept; None for as long as nobody deletes it."""
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError.of("expires_after[anchor]", "must be 'created_at'")
    if not (seconds or "").isdecimal() or not _MIN_LIFE_S <= int((seconds or "")[:9]) <= _MAX_LIFE_S:
        raise RequestError.of("expires_after[seconds]", f"must be from {_MIN_LIFE_S} to {_MAX_LIFE_S}")
    return int(seconds or "")


def _for_endpoint(line: BatchLine, endpoint: str) -> BatchLine:
    """The line, or its error if it is for another endpoint than the batch."""
    if line.error is None and line.url != endpoint:
        return replace(
            line, error=("invalid_url", f"'url' must be {endpoint}, as in the batch, not {line.url}")
        )
    return line
