"""/v1/files and /v1/batches, by OpenAI's client: results in order, across restarts, for one key alone."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.calls.batch_files import Results
from kukri.engine import EngineLoop
from kukri.errors import CapacityError, ConfigError, RequestError
from kukri.host import private_files
from kukri.host.os_calls import HAS_FORK
from kukri.server.keys import KeyRing
from kukri.server.openai import batches as batches_module
from kukri.server.openai.batches import Batch, Batches
from kukri.server.openai.response_store import ResponseFiles, ResponseStore
from kukri.server.openai.uploads import Form, FormReader
from tests.lazy_imports import lazy_imports
from tests.server.live_server import MODEL, Served, serving
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import openai


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(path, max_requests=4, n_threads=1) as llm:
        yield llm


def batches_at(directory: Path, keys: KeyRing, app: Any = None) -> Batches:
    return Batches(app, directory, keys, max_upload_bytes=1 << 20, max_body_bytes=1 << 20)


def client(server: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def asked(i: int, n: int = 4) -> str:
    return line(f"r{i}", model=MODEL, prompt=[i + 1, 5], max_tokens=n, temperature=0, ignore_eos=True)


def upload(openai_client: openai.OpenAI, *lines: str) -> str:
    file = io.BytesIO(("\n".join(lines) + "\n").encode())
    file.name = "requests.jsonl"
    return openai_client.files.create(file=file, purpose="batch").id


def start(openai_client: openai.OpenAI, file_id: str) -> str:
    made = openai_client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )
    return made.id


def ended(openai_client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (batch := openai_client.batches.retrieve(batch_id)).status not in (
        "completed", "failed", "cancelled",
    ):  # fmt: skip
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def lines_of(openai_client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in openai_client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered_in_order(tiny: LLM, tmp_path: Path) -> None:
    """Catches answers of another model call, an order of arrival, and errors among the answers."""
    with serving(tiny, batch_dir=tmp_path / "kept") as server:
        asker = client(server)
        file_id = upload(
            asker,
            *(asked(i) for i in range(12)),
            "{broken",
            line("other", "/v1/embeddings", model=MODEL, input="a"),
            line("wrong", model=MODEL, prompt=[1], temperature=-1),
        )
        assert asker.files.retrieve(file_id).filename == "requests.jsonl"
        batch = ended(asker, start(asker, file_id))
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (15, 12, 3)
        answers, errors = lines_of(asker, batch.output_file_id), lines_of(asker, batch.error_file_id)
        assert [one["custom_id"] for one in answers] == [f"r{i}" for i in range(12)]
        assert [one["custom_id"] for one in errors] == [None, "other", "wrong"]
        for i, one in enumerate(answers):
            expected = tiny.generate([i + 1, 5], max_tokens=4, temperature=0, ignore_eos=True)
            assert one["response"]["body"]["choices"][0]["text"] == expected.text
        assert [one.id for one in asker.batches.list()] == [batch.id]
        assert len(list(asker.files.list())) == 3
        assert asker.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            asker.files.retrieve(file_id)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.full
def test_a_restart_continues_where_it_was(tiny: LLM, tmp_path: Path) -> None:
    """Catches a batch that is lost with its server, or answered from the beginning again."""
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        batch_id = start(asker, upload(asker, *(asked(i, 100) for i in range(240))))
        server.wait_until(lambda: asker.batches.retrieve(batch_id).status == "in_progress")
        part = tmp_path / f"{batch_id}.results.part"
        server.wait_until(lambda: part.exists() and part.stat().st_size > 0)
    n_done = len(part.read_bytes().splitlines())
    assert 0 < n_done < 240
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        batch = ended(asker, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 240)
        assert [one["custom_id"] for one in lines_of(asker, batch.output_file_id)] == [
            f"r{i}" for i in range(240)
        ]


def test_a_batch_can_be_cancelled(tiny: LLM, tmp_path: Path) -> None:
    """Catches a batch that runs to its end all the same, or whose answers so far are lost."""
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        batch_id = start(asker, upload(asker, *(asked(i, 100) for i in range(60))))
        server.wait_until(lambda: asker.batches.retrieve(batch_id).status == "in_progress")
        assert asker.batches.cancel(batch_id).status == "cancelling"
        batch = ended(asker, batch_id)
        assert batch.status == "cancelled"
        n_left = sum(one["error"] is not None for one in lines_of(asker, batch.error_file_id))
        assert n_left > 0


def test_files_and_batches_belong_to_a_key(tiny: LLM, tmp_path: Path) -> None:
    """Catches one client's prompts and answers in another's hands."""
    with serving(tiny, batch_dir=tmp_path, api_keys=("one", "two")) as server:
        mine, other = client(server, "one"), client(server, "two")
        file_id = upload(mine, asked(1))
        batch = ended(mine, start(mine, file_id))
        assert batch.status == "completed"
        for call in (
            lambda: other.files.retrieve(file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(file_id),
            lambda: start(other, file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert list(other.files.list()) == list(other.batches.list()) == []
        with pytest.raises(openai.AuthenticationError):
            client(server, "three").files.list()


@pytest.mark.full
def test_a_batch_ends_with_its_key(tiny: LLM, tmp_path: Path) -> None:
    """Catches work that continues for a key that has been taken back, now or before the next start."""
    with serving(tiny, batch_dir=tmp_path, api_keys=("one", "two")) as server:
        mine = client(server, "one")
        running = start(mine, upload(mine, *(asked(i, 100) for i in range(240))))
        waiting = start(mine, upload(mine, asked(1)))
        server.wait_until(lambda: mine.batches.retrieve(running).request_counts.completed > 0)
        server.registry.keys.replace(["two"])
        other = client(server, "two")
        other_file = upload(other, asked(2))
        assert ended(other, start(other, other_file)).status == "completed"
        server.registry.keys.replace(["one"])
        assert mine.batches.retrieve(running).status == "cancelled"
        assert 0 < mine.batches.retrieve(running).request_counts.completed < 240
        assert mine.batches.retrieve(waiting).errors.data[0].code == "invalid_api_key"


def test_lines_have_their_own_priority(tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line whose priority is refused, and lines that go before the requests of others."""
    seen: list[int] = []
    submit = EngineLoop.submit

    def watched(self: EngineLoop, requests: Any) -> None:
        seen.extend(request.priority for request in requests)
        submit(self, requests)

    monkeypatch.setattr(EngineLoop, "submit", watched)
    keys = ("one", "late priority=300")
    with serving(tiny, batch_dir=tmp_path, api_keys=keys) as server:
        for name, priorities, found in (
            ("one", (None, 5, -3), [-3, 5, 100]),
            ("late", (None, 400, 5), [300, 400]),
        ):
            asker = client(server, name)
            lines = [
                line(f"r{i}", model=MODEL, prompt=[i], max_tokens=1, **({} if p is None else {"priority": p}))
                for i, p in enumerate(priorities)
            ]
            batch = ended(asker, start(asker, upload(asker, *lines)))
            assert sorted(seen) == found
            assert batch.request_counts.completed == len(found)
            seen.clear()


