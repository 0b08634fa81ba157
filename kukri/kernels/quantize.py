"""Rows of weights of one type as rows of another, by compiled quantizers (`encode.py`) on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, ShapeError, UnsupportedError
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.run.memory import address_of
from kukri.quant.blocks import FLOAT_BYTES, WRITTEN, ByteArray, FloatArray, dequantize
from kukri.quant.types import QUANT_TYPES, QuantType

_CHUNK_WEIGHTS = 1 << 18  # weights converted at a time: temporaries stay in the cache


def quantize(
    weights: npt.ArrayLike, type: QuantType, importance: npt.NDArray[np.float32] | None = None
) -> ByteArray:
    """The blocks of float32 [rows, columns] -> uint8 [rows, row_bytes]; see `requantize`."""
    rows = np.ascontiguousarray(weights, np.float32)
    if rows.ndim != 2:
        raise ShapeError(f"rows of weights must not have shape {rows.shape}")
    return requantize(rows.view(np.uint8), QUANT_TYPES["F32"], type, importance)


def requantize(
    data: ByteArray,
    source: QuantType,
    target: QuantType,
    importance: npt.NDArray[np.float32] | None = None,
    *,
    tensor: str | None = None,
) -> ByteArray:
    """Rows of blocks of one type as rows of another: uint8 [rows, row_bytes], a view if nothing changes.

    Runs on all cores, and holds few of the weights as floats at a time. `importance`, float32 [columns],
    says how much an error in each column counts, to all types but Q8_0. Raises
    UnsupportedError for types without a quantizer, ShapeError when a row is not a whole number of blocks, and
    FormatError, which names `tensor`, for weights that are NaN or infinite if blocks cannot hold them.
    """
    if source == target:
        return data
    write = _writer(target)
    n_columns = data.shape[1] // source.block_bytes * source.block_size
    if n_columns % target.block_size:
        raise ShapeError(f"{n_columns} columns must be a multiple of {target.block_size} for {target.name}")
    if importance is None:
        importance = np.zeros(0, np.float32)
    elif importance.shape != (n_columns,):
        raise ShapeError(f"importances must be of {n_columns} columns, not of shape {importance.shape}")
    importance = np.ascontiguousarray(importance, np.float32)
    into = np.empty((len(data), target.row_bytes(n_columns)), np.uint8)
    step = max(1, _CHUNK_WEIGHTS // n_columns)
    parts = [slice(start, start + step) for start in range(0, len(data), step)]

    def convert(part: slice) -> None:
        weights = dequantize(data[part], source)
        if target.block_size > 1 and not np.isfinite(weights).all():
            raise FormatError(f"must not hold NaN or infinite weights for {target.name}", tensor=tensor)
        write(weights, importance, into[part])

    _on_all_cores(convert, parts)
    return into


def _on_all_cores(work: Callable[[slice], None], parts: list[slice]) -> None:
    """Calls `work` with each part. An exception from it, and Ctrl-C, ends the rest."""
    if len(parts) == 1:
        return work(parts[0])
    pool = ThreadPoolExecutor(usable_cores())
    try:
        for _ in pool.map(work, parts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _writer(type: QuantType) -> Callable[[FloatArray, FloatArray, ByteArray], None]:
    """A function that fills its third argument with the blocks of the first."""
    if type.name not in WRITTEN:
        raise UnsupportedError(f"quantizing to {type.name} is not supported: use one of {', '.join(WRITTEN)}")
    if type.block_size > 1:
        return _encoder(type.name)
    to_bytes = FLOAT_BYTES[type.name]

    def write(weights: FloatArray, importance: FloatArray, into: ByteArray) -> None:
        with np.errstate(all="ignore"):
            into[:] = to_bytes(weights.reshape(-1, 1)).reshape(into.shape)

    return write


_KERNELS, _KERNELS_LOCK = KernelLibrary(), Lock()


def _encoder(type_name: str) -> Callable[[FloatArray, FloatArray, ByteArray], None]:
    """The compiled writer of a block type; holds no lock, so that threads may call it."""
    with _KERNELS_LOCK:
        kernel = _KERNELS[f"encode_{type_name}"]

    def write(weights: FloatArray, importance: FloatArray, into: ByteArray) -> None:
        for array in (weights, importance, into):
            assert array.flags.c_contiguous
        kernel(
            0,
            rows=address_of(weights),
            n_rows=weights.shape[0],
            n_columns=weights.shape[1],
            importance=address_of(importance),
            n_importance=len(importance),
            into=address_of(into),
            row_bytes=into.shape[1],
        )

    return write
