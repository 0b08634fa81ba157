"""Pages on disk: found by another engine, verified, within a budget, whole after a crash."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kukri.engine import Engine, Request, saved_prefixes
from kukri.engine.pages import ROOT, PageKey, page_key
from kukri.engine.saved_prefixes import _HEADER_BYTES, SavedPrefixes
from kukri.errors import ConfigError
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PagedKV
from tests.engine.driving import add, finish, greedy, prompt_of
from tests.engine.fake_model import FakeBackend, expected_output, make_engine

PAGE_FILE_BYTES = 1024 + _HEADER_BYTES  # a page of the fake model


def page_keys(tokens: np.ndarray, page_tokens: int) -> list[PageKey]:
    """The key of each full page of tokens, int32."""
    keys = [ROOT]
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        keys.append(page_key(tokens[start : start + page_tokens], keys[-1]))
    return keys[1:]


def open_engine(directory: Path, **options: object) -> tuple[Engine, FakeBackend]:
    """An engine as a new process opens it."""
    return make_engine(
        **{"max_context": 256, "max_step_tokens": 100, "prefix_dir": str(directory), **options}  # type: ignore[arg-type]
    )


def answer(engine: Engine, prompt: list[int], n: int = 5, scope: str = "") -> Request:
    """A request that has ended."""
    (request,) = engine.maker.make_requests(prompt, greedy(n), prefix_scope=scope)
    engine.add_request(request)
    finish(engine)
    return request


def saved_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.page"))


@pytest.mark.parametrize("pages_per_step", [1, 2, 100])
def test_another_process_finds_a_prefix(tmp_path: Path, pages_per_step: int) -> None:
    """Pages that are never written, read for another text, or computed although they were read."""
    prompt = prompt_of(100)
    first, _ = open_engine(tmp_path)
    answer(first, prompt, 30)
    first.close()
    assert len(saved_files(tmp_path)) == 129 // 16
    engine, backend = open_engine(tmp_path)
    assert engine.saved_prefixes is not None
    engine.saved_prefixes.pages_per_step = pages_per_step
    request = answer(engine, prompt)
    assert request.sequence.n_prefix_hit == engine.allocator.n_restored == 96
    assert backend.batches[0][0] == 4
    assert request.output_ids == expected_output(prompt, 5)
    assert answer(engine, prompt).sequence.n_prefix_hit == 96
    assert engine.allocator.n_restored == 96  # the second time it was in memory
    other = prompt[:50] + prompt_of(40, 9)
    assert answer(engine, other).output_ids == expected_output(other, 5)
    engine.close()


STATEFUL = {"has_states": True, "snapshot_bytes": 1 << 20}


@pytest.mark.parametrize("pages_per_step", [1, 2, 100])
def test_another_process_finds_a_prefix_and_its_state(tmp_path: Path, pages_per_step: int) -> None:
    """A hybrid that reads its whole prompt again, or continues from pages without the state after them.

    The fake model asserts that each state is that of its text.
    """
    prompt = prompt_of(150)
    first, _ = open_engine(tmp_path, **STATEFUL)
    answer(first, prompt, 30)
    first.close()
    engine, _ = open_engine(tmp_path, **STATEFUL)
    assert engine.saved_prefixes is not None
    engine.saved_prefixes.pages_per_step = pages_per_step
    others = [prompt_of(20, seed) for seed in range(3)]
    requests = [engine.maker.make_requests(one, greedy(5))[0] for one in (others[0], prompt, *others[1:])]
    for request in requests:
        engine.add_request(request)
    finish(engine)
    for request, one in zip(requests, (others[0], prompt, *others[1:]), strict=True):
        assert request.output_ids == expected_output(one, 5)
    assert requests[1].sequence.n_prefix_hit == 144, "of which the first 16 are the other's too"
    assert engine.allocator.n_restored >= 128
    part = prompt[:100] + prompt_of(30, 9)  # that has a state 64 tokens before the end of the first
    shared = answer(open_engine(tmp_path, **STATEFUL)[0], part)
    assert shared.output_ids == expected_output(part, 5)
    assert shared.sequence.n_prefix_hit == 80
    engine.close()


def test_a_state_is_of_no_use_without_all_its_pages(tmp_path: Path) -> None:
    """A page lost or damaged in the middle, after which a state would be that of tokens nobody has."""
    prompt = prompt_of(150)
    first, _ = open_engine(tmp_path, **STATEFUL)
    seventh = answer(first, prompt).sequence.page_keys[6]
    first.close()
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * PAGE_FILE_BYTES)):
        engine, _ = open_engine(tmp_path, **STATEFUL)
        assert engine.saved_prefixes is not None
        engine.saved_prefixes.pages_per_step = 2
        (path,) = (one for one in saved_files(tmp_path) if one.name.startswith(seventh.hex() + "."))
        spoil(path)
        request = answer(engine, prompt)
        assert request.output_ids == expected_output(prompt, 5)
        assert request.sequence.n_prefix_hit == engine.allocator.n_restored <= 80
        engine.close()


def test_requests_beside_each_other_read_and_preempt(tmp_path: Path) -> None:
    """Pages read twice, lost, or read into pages that another request holds, as memory runs out."""
    prompts = [prompt_of(64) + prompt_of(30, i) for i in range(5)]
    for n_pages in (60, 14, 9):
        engine, _ = open_engine(tmp_path, max_requests=3, n_pages=n_pages)
        requests = [add(engine, prompt, greedy(20)) for prompt in prompts for _ in range(2)]
        finish(engine)
        for request in requests:
            prompt = request.sequence.tokens[: request.n_prompt].tolist()
            assert request.output_ids == expected_output(prompt, 20)
        engine.close()


def test_a_prefix_is_found_within_its_scope_alone(tmp_path: Path) -> None:
    """One client's prompts that another can find out by asking, in memory or on disk."""
    prompt = prompt_of(100)
    engine, _ = open_engine(tmp_path)
    hits = [answer(engine, prompt, 5, scope).sequence.n_prefix_hit for scope in ("a", "b", "a", "")]
    assert hits == [0, 0, 96, 0]
    engine.close()
    engine, _ = open_engine(tmp_path)
    hits = [answer(engine, prompt, 5, scope).sequence.n_prefix_hit for scope in ("c", "b", "a", "")]
    assert hits == [0, 96, 96, 96]
    engine.close()


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    """Keys and values of another model, or of kernels with other bits."""
    prompt = prompt_of(100)
    engine, _ = open_engine(tmp_path, identity=b"one")
    answer(engine, prompt)
    engine.close()
    for identity, n_hit in ((b"two", 0), (b"one", 96)):
        engine, _ = open_engine(tmp_path, identity=identity)
        assert answer(engine, prompt).sequence.n_prefix_hit == n_hit
        engine.close()