@pytest.mark.full
def test_a_line_that_takes_too_long_is_not_tried_again(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches 60 times the deadline of computing for a line that cannot be done in time."""
    calls: list[str] = []
    post = batches_module.post

    async def watched(*arguments: Any) -> Any:
        calls.append(arguments[1])
        return await post(*arguments)

    monkeypatch.setattr(batches_module, "post", watched)
    with serving(tiny, batch_dir=tmp_path, deadline_s=1e-4) as server:
        asker = client(server)
        batch = ended(asker, start(asker, upload(asker, asked(1, 100))))
        (failed,) = lines_of(asker, batch.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "deadline_exceeded"
    assert len(calls) == 1


def test_results_find_room_where_uploads_do_not(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches results lost for want of room, and a client that takes the room of another."""
    monkeypatch.setattr(batches_module, "_MAX_FILES", 2)
    monkeypatch.setattr(batches_module, "_MAX_BATCHES", 1)
    with serving(tiny, batch_dir=tmp_path, api_keys=("one", "two")) as server:
        mine = client(server, "one")
        files = [upload(mine, asked(i)) for i in range(2)]
        with pytest.raises(openai.BadRequestError, match="delete some"):
            upload(mine, asked(3))
        upload(client(server, "two"), asked(4))
        batch = ended(mine, start(mine, files[0]))
        assert len(lines_of(mine, batch.output_file_id)) == 1
        with pytest.raises(openai.BadRequestError, match="DELETE /v1/batches"):
            start(mine, files[1])
        with server.http(headers={"authorization": "Bearer one"}) as http:
            assert http.delete(f"/v1/batches/{batch.id}").json()["deleted"]
            assert http.get(f"/v1/batches/{batch.id}").status_code == 404
        second = start(mine, files[1])
        assert ended(mine, second).status == "completed"


def test_lists_have_pages(tiny: LLM, tmp_path: Path) -> None:
    """Catches pages that leave one out or show it twice, and lists that only grow."""
    with serving(tiny, batch_dir=tmp_path) as server, server.http() as http:
        asker = client(server)
        file_ids = [upload(asker, asked(i)) for i in range(5)][::-1]
        batch_ids = [start(asker, file_ids[0]) for _ in range(5)][::-1]
        assert [one.id for one in asker.files.list(limit=2, purpose="batch")] == file_ids
        assert [one.id for one in asker.batches.list(limit=2)] == batch_ids
        page = http.get(f"/v1/batches?limit=2&after={batch_ids[1]}").json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (batch_ids[2:4], True)
        last = http.get(f"/v1/batches?after={batch_ids[3]}").json()
        assert ([one["id"] for one in last["data"]], last["has_more"]) == (batch_ids[4:], False)
        assert http.get("/v1/batches?after=x").status_code == 404
        assert http.get("/v1/files?limit=0").status_code == 400
        for batch_id in batch_ids:
            ended(asker, batch_id)


def test_wrong_input_is_explained(tiny: LLM, tmp_path: Path) -> None:
    """Catches a 500, and a batch that never ends because its file holds nothing."""
    with serving(tiny, batch_dir=tmp_path) as server, server.http() as http:
        asker = client(server)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            asker.files.create(file=io.BytesIO(b"a"), purpose="fine-tune")
        batch = ended(asker, start(asker, upload(asker, "")))
        assert batch.status == "failed"
        assert "must have requests" in batch.errors.data[0].message
        assert str(tmp_path) not in batch.errors.data[0].message
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            asker.batches.create(
                input_file_id=upload(asker, asked(1)), endpoint="/v1/x", completion_window="24h"
            )  # type: ignore[call-overload]
        assert http.post("/v1/files", content=b"x").status_code == 400
        assert http.get("/v1/files/..%2f..%2fetc/content").status_code == 404
    with serving(tiny) as server, pytest.raises(openai.NotFoundError, match="batch-dir"):
        upload(client(server), asked(1))


BAD_FORMS = [
    b"", b"--b", b"--b--\r\n", b"--b\r\n\r\nx\r\n--b--", b'--b\r\ncontent: name="a"\r\n--b--', b"x--b--",
    b"--b\r\n" + b"h" * 100_000,
    b'--b\r\nx; name="purpose"\r\n\r\n' + b"p" * 100_000 + b"\r\n--b--",
    b'--b\r\nx; name="file"\r\n\r\n1\r\n--b\r\nx; name="file"\r\n\r\n2\r\n--b--',
    b"".join(b'--b\r\nx; name="f%d"\r\n\r\n1\r\n' % i for i in range(99)) + b"--b--",
]  # fmt: skip


def read(body: bytes, size: int, max_bytes: int = 10_000) -> tuple[Form, bytes]:
    """The form in `body`, which arrives in pieces of `size`, and its file."""
    target = io.BytesIO()
    reader = FormReader('multipart/form-data; boundary="b"', target, max_bytes)
    for i in range(0, len(body), size):
        reader.feed(body[i : i + size])
    return reader.finish(), target.getvalue()


@pytest.mark.parametrize("body", BAD_FORMS, ids=lambda body: str(body[:40]))
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_wrong_forms_are_refused(body: bytes, size: int) -> None:
    """Catches an IndexError, a field or a header that grows without bound, and a second file unnoticed."""
    with pytest.raises(RequestError):
        read(body, size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1 << 20])
