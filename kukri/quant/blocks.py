"""Blocks of weights to float32 and back, one class per type, vectorised over blocks.

Bit-exact with GGML's reference quantizers (ggml-quants.c, as mirrored by the `gguf` package), whose
arithmetic is float32 throughout. `d` is a block's float16 scale, `m` its float16 minimum, `q` a quant.
Weights beyond a type's range become infinite, as in GGML.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import ShapeError, UnsupportedError
from kukri.quant.types import QUANT_TYPES, QuantType

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

_CHUNK_WEIGHTS = 1 << 18  # weights converted at a time: temporaries stay in the cache


class BlockFormat:
    """How one weight type stores a block. Subclasses convert contiguous arrays of blocks."""

    def __init__(self, name: str) -> None:
        self.type: QuantType = QUANT_TYPES[name]

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, block_bytes] -> float32 [n, block_size]."""
        raise NotImplementedError

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, block_size] -> uint8 [n, block_bytes]."""
        raise NotImplementedError


class F32(BlockFormat):
    """float32.

    | w: 4 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 4] -> float32 [n, 1], a view."""
        return blocks.view(np.float32)

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 1] -> uint8 [n, 4], a view."""
        return weights.view(np.uint8)


class F16(BlockFormat):
    """IEEE half precision.

    | w: 2 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 2] -> float32 [n, 1]."""
        return blocks.view(np.float16).astype(np.float32)

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 1] -> uint8 [n, 2], rounded to nearest even."""
        return weights.astype(np.float16).view(np.uint8)


class BF16(BlockFormat):
    """The upper half of a float32.

    | w: 2 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 2] -> float32 [n, 1]."""
        return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 1] -> uint8 [n, 2], rounded to nearest even; NaN stays NaN (made quiet)."""
        bits = weights.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        quiet_nan = (bits >> 16) | np.uint32(0x40)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).view(np.uint8)


class Q4_0(BlockFormat):
    """32 weights d * (q - 8), q of 4 bits.

    | d: 2 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 18] -> float32 [n, 32]."""
        quants = _unpack_nibbles(blocks[:, 2:])
        quants -= 8
        quants *= _half(blocks, 0)
        return quants

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 32] -> uint8 [n, 18]. The weight of largest size becomes q = 0."""
        largest = np.take_along_axis(weights, np.abs(weights).argmax(axis=1, keepdims=True), axis=1)
        scale = largest / np.float32(-8)
        quants = weights * _inverse(scale) + np.float32(8.5)
        return np.hstack([_half_bytes(scale), _pack_nibbles(quants)])


class Q4_1(BlockFormat):
    """32 weights d * q + m, q of 4 bits.

    | d: 2 | m: 2 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 20] -> float32 [n, 32]."""
        quants = _unpack_nibbles(blocks[:, 4:])
        quants *= _half(blocks, 0)
        quants += _half(blocks, 2)
        return quants

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 32] -> uint8 [n, 20]. The smallest weight becomes q = 0, the largest q = 15."""
        minimum = weights.min(axis=1, keepdims=True)
        scale = (weights.max(axis=1, keepdims=True) - minimum) / np.float32(15)
        quants = (weights - minimum) * _inverse(scale) + np.float32(0.5)
        return np.hstack([_half_bytes(scale), _half_bytes(minimum), _pack_nibbles(quants)])


class Q8_0(BlockFormat):
    """32 weights d * q, q of 8 bits, signed.

    | d: 2 | q0, q1, … q31: 32 |
    """

    def dequantize_blocks(self, blocks: ByteArray) -> FloatArray:
        """uint8 [n, 34] -> float32 [n, 32]."""
        quants = blocks[:, 2:].view(np.int8).astype(np.float32)
        quants *= _half(blocks, 0)
        return quants

    def quantize_blocks(self, weights: FloatArray) -> ByteArray:
        """float32 [n, 32] -> uint8 [n, 34]. Ties round away from zero."""
        scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
        quants = weights * _inverse(scale)
        whole = np.trunc(quants)
        whole += np.trunc(2 * (quants - whole))
        return np.hstack([_half_bytes(scale), whole.astype(np.int8).view(np.uint8)])