def test_what_hooks_may_have_changed_is_not_saved(tmp_path: Path) -> None:
    """An edited activation that outlives its process."""
    engine, _ = open_engine(tmp_path)
    hooks = {"hook_embed": lambda name, x: None}
    engine.add_hooks(hooks)
    answer(engine, prompt_of(100))
    engine.remove_hooks(hooks)
    engine.close()
    assert not saved_files(tmp_path)


def corruptions(seed: int, data: bytes) -> bytes:
    """A file's bytes damaged in one of the ways in which disks and people do it."""
    rng = random.Random(seed)
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:  # a bit
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 1:  # a run of zeros
        end = min(at + rng.randrange(1, 64), len(data))
        damaged = data[:at] + bytes(end - at) + data[end:]
        return damaged if damaged != data else data[:-1] + bytes([data[-1] ^ 1])
    if kind == 2:  # cut short
        return data[:at]
    if kind == 3:  # longer
        return data + rng.randbytes(rng.randrange(1, 100))
    if kind == 4:  # two bytes exchanged, or one changed
        other = rng.randrange(len(data))
        swapped = bytearray(data)
        swapped[at], swapped[other] = swapped[other], swapped[at]
        return bytes(swapped) if swapped != data else data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
    return rng.randbytes(len(data))


def test_a_thousand_corruptions_are_found(tmp_path: Path) -> None:
    """A damaged page that is believed: an answer that is wrong and cannot be explained."""
    cache = PagedKV([KVLayer(1, 16)], 4)
    saved = SavedPrefixes(cache, tmp_path, 1 << 20)
    tokens = np.arange(32, dtype=np.int32)
    keys = page_keys(tokens, 16)
    cache.set_page_data([0], np.random.default_rng(0).integers(0, 256, 1024, np.uint8).tobytes())
    for key in keys:
        saved.save(0, key, 0)
    saved.close()
    first, second = (tmp_path / f"{key.hex()}.page" for key in keys)
    good = first.read_bytes()
    saved = SavedPrefixes(cache, tmp_path, 1 << 20)
    logging.getLogger("kukri.prefixes").setLevel(logging.ERROR)
    for seed in range(1000):
        damaged = corruptions(seed, good)
        assert damaged != good
        first.write_bytes(damaged)
        assert not list(saved.read(keys, 0)), seed
        assert not first.exists()
    logging.getLogger("kukri.prefixes").setLevel(logging.NOTSET)
    assert saved.n_damaged == 1000
    first.write_bytes(second.read_bytes())  # whole, under another page's name
    assert not list(saved.read(keys, 0))
    first.write_bytes(good)
    assert [bytes(page) for page in saved.read(keys, 0)] == [cache.page_data([0])] * 2
    saved.close()