def test_a_form_keeps_every_byte(size: int) -> None:
    """Catches line ends that are translated, a file that ends early, and a delimiter cut in two."""
    data = bytes(range(256)) + b"\r\n-\r\n--\r\n--c\r\n\n\r\r\n" * 3
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + data + b"\r\n"
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    )
    form, kept = read(body, size)
    assert kept == data
    assert form == Form({"purpose": "batch"}, "x", len(data), has_file=True)
    with pytest.raises(RequestError, match="--max-upload"):
        read(body, size, len(data) - 1)


def test_an_upload_may_be_larger_than_a_body(tiny: LLM, tmp_path: Path) -> None:
    """Catches a file of requests that is bound by --max-body, one without a bound, one that is whole in
    memory, a line that is too long for a request, and what a refused upload leaves on the disk."""
    settings = {"batch_dir": tmp_path, "max_body_bytes": 4_000, "max_upload_bytes": 1 << 20}
    with serving(tiny, **settings) as server, server.http() as http:
        asker = client(server)
        long = line("long", model=MODEL, prompt="a " * 3_000)
        lines = [asked(0), long, *(" " * 100_000 for _ in range(9)), asked(1)]
        batch = ended(asker, start(asker, upload(asker, *lines)))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        (error,) = lines_of(asker, batch.error_file_id)
        assert "--max-body" in error["error"]["message"]
        there = set(tmp_path.iterdir())
        with pytest.raises(openai.BadRequestError, match="--max-upload"):
            upload(asker, "x" * (1 << 20))
        with pytest.raises(openai.APIStatusError, match="--max-upload") as refused:
            upload(asker, "x" * (2 << 20))
        assert refused.value.status_code == 413
        assert set(tmp_path.iterdir()) == there
        assert http.post("/v1/completions", content=b" " * 5_000).status_code == 413


