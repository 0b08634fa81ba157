"""Memory-mapped files: opening one, and which of its pages stay in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, MissingFileError
from kukri.host.os_calls import c_library

_MAP_FIXED = 0x10  # on Linux and macOS; Python does not name it
_HELD_AT_ONCE = 16 << 20  # bytes that lie in memory twice meanwhile


class _Mapping(mmap.mmap):
    """A mapped file, and the byte ranges that were copied to this process' own memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.held: list[tuple[int, int]] = []


def map_file(path: Path, kind: str) -> npt.NDArray[np.uint8]:
    """A regular file's bytes, uint8 [size], read-only and mapped. `kind` names the format for the errors.

    Raises FormatError for a path that is missing, no regular file, empty or unreadable. The file must not
    shrink while the array is in use, but for what `hold_pages` has copied.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"is a directory, not a {kind} file", path=path)
        if not stat.S_ISREG(mode):
            raise FormatError("must be a regular file", path=path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError("is empty: it was cut short", path=path)
            return np.frombuffer(_Mapping(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise MissingFileError("was not found", path=path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FormatError(f"cannot be read: {reason}", path=path) from None


def release_pages(array: npt.NDArray[Any]) -> None:
    """Evicts the resident pages of an array that is a view of a mapped file; leaves other arrays alone.

    The contents stay readable: the system fetches them again from the file when needed.
    """
    found = _pages(array)
    if found is None or sys.platform == "win32":
        return
    mapping, _, start, stop = found
    if all(stop <= held_start or held_stop <= start for held_start, held_stop in mapping.held):
        mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def hold_pages(array: npt.NDArray[Any]) -> None:
    """Copies the pages of an array that is a view of a mapped file to memory of this process, in place.

    After that the file may shrink or be overwritten. Other arrays are left alone, and so are all on systems
    that forbid writing to a mapped file (Windows). No other thread may read the pages meanwhile. Raises
    OSError without memory.
    """
    found = _pages(array)
    if found is None or sys.platform == "win32":
        return
    mapping, address, start, stop = found
    libc = c_library()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for first in range(start, stop, _HELD_AT_ONCE):
        n_bytes, place = min(_HELD_AT_ONCE, stop - first), address + first
        contents = mapping[first : first + n_bytes]
        if libc.mmap(place, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != place:
            raise OSError(ctypes.get_errno(), "a mapped file cannot be copied to memory")
        ctypes.memmove(place, contents, n_bytes)
        libc.mprotect(place, n_bytes, mmap.PROT_READ)
    mapping.held.append((start, stop))


def _pages(array: npt.NDArray[Any]) -> tuple[_Mapping, int, int, int] | None:
    """The mapped file that an array is a view of, its address, and where the array's pages start and end."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, _Mapping) or not array.nbytes:
        return None
    address = int(np.frombuffer(base, np.uint8).__array_interface__["data"][0])
    offset = int(array.__array_interface__["data"][0]) - address
    end = -(-(offset + array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return base, address, offset & -mmap.PAGESIZE, min(end, len(base))


def fetch_pages(array: npt.NDArray[Any]) -> None:
    """Makes the pages of a contiguous array resident, also those of a mapped file."""
    array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
