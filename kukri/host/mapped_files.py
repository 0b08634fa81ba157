"""Memory-mapped files: opening one, and which of its pages stay in memory."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError


def map_file(path: Path, kind: str) -> npt.NDArray[np.uint8]:
    """A regular file's bytes, uint8 [size], read-only and mapped. `kind` names the format for the errors.

    Raises FormatError for a path that is missing, no regular file, empty or unreadable. The file must not
    shrink while the array is in use.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"is a directory, not a {kind} file", path=path)
        if not stat.S_ISREG(mode):
            raise FormatError("is not a regular file", path=path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError("the file is empty: it was cut short", path=path)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise FormatError("there is no such file", path=path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FormatError(f"cannot be read: {reason}", path=path) from None


def release_pages(array: npt.NDArray[Any]) -> None:
    """Evicts the resident pages of an array that is a view of a mapped file; leaves other arrays alone.

    The contents stay readable: the system fetches them again from the file when needed.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    mapped = np.frombuffer(base, np.uint8)
    address = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    start = address & -mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, address + array.nbytes - start)


def fetch_pages(array: npt.NDArray[Any]) -> None:
    """Makes the pages of a contiguous array resident, also those of a mapped file."""
    array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