def test_a_clients_uploads_are_bounded_together(tiny: LLM, tmp_path: Path) -> None:
    """Catches a client that fills the disk by a thousand of the largest files."""
    with serving(tiny, batch_dir=tmp_path, max_upload_bytes=20_000) as server:
        asker = client(server)
        files = [upload(asker, "x" * 19_990) for _ in range(10)]
        with pytest.raises(openai.BadRequestError, match="delete some"):
            upload(asker, "x")
        asker.files.delete(files[0])
        upload(asker, "x")


def test_what_a_crash_left_of_uploads_is_removed(tiny: LLM, tmp_path: Path) -> None:
    """Catches unfinished files of the largest size that stay forever."""
    with serving(tiny, batch_dir=tmp_path) as server:
        kept = upload(client(server), asked(1))
    (tmp_path / ".new-abc").write_bytes(b"half")
    (tmp_path / "file-abc.data").write_bytes(b"without a note of it")
    with serving(tiny, batch_dir=tmp_path) as server:
        assert [one.id for one in client(server).files.list()] == [kept]
    assert {path.name for path in tmp_path.iterdir()} == {f"{kept}.json", f"{kept}.data", "salt"}


@pytest.mark.skipif(not HAS_FORK, reason="needs a system with locks")
@pytest.mark.parametrize("keep", [batches_at, ResponseFiles], ids=["batches", "responses"])
def test_a_directory_has_one_server(tmp_path: Path, keep: Callable[[Path, KeyRing], Any]) -> None:
    """Catches two servers that answer the same batches, and remove what the other is writing."""
    first = keep(tmp_path, KeyRing([]))
    unfinished = tmp_path / ".new-abc"
    unfinished.write_bytes(b"half")
    with pytest.raises(ConfigError, match="must be used by one server") as failure:
        keep(tmp_path, KeyRing([]))
    assert "\n" not in str(failure.value)
    assert unfinished.exists()
    first.owners.close()
    keep(tmp_path, KeyRing([])).owners.close()
    assert not unfinished.exists()


