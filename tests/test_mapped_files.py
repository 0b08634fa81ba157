"""Which pages of a mapped file are in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kukri.host.mapped_files import fetch_pages, release_pages
from kukri.kernels.cpu.run.memory import address_of

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
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)[64:].reshape(shape)
        n_kib = rows.nbytes // 1024
        np.testing.assert_array_equal(view, rows)
        assert resident_kib(path) >= n_kib
        release_pages(view)
        assert resident_kib(path) < 8 + n_kib // 20
        fetch_pages(view)
        assert resident_kib(path) >= n_kib
        assert address_of(view) % mmap.PAGESIZE == 64
        np.testing.assert_array_equal(view, rows)
        del view
