"""Blocks of weights to float32, from the facts of their type (`schema.py`), vectorised over blocks.

Bit-exact with GGML's reference (ggml-quants.c, as mirrored by the `gguf` package), whose arithmetic is
float32 throughout. `kukri.kernels.quantize` has the way back. Weights beyond a type's range become infinite,
as in GGML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kukri.errors import ShapeError, UnsupportedError
from kukri.quant import types
from kukri.quant.types import RUN
from kukri.quant.types.schema import Block, Codebook, Numbers, Placement, QuantType, n_numbers

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

_CHUNK_WEIGHTS = 1 << 18  # weights converted at a time: temporaries stay in the cache
# codes of 7 signs, with the eighth that makes their number even
SIGN_CODES = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)


def _bf16_bytes(weights: FloatArray) -> ByteArray:
    """Round to nearest even; NaN stays NaN (made quiet)."""
    bits = weights.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).view(np.uint8)


# float32 [n, 1] -> uint8 [n, bytes of one], of float types: `kernels.cpu.pack.encode` has the others
FLOAT_BYTES: dict[str, Callable[[FloatArray], ByteArray]] = {
    "F32": lambda weights: weights.view(np.uint8),
    "F16": lambda weights: weights.astype(np.float16).view(np.uint8),
    "BF16": _bf16_bytes,
}
_FLOATS: dict[str, Callable[[ByteArray], FloatArray]] = {
    "F32": lambda data: data.view(np.float32),
    "F16": lambda data: data.view(np.float16).astype(np.float32),
    "BF16": lambda data: (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}


def dequantize(data: npt.ArrayLike, type: QuantType) -> FloatArray:
    """The weights of uint8 [rows, row_bytes] -> float32 [rows, columns].

    A view of `data` for F32. Raises ShapeError when a row is not a whole number of blocks, and
    UnsupportedError, listing the types that run, for another.
    """
    if type.block is None and type.name not in _FLOATS:
        raise UnsupportedError(f"the weight type {type.name} is not supported: use {', '.join(RUN)}")
    rows = np.ascontiguousarray(data)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % type.block_bytes:
        raise ShapeError(
            f"{rows.dtype} {rows.shape} is not rows of {type.block_bytes}-byte {type.name} blocks"
        )
    if type.block is None:
        with np.errstate(all="ignore"):
            return _FLOATS[type.name](rows)
    weights = np.empty((rows.shape[0], rows.shape[1] // type.block_bytes * type.block_size), np.float32)
    into = weights.reshape(-1, type.block_size)
    blocks = rows.reshape(-1, type.block_bytes)
    with np.errstate(all="ignore"):
        for part in _chunks(len(blocks), type):
            into[part] = _weights(blocks[part], type.block)
    return weights


def _chunks(n_blocks: int, type: QuantType) -> Iterator[slice]:
    step = max(1, _CHUNK_WEIGHTS // type.block_size)
    return (slice(start, start + step) for start in range(0, n_blocks, step))


def _weights(blocks: ByteArray, block: Block) -> FloatArray:
    """uint8 [n, block_bytes] -> float32 [n, block_size]."""
    quants = block_quants(blocks, block)
    if block.values is None:
        weights = quants.astype(np.float32)
        if block.offset:
            weights -= np.float32(block.offset)
    else:
        weights = np.array(block.values, np.float32)[quants]
    scale = _floats(blocks, block, block.scale, block.scale_values)
    if block.factor != 1:
        scale *= np.float32(block.factor)
    if block.scales:
        scale = scale * (
            numbers(blocks, block, block.scales) * np.float32(block.times) + np.float32(block.plus)
        )
    groups = weights.reshape(*scale.shape, -1)
    groups *= scale[..., None]
    if block.minimum:
        low = _floats(blocks, block, block.minimum, None)
        if block.minimums:
            groups -= (low * numbers(blocks, block, block.minimums))[..., None]
        else:
            groups += low[..., None]
    return weights


def block_quants(blocks: ByteArray, block: Block) -> npt.NDArray[np.integer]:
    """uint8 [n, block_bytes] -> the quants [n, block_size] of 8 bits."""
    found = numbers(blocks, block, block.quant_numbers)
    book = block.quants
    if not isinstance(book, Codebook):
        return found
    quants: ByteArray = book.grid[found].reshape(len(blocks), -1)
    signs = numbers(blocks, block, book.signs)
    if book.has_codes:
        signs = np.unpackbits(SIGN_CODES[signs], axis=1, bitorder="little")
    by_sign = quants.reshape(*signs.shape, -1)
    by_sign |= (signs.astype(np.uint8) * np.uint8(book.sign))[..., None]
    return quants


def _floats(blocks: ByteArray, block: Block, which: Numbers, values: FloatArray | None) -> FloatArray:
    """float32 [n, numbers]: float16 by their bits, or entries of a table."""
    found = numbers(blocks, block, which)
    return found.view(np.float16).astype(np.float32) if values is None else values[found]


def numbers(blocks: ByteArray, block: Block, which: Numbers) -> npt.NDArray[np.integer]:
    """uint8 [n, block_bytes] -> whole numbers [n, numbers], of 8 bits if they fit, else of 16."""
    places = block.places(which)
    if len(places) == 1:
        return _placed_numbers(blocks, places[0])
    is_wide = any(place.left + place.mask.bit_length() > 8 for place in places)
    made = np.zeros((len(blocks), n_numbers(places)), np.uint16 if is_wide else np.uint8)
    for place in places:
        found = _placed_numbers(blocks, place).astype(made.dtype, copy=False)
        found <<= made.dtype.type(place.left)
        made[:, place.first : place.first + place.n] |= found
    return made


def _placed_numbers(blocks: ByteArray, place: Placement) -> npt.NDArray[np.integer]:
    n, width = len(blocks), place.inner * place.unit
    count = place.n_units // place.inner
    if count == 1:
        data = blocks[:, place.at : place.at + width]
    else:  # a field of structs in a row
        places = place.at + np.arange(count)[:, None] * place.stride + np.arange(width)
        data = blocks[:, places.reshape(-1)]
    units = np.ascontiguousarray(data).view(f"<u{place.unit}")
    if place.mask == 0:
        powers = np.array([3**digit for digit in place.shifts], np.uint8)[:, None]
        digits = (units.reshape(n, -1, 1, place.run) * powers).astype(np.uint16) * np.uint16(3) >> np.uint16(
            8
        )
        return digits.astype(np.uint8).reshape(n, -1)
    if place.is_signed:
        return units.view(f"<i{place.unit}")
    if place.mask == (1 << 8 * place.unit) - 1:
        return units
    shifts = np.array(place.shifts, units.dtype)[:, None]
    found = units.reshape(n, -1, 1, place.run) >> shifts
    found &= units.dtype.type(place.mask)
    small = np.uint8 if place.mask < 256 else np.uint16
    narrow: npt.NDArray[np.integer] = found.astype(small, copy=False).reshape(n, -1)
    return narrow


# the types that run, in the order of `RUN`
BLOCKS = RUN
# the types that weights can be converted to; Q8_K is for activations, and no file has it
WRITTEN = (*FLOAT_BYTES, *(type.name for type in types.WRITTEN), "Q8_K")