def test_notes_of_another_version_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches files and batches that disappear without a word, or are removed, after a change of version."""
    notes = {tmp_path / f"{name}.json": b'{"of": "another version"}' for name in ("file-0", "batch_0")}
    kept = {**notes, tmp_path / "batch_0.results.part": b"{}\n", tmp_path / "file-0.data": b"{}\n"}
    for path, data in kept.items():
        path.write_bytes(data)
    batches_at(tmp_path, KeyRing([])).owners.close()
    assert {path: path.read_bytes() for path in kept} == kept
    assert all(str(path) in caplog.text for path in notes)


class Killed(BaseException):
    """The end of a process, from which nothing recovers."""


class FullFile(io.BufferedWriter):
    """A file on a full disk."""

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Life:
    """A process that lives for some writes to the disk; the last line of results is half written.

    With an `error` the next write fails by it, and the process lives on. Attributes: n_left, the writes until
    then; noted, the ids of lines whose results are on the disk; n_lost, answers that the error kept from it.
    """

    def __init__(self, n_writes: int, error: OSError | None = None) -> None:
        self.n_left, self.noted, self._error, self.n_lost = n_writes, set[str](), error, 0

    def __enter__(self) -> Life:
        self._patch = pytest.MonkeyPatch()
        for module, name in ((os, "replace"), (os, "unlink"), (private_files, "mkstemp")):
            self._patch.setattr(module, name, self._counted(getattr(module, name)))
        add = Results.add

        def noting(results: Results, result: dict[str, Any]) -> None:
            if self.n_left == 0 and self._error is not None:
                results._file, self.n_lost = FullFile(results._file.detach()), 1
            elif self.n_left == 0:
                results._file.write(json.dumps(result).encode()[:40])
            self.n_left -= self.n_lost  # whose error is the file's own
            self._counted(add)(results, result)
            self.noted.add(result["custom_id"])

        self._patch.setattr(Results, "add", noting)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            if self.n_left == 0 and self._error is None:
                raise Killed
            self.n_left -= 1
            if self.n_left == -1 and self._error is not None:
                raise self._error
            return write(*args, **named)

        return counted


async def queued(directory: Path, lines: list[str]) -> None:
    """Leaves a batch to the next server on a directory."""
    here = batches_at(directory, KeyRing([]))
    form = 'content-disposition: form-data; name="{}"\r\n\r\n{}\r\n--x'
    parts = (form.format("purpose", "batch"), form.format('file"; filename="a', "\n".join(lines)))

    async def pieces() -> AsyncIterator[bytes]:
        yield "\r\n".join(["--x", *parts]).encode() + b"--\r\n"

    stored = await here.upload("", "multipart/form-data; boundary=x", pieces())
    await here.add_batch("", stored.id, "/v1/completions", "24h", None)
    await here.stop()


async def lived(directory: Path) -> tuple[Batch, list[str]]:
    """The only batch of a server that lives until all have ended, or it is killed, and whom it answered."""
    answered: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        name = json.loads((await receive())["body"])["prompt"]
        answered.append(name)
        headers = [(b"x-request-id", b"r")]
        await send(
            {"type": "http.response.start", "status": 400 if name == "bad" else 200, "headers": headers}
        )
        await send({"type": "http.response.body", "body": b"{}"})

    here = batches_at(directory, KeyRing([]), app)
    try:
        here.start()
        while here.batches("")[0].status in batches_module._RUNNING and not here._worker.done():
            await asyncio.sleep(0.001)
        with suppress(Killed, BaseExceptionGroup):
            await here.stop()
    finally:
        here.owners.close()
    return here.batches("")[0], answered


def test_a_kill_at_any_write_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches lines that are answered again after a kill, and files that a second run makes once more."""
    monkeypatch.setattr(batches_module, "_N_AT_ONCE", 1)
    monkeypatch.setattr(batches_module, "_SAVE_S", math.inf)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # which takes the time of this test
    names = ["one", "bad"]
    asyncio.run(queued(tmp_path / "queued", [line(name, prompt=name) for name in names]))
    found: list[set[str]] = []
    life = Life(0)
    while life.n_left == 0:
        directory = tmp_path / str(len(found))
        shutil.copytree(tmp_path / "queued", directory)
        with Life(len(found)) as life, suppress(Killed):
            asyncio.run(lived(directory))
        batch, answered = asyncio.run(lived(directory))
        assert answered == [name for name in names if name not in life.noted]
        assert batch.status == "completed"
        for file_id, expected in ((batch.output_file_id, ["one"]), (batch.error_file_id, ["bad"])):
            raw = (directory / f"{file_id}.data").read_text().splitlines()
            assert [json.loads(one)["custom_id"] for one in raw] == expected
        found.append({path.name for path in directory.iterdir()})
    assert len(found) > 20
    assert all(one == found[-1] and len(one) == 8 for one in found)


