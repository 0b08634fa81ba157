"""Buffers that kernels read by address: 64-byte aligned, and taken from the system only when touched."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from kukri.kernels.types import ByteArray

_ALIGNMENT = 64


def aligned_zeros(n_bytes: int) -> ByteArray:
    """uint8 [n_bytes] of zeros at a 64-byte boundary; memory is committed as it is written."""
    data = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -address_of(data) % _ALIGNMENT
    return data[start : start + n_bytes]


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def forget_file_pages(array: np.ndarray[Any, Any]) -> None:
    """Gives back the resident pages of an array that is a view of a mapped file; others are left alone.

    The contents stay readable: the system fetches them again from the file when needed.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = address_of(array) & -mmap.PAGESIZE
    n_bytes = address_of(array) + array.nbytes - start
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), ctypes.c_int(mmap.MADV_DONTNEED))


def fetch_file_pages(array: np.ndarray[Any, Any]) -> None:
    """Makes the pages of a contiguous array resident, also those of a mapped file."""
    array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
