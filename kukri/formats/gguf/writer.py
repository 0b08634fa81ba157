"""Writes GGUF files: `kukri.formats.gguf.reader` has the layout."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, brief
from kukri.formats.gguf.reader import (
    ARRAY_ID,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    NUMBER_IDS,
    STRING_ID,
    aligned,
    alignment_of,
    impossible_shape,
    n_bytes_of,
)
from kukri.formats.unfinished import unfinished
from kukri.quant.types import QuantType

# The source of a tensor: type, data (or a function that makes it when its turn comes), shape.
TensorData = npt.NDArray[Any] | Callable[[], npt.NDArray[Any]]
TensorSource = tuple[QuantType, TensorData, tuple[int, ...]]


def write_gguf(
    path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Mapping[str, TensorSource]
) -> None:
    """Writes a GGUF file, version 3; it appears under `path` complete or not at all.

    Metadata values: str, bool, int (u32 if it fits, else i32, u64 or i64), float (f32), NumPy scalars
    of the type wanted, lists of these, 1-D arrays. Tensor data is uint8 [rows, row_bytes] or the type's
    own NumPy dtype; functions that make it are called one at a time. Raises FormatError for what
    GGUF cannot hold.
    """
    target = Path(path)
    alignment = alignment_of(metadata, target)
    try:
        with unfinished(target) as path, open(path, "wb") as file:
            file.write(_encode_header(metadata, tensors, alignment))
            for name, (weight_type, data, shape) in tensors.items():
                _pad(file, alignment)
                _write_tensor(file, name, weight_type, data() if callable(data) else data, shape)
            _pad(file, alignment)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror}", path=target) from None


def _encode_header(metadata: Mapping[str, Any], tensors: Mapping[str, TensorSource], alignment: int) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_encode_text(key, MAX_KEY_BYTES), *_encode_value(key, value)]
    offset = 0
    for name, (weight_type, _, shape) in tensors.items():
        if reason := impossible_shape(weight_type, shape):
            raise FormatError(reason, tensor=name)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_encode_text(name, MAX_NAME_BYTES), dims, struct.pack("<IQ", weight_type.ggml_id, offset)]
        offset = aligned(offset + n_bytes_of(weight_type, shape), alignment)
    return b"".join(parts)


def _encode_text(text: str, max_bytes: int | None = None) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"text {brief(text)} must not hold lone surrogates") from None
    if max_bytes is not None and len(encoded) > max_bytes:
        raise FormatError(f"name {brief(text)} must be at most {max_bytes} bytes")
    return struct.pack("<Q", len(encoded)) + encoded


def _encode_value(key: str, value: Any) -> list[bytes]:
    if isinstance(value, str):
        return [struct.pack("<I", STRING_ID), _encode_text(value)]
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return [struct.pack("<IIQ", ARRAY_ID, STRING_ID, len(value)), *map(_encode_text, value)]
    numbers = value if isinstance(value, np.ndarray | np.generic) else _as_numbers(key, value)
    number_id = NUMBER_IDS.get(numbers.dtype)
    if number_id is None or numbers.ndim > 1:
        raise FormatError(f"key {key!r}: GGUF cannot hold {brief(value)}")
    if numbers.ndim == 0:
        return [struct.pack("<I", number_id), numbers.tobytes()]
    return [struct.pack("<IIQ", ARRAY_ID, number_id, numbers.size), numbers.tobytes()]


def _as_numbers(key: str, value: Any) -> npt.NDArray[Any]:
    """Python numbers as the type that other readers expect: 32 bits if they fit."""
    try:
        numbers = np.asarray(value)
    except (ValueError, OverflowError):
        raise FormatError(f"key {key!r}: GGUF cannot hold {brief(value)}") from None
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float32)
    if numbers.dtype.kind in "iu" and numbers.size:
        low, high = int(numbers.min()), int(numbers.max())
        scalar = (np.uint32, np.int32, np.uint64, np.int64)
        for dtype in (np.int32, np.uint32, np.int64, np.uint64) if numbers.ndim else scalar:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return numbers.astype(dtype)
    return numbers


def _write_tensor(
    file: BinaryIO, name: str, type: QuantType, data: npt.NDArray[Any], shape: tuple[int, ...]
) -> None:
    own_dtype = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}.get(type.name)
    if data.dtype != np.uint8 and data.dtype != own_dtype:
        raise FormatError(f"{data.dtype} data cannot be written as {type.name}", tensor=name)
    if data.nbytes != n_bytes_of(type, shape):
        message = f"{data.nbytes} bytes of data for shape {shape}, which takes {n_bytes_of(type, shape)}"
        raise FormatError(message, tensor=name)
    file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(b"\0" * (-file.tell() % alignment))