def test_a_kill_at_any_write_keeps_what_was_said_of_responses(tmp_path: Path) -> None:
    """Catches a response that is said to be stored, or to be deleted, and is not so for the next server."""
    n_writes, life = 0, Life(0)
    while life.n_left == 0:
        directory = tmp_path / str(n_writes)
        store = ResponseStore(files=ResponseFiles(directory, KeyRing([])))
        said: dict[str, bool] = {}
        with Life(n_writes) as life, suppress(Killed):
            for name in ("resp_0", "resp_1"):
                said[name] = asyncio.run(store.add("", None, [], {"id": name, "output": []}))
            asyncio.run(store.forget("", "resp_0"))
            said["resp_0"] = False
            life.n_left += 1
        store.close()
        again = ResponseStore(files=ResponseFiles(directory, KeyRing([])))
        again.close()
        assert {name: name in again._stored for name in said} == said
        n_writes += 1
    assert n_writes == 6


def test_a_file_that_cannot_be_removed_is_no_deleted_response(tmp_path: Path) -> None:
    """Catches a client that is told that a response is gone, which the next server still has."""
    store = ResponseStore(files=ResponseFiles(tmp_path, KeyRing([])))
    asyncio.run(store.add("", None, [], {"id": "resp_0", "output": []}))
    with Life(0, OSError(errno.EROFS, "Read-only file system")), pytest.raises(CapacityError):
        asyncio.run(store.forget("", "resp_0"))
    assert store.find("", "resp_0")
    asyncio.run(store.forget("", "resp_0"))
    store.close()
    assert not (tmp_path / "resp_0.json").exists()


def test_what_cannot_be_removed_stays_in_the_lists(tmp_path: Path) -> None:
    """Catches a 500 for a file or a batch that is gone from this server, and back with the next one."""
    asyncio.run(queued(tmp_path, [line("one", prompt="one")]))
    here = batches_at(tmp_path, KeyRing([]))
    (batch,), (file,) = here.batches(""), here.files("")
    batch.enter("cancelled")
    deletions = (here.delete_batch, batch.id), (here.delete_file, file.id)
    for delete, name in deletions:
        with Life(0, OSError(errno.EROFS, "Read-only file system")), pytest.raises(CapacityError):
            delete("", name)
    assert (here.batches(""), here.files("")) == ([batch], [file])
    for delete, name in deletions:
        delete("", name)
    here.owners.close()
    assert [path.name for path in tmp_path.iterdir()] == ["salt"]