BLOCKS: dict[str, BlockFormat] = {
    "F32": F32("F32"),
    "F16": F16("F16"),
    "BF16": BF16("BF16"),
    "Q4_0": Q4_0("Q4_0"),
    "Q4_1": Q4_1("Q4_1"),
    "Q8_0": Q8_0("Q8_0"),
}


def block_format(type: QuantType) -> BlockFormat:
    """The format of a weight type. Raises UnsupportedError listing those there are."""
    if type.name not in BLOCKS:
        raise UnsupportedError(f"weight type {type.name} is not supported: use one of {', '.join(BLOCKS)}")
    return BLOCKS[type.name]


def dequantize(data: npt.ArrayLike, type: QuantType) -> FloatArray:
    """The weights of uint8 [rows, row_bytes] -> float32 [rows, columns].

    A view of `data` for F32. Raises ShapeError when a row is no whole number of blocks.
    """
    rows, form = np.ascontiguousarray(data), block_format(type)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % type.block_bytes:
        raise ShapeError(
            f"{rows.dtype} {rows.shape} is not rows of {type.block_bytes}-byte {type.name} blocks"
        )
    if type.name == "F32":
        return form.dequantize_blocks(rows)
    weights = np.empty((rows.shape[0], rows.shape[1] // type.block_bytes * type.block_size), np.float32)
    into = weights.reshape(-1, type.block_size)
    blocks = rows.reshape(-1, type.block_bytes)
    with np.errstate(all="ignore"):
        for part in _chunks(len(blocks), type):
            into[part] = form.dequantize_blocks(blocks[part])
    return weights


def quantize(weights: npt.ArrayLike, type: QuantType) -> ByteArray:
    """The blocks of float32 [rows, columns] -> uint8 [rows, row_bytes].

    A view of `weights` for F32. Raises ShapeError when a row is no whole number of blocks.
    """
    rows, form = np.ascontiguousarray(weights, np.float32), block_format(type)
    if rows.ndim != 2 or rows.shape[1] % type.block_size:
        raise ShapeError(f"shape {rows.shape} is not rows of {type.block_size}-weight {type.name} blocks")
    if type.name == "F32":
        return form.quantize_blocks(rows)
    data = np.empty((rows.shape[0], type.row_bytes(rows.shape[1])), np.uint8)
    into = data.reshape(-1, type.block_bytes)
    blocks = rows.reshape(-1, type.block_size)
    with np.errstate(all="ignore"):
        for part in _chunks(len(blocks), type):
            into[part] = form.quantize_blocks(blocks[part])
    return data


def _chunks(n_blocks: int, type: QuantType) -> Iterator[slice]:
    step = max(1, _CHUNK_WEIGHTS // type.block_size)
    return (slice(start, start + step) for start in range(0, n_blocks, step))


def _half(blocks: ByteArray, at: int) -> FloatArray:
    """The float16 at byte `at` of each block -> float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _half_bytes(values: FloatArray) -> ByteArray:
    """float32 [n, 1] -> float16 as uint8 [n, 2]."""
    return values.astype(np.float16).view(np.uint8)


def _inverse(scale: FloatArray) -> FloatArray:
    """1 / scale, and 0 where the scale is 0 or so small that its inverse overflows (undefined in GGML)."""
    inverse = np.float32(1) / scale
    overflows = np.isinf(inverse)
    return np.where(overflows, np.float32(0), inverse)


def _unpack_nibbles(packed: npt.NDArray[Any]) -> FloatArray:
    """uint8 [n, 16] -> float32 [n, 32]: low nibbles first, then high ones."""
    return np.hstack([packed & 15, packed >> 4]).astype(np.float32)


def _pack_nibbles(quants: FloatArray) -> ByteArray:
    """float32 [n, 32] from 0 -> uint8 [n, 16]: truncated, clipped to 15, first half in the low nibbles."""
    whole = np.minimum(quants.astype(np.uint8), np.uint8(15))
    packed: ByteArray = whole[:, :16] | whole[:, 16:] << np.uint8(4)
    return packed
