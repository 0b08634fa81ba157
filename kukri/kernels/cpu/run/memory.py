"""Buffers that kernels read by address: 64-byte aligned, and taken from the system only when touched."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels.arrays import ByteArray

_ALIGNMENT = 64


def aligned_zeros(n_bytes: int) -> ByteArray:
    """uint8 [n_bytes] of zeros at a 64-byte boundary; memory is committed as it is written."""
    data = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -address_of(data) % _ALIGNMENT
    return data[start : start + n_bytes]


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])