def test_a_disk_that_is_full_for_a_while_loses_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a batch that fails, with all that was answered, because one write found no room."""
    monkeypatch.setattr(batches_module, "_RETRY_S", 0)
    monkeypatch.setattr(batches_module, "_SAVE_S", math.inf)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # which takes the time of this test
    asyncio.run(queued(tmp_path / "queued", [line("one", prompt="one")]))
    n_writes, n_lost, life = 0, 0, Life(0)
    while life.n_left <= 0:
        directory = tmp_path / str(n_writes)
        shutil.copytree(tmp_path / "queued", directory)
        with Life(n_writes, OSError(errno.ENOSPC, "No space left on device")) as life:
            batch, answered = asyncio.run(lived(directory))
        assert (batch.status, answered) == ("completed", ["one"] * (1 + life.n_lost))
        n_lost += life.n_lost
        assert (directory / f"{batch.output_file_id}.data").read_text().count("\n") == 1
        n_writes += 1
    assert n_writes > 12
    assert n_lost == 1


def test_a_full_disk_takes_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a 500 for what is no fault of the server's, and a cancellation that a restart forgets."""
    asyncio.run(queued(tmp_path, [line("one", prompt="one")]))
    here = batches_at(tmp_path, KeyRing([]))
    (batch,), (file,) = here.batches(""), here.files("")
    with Life(0, OSError(errno.ENOSPC, "No space left on device")), pytest.raises(CapacityError):
        asyncio.run(here.add_batch("", file.id, "/v1/completions", "24h", None))
    assert here.batches("") == [batch]
    with Life(0, OSError(errno.ENOSPC, "No space left on device")), pytest.raises(CapacityError):
        asyncio.run(here.cancel("", batch.id))
    asyncio.run(here.cancel("", batch.id))
    here.owners.close()
    again = batches_at(tmp_path, KeyRing([]))
    assert [one.status for one in again.batches("")] == ["cancelling"]
    again.owners.close()


@pytest.mark.full
def test_files_expire(tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `expires_after` that is ignored, out of its range, or forgotten at a restart, results that
    outlive theirs, and a file that expires while its batch reads it."""
    monkeypatch.setattr(batches_module, "_RETRY_S", 0.05)
    file = ("a.jsonl", asked(1).encode())
    after = {"anchor": "created_at", "seconds": 3600}
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        made = asker.files.create(file=file, purpose="batch", expires_after=after)  # type: ignore[arg-type]
        assert made.expires_at == made.created_at + 3600
        for wrong in ({"anchor": "now", "seconds": 3600}, {"anchor": "created_at", "seconds": 9}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                asker.files.create(file=file, purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
        kept = asker.files.create(file=file, purpose="batch")
        batch = asker.batches.create(
            input_file_id=kept.id,
            endpoint="/v1/completions",
            completion_window="24h",
            output_expires_after=after,  # type: ignore[arg-type]
        )
        done = ended(asker, batch.id)
        output = asker.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 3600
        assert kept.expires_at is None
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        running = start(asker, upload(asker, *(asked(i, 100) for i in range(600))))
        waiting = start(asker, made.id)
    note = tmp_path / f"{made.id}.json"
    note.write_text(note.read_text().replace(str(made.expires_at), str(int(time.time()) - 1)))
    with serving(tiny, batch_dir=tmp_path) as server:
        asker = client(server)
        asker.batches.cancel(running)
        assert ended(asker, waiting).request_counts.completed == 1
        deadline = time.monotonic() + 10
        while made.id in [one.id for one in asker.files.list()]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not list(tmp_path.glob(f"{made.id}*"))