def test_the_budget_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that grows forever, or that loses the newest prefix, or the first page of one, first."""
    now_s = time.time()
    clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)  # a busy machine tells other ages
    monkeypatch.setattr(saved_prefixes, "time", clock)
    engine, _ = open_engine(tmp_path, prefix_bytes=32 * PAGE_FILE_BYTES)
    prompts = [prompt_of(130, seed) for seed in range(6)]
    for prompt in prompts:
        now_s += 10
        answer(engine, prompt, 1)
    engine.close()
    files = saved_files(tmp_path)
    assert 16 <= len(files) <= 32
    engine, _ = open_engine(tmp_path)
    hits = [answer(engine, prompt, 1).sequence.n_prefix_hit for prompt in prompts]
    assert hits[-1] == 128
    assert hits[0] == 0
    # a prefix that lost pages lost the last ones
    assert sum(hits) == len(files) * 16
    engine.close()


def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A request that fails, or a half-written page, because the disk is full."""
    real, n_written = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal n_written
        n_written += 1
        if n_written == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    engine, _ = open_engine(tmp_path)
    prompt = prompt_of(100)
    assert answer(engine, prompt).output_ids == expected_output(prompt, 5)
    assert answer(engine, prompt_of(100, 3)).output_ids == expected_output(prompt_of(100, 3), 5)
    engine.close()
    assert "No space left on device" in caplog.text
    assert [path for path in tmp_path.iterdir() if path.suffix != ".page"] == []


def test_a_fault_of_the_writer_does_not_end_saving_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a thread that ends by an error that is not the disk's, and is never started again."""
    monkeypatch.setattr("kukri.engine.saved_prefixes._PAUSE_S", 0.0)
    engine, _ = open_engine(tmp_path)
    saved = engine.saved_prefixes
    assert saved is not None
    with monkeypatch.context() as patched:
        patched.setattr(saved, "_write", lambda batch: {}["no such thing"])
        answer(engine, prompt_of(100))
        deadline = time.monotonic() + 20
        while "paused" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "no such thing" in caplog.text
    answer(engine, prompt_of(100, 3))
    engine.close()
    assert saved_files(tmp_path)


@pytest.mark.parametrize(("free_pages", "n_saved"), [(100, (10,)), (4, (4, 5))])  # and one that is written
def test_a_long_prompt_is_saved_whole_if_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_pages: int, n_saved: tuple[int, ...]
) -> None:
    """A prompt of which only the beginning is kept, as its pages come faster than a disk takes them; and a
    queue that fills the memory."""
    may_write, write = threading.Event(), SavedPrefixes._write

    def slow(self: SavedPrefixes, batch: Any) -> None:
        assert may_write.wait(60)
        write(self, batch)

    monkeypatch.setattr(SavedPrefixes, "_write", slow)
    monkeypatch.setattr(saved_prefixes, "_BATCH", 1)
    monkeypatch.setattr(saved_prefixes, "_LEAST_QUEUED_BYTES", 2 * 1024)
    monkeypatch.setattr(saved_prefixes, "available_bytes", lambda: 4 * free_pages * 1024)
    engine, _ = open_engine(tmp_path)
    answer(engine, prompt_of(160), 2)
    may_write.set()
    engine.close()
    assert len(saved_files(tmp_path)) in n_saved


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Keys and values that another user put there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="must not be writable by other users"):
        open_engine(shared)
    shared.chmod(0o755)
    engine, _ = open_engine(shared)
    prompt = prompt_of(40)
    answer(engine, prompt)
    engine.close()
    for path in saved_files(shared):
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o620)
    engine, _ = open_engine(shared)
    assert answer(engine, prompt).sequence.n_prefix_hit == 0
    engine.close()
    own = tmp_path / "own"
    engine, _ = open_engine(own)
    engine.close()
    assert own.stat().st_mode & 0o777 == 0o700


def test_a_budget_below_a_page_is_refused(tmp_path: Path) -> None:
    """A directory that saves and removes each page at once."""
    with pytest.raises(ConfigError, match="must have room for a page"):
        open_engine(tmp_path, prefix_bytes=1000)


_WRITER = """
import sys
import numpy as np
from kukri.engine.pages import ROOT, page_key
from kukri.engine.saved_prefixes import SavedPrefixes
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.cache import KVLayer
from pathlib import Path
from types import SimpleNamespace

cache = PagedKV([KVLayer(8, 64)] * 4, 2)
saved = SavedPrefixes(cache, Path(sys.argv[1]), 1 << 30)
tokens = np.random.default_rng(int(sys.argv[2])).integers(0, 1000, 16 * 4000).astype(np.int32)
print("ready", flush=True)
key = ROOT
for i in range(4000):
    key = page_key(tokens[16 * i : 16 * (i + 1)], key)
    saved.save(0, key, i)
saved.close()
"""


@pytest.mark.representative(2)
@pytest.mark.parametrize("n_tries", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_whole_pages(tmp_path: Path, n_tries: int) -> None:
    """A page under its final name of which half was written."""
    rng = random.Random(n_tries)
    cache = PagedKV([KVLayer(8, 64)] * 4, 2)
    for i in range(n_tries):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        n_before = len(saved_files(tmp_path))
        while len(saved_files(tmp_path)) == n_before:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    saved = SavedPrefixes(cache, tmp_path, 1 << 30)
    files = saved_files(tmp_path)
    for path in files:
        assert len(list(saved.read([bytes.fromhex(path.stem)], 0))) == 1, path
    saved.close()
    assert files
    assert saved.n_damaged == 0
