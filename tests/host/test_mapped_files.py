"""Which pages of a mapped file are in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.host import mapped_files
from kukri.host.mapped_files import fetch_pages, hold_pages, map_file, release_pages
from kukri.kernels.cpu.run.memory import address_of
from kukri.server.models.warm_up import warm_up
from tests.models.tiny_encoders import save
from tests.test_llm_safetensors import make as make_directory

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident"
)


def resident_kib(path: Path) -> int:
    """Memory that the process has of a file."""
    maps = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(part.split("\nRss:")[1].split()[0]) for part in maps)


@pytest.mark.parametrize("shape", [(1 << 10, 600), (100, 3 * mmap.PAGESIZE + 8)])
def test_file_pages_are_given_back_and_fetched(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Catches memory kept for weights that have been packed, and rows left on the disk."""
    path = tmp_path / "rows"
    rows = np.arange(shape[0] * shape[1], dtype=np.uint32).astype(np.uint8).reshape(shape)
    path.write_bytes(bytes(64) + rows.tobytes())
    view = map_file(path, "test")[64:].reshape(shape)
    n_kib = rows.nbytes // 1024
    np.testing.assert_array_equal(view, rows)
    assert resident_kib(path) >= n_kib
    release_pages(view)
    assert resident_kib(path) < 8 + n_kib // 20
    fetch_pages(view)
    assert resident_kib(path) >= n_kib
    assert address_of(view) % mmap.PAGESIZE == 64
    np.testing.assert_array_equal(view, rows)


@pytest.mark.parametrize("stop", [3 * mmap.PAGESIZE, 3 * mmap.PAGESIZE + 100])
def test_held_pages_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Catches held pages that change or vanish with the file, or are given back, and writes past the end."""
    monkeypatch.setattr(mapped_files, "_HELD_AT_ONCE", mmap.PAGESIZE)
    path = tmp_path / "rows"
    data = np.random.default_rng(0).integers(0, 256, stop, np.uint8)
    path.write_bytes(data.tobytes())
    view = map_file(path, "test")[mmap.PAGESIZE + 10 :]
    hold_pages(view)
    hold_pages(data)  # pages that are not a file's
    path.write_bytes(b"")
    release_pages(view)
    np.testing.assert_array_equal(view, data[mmap.PAGESIZE + 10 :])
    assert not view.flags.writeable


@pytest.mark.parametrize("name", ["llama", "bert", "lfm2", "gpt_oss", "granitemoehybrid", "qwen3_5_text"])
def test_a_served_model_needs_no_file(tmp_path: Path, name: str) -> None:
    """Catches a constant of a plan that is read in the mapped file: a file cut short ends the server."""
    if name == "bert":
        save(tmp_path, name, "Model")
    else:
        make_directory(tmp_path, name)
    with LLM(tmp_path, max_requests=2) as llm:
        warm_up(llm)
        plan = llm.engine.runner.plain.program.plan
        in_files = [array.shape for array in plan._keep if array.nbytes and is_in_file(array, tmp_path)]
        assert len(plan._keep) > 10
        assert in_files == []


def is_in_file(array: np.ndarray, directory: Path) -> bool:
    """True if a part of an array lies in a mapped file of the directory."""
    first = address_of(array)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(address, 16) for address in line.split()[0].split("-"))
        if str(directory) in line and first < stop and start < first + array.nbytes:
            return True
    return False
