"""The types of KV caches as NumPy defines them: how a head is stored, and how it is read.

The heads of q4 are rotated before: a fixed rotation mixes their numbers, as in QuaRot (Ashkboos et al. 2024),
so large numbers of one dimension are spread over all dimensions, and 4 bits hold them better. Queries are
rotated as keys are, which leaves scores as they were, and attention's result is rotated back.

Types of few bits (`has_range`) keep keys by their `KeyRange`, if a layer has one, before all else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import KVType
from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray

KV_BLOCK = 32  # dimensions that share a scale in a q8_0 cache
Q4_BLOCK = 32  # dimensions of which 16 bytes have the first 16 in their low bits and the rest in their high
Q4_SCALES = (8.0, 8.5, 9.0, 9.5, 10.0, 10.5)  # a scale is a head's extreme over one of these, negated
_F16_MAX = np.float32(np.finfo(np.float16).max)

Numbers = npt.NDArray[Any]
Scales = npt.NDArray[np.float16] | None


@dataclass(frozen=True)
class KVNumbers:
    """How a type of cache keeps a head of K dimensions: `width(K)` numbers, and `n_scales(K)` float16 scales.

    `encode` makes (numbers [..., width], scales [..., n_scales] or None) of float32 [..., K], clamped to the
    range of the numbers; NaN stays, so that its request fails and no other sees it. `decode(numbers, scales,
    K)` gives float32 back. Both are None if no host keeps such a cache.
    """

    dtype: npt.DTypeLike
    encode: Callable[[FloatArray], tuple[Numbers, Scales]] | None
    decode: Callable[[Numbers, Scales, int], FloatArray] | None
    width: Callable[[int], int] = lambda d_head: d_head
    n_scales: Callable[[int], int] = lambda d_head: 0
    is_rotated: bool = False  # clamped to float16 and rotated before: see `rotate_heads`
    has_range: bool = False  # keys are kept by their `KeyRange`


def within_range(q: Any, k: Any, middle: Any, reach: Any) -> tuple[Any, Any]:
    """(q [T, G, H/G, K], k [T, G, K]) as types of few bits keep them by a `KeyRange`, [G, K] each.

    Arrays or tensors.
    """
    return q * reach[:, None], (k - middle) / reach


def rotated_run(d_head: int) -> int:
    """Neighbouring dimensions of a head that a Hadamard matrix mixes: the largest power of two in it."""
    return d_head & -d_head


def rotate_heads(x: FloatArray) -> FloatArray:
    """Heads [..., K] rotated; done twice, it gives x again.

    Runs of 2^n dimensions are multiplied by the Hadamard matrix of that size. If a head has m > 1 of them,
    numbers at the same place of each are then reflected: 2 / m of their sum is taken from each.
    """
    d_head = x.shape[-1]
    size = rotated_run(d_head)
    y, distance = x, 1
    while distance < size:
        pairs = y.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2)
        distance *= 2
    runs = y.reshape(*x.shape[:-1], -1, size) * np.float32(size**-0.5)
    n = d_head // size
    if n > 1:
        total = reduce(np.add, (runs[..., i, :] for i in range(n)))
        runs = runs - (total * np.float32(2 / n))[..., None, :]
    return runs.reshape(x.shape)


def q4_bytes(d_head: int) -> int:
    """Return the bytes of one head's 4-bit numbers, which are stored in whole blocks of 32 dimensions."""
    return -(-d_head // Q4_BLOCK) * (Q4_BLOCK // 2)


def encode_q4(x: FloatArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """(bytes [..., q4_bytes(K)], scales [..., 1]) of rotated heads [..., K].

    Of the scales tried, that which leaves the least squared error; of equal ones the first.
    """
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    extreme = np.where(-low >= high, low, high)
    scales: FloatArray = np.zeros_like(extreme)
    numbers, least = np.zeros_like(x), np.full_like(extreme, np.inf)
    for i, divisor in enumerate(Q4_SCALES):
        scale = (extreme / np.float32(-divisor)).clip(-_F16_MAX, _F16_MAX)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
            rounded = np.rint(x * inverse).clip(-8, 7)
        error = np.square(x - rounded * scale).sum(-1, keepdims=True)
        is_better = (error < least) | (i == 0)
        scales, least = np.where(is_better, scale, scales), np.where(is_better, error, least)
        numbers = np.where(is_better, rounded, numbers)
    nibbles = np.zeros((*x.shape[:-1], 2 * q4_bytes(x.shape[-1])), np.uint8)
    nibbles[..., : x.shape[-1]] = np.nan_to_num(numbers).astype(np.int8).view(np.uint8) & 15
    halves = nibbles.reshape(*x.shape[:-1], -1, 2, Q4_BLOCK // 2)
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed.reshape(*x.shape[:-1], -1), scales.astype(np.float16)


def unpack_q4(packed: npt.NDArray[np.uint8], d_head: int) -> npt.NDArray[np.int8]:
    """The numbers [..., K], -8 to 7, of bytes [..., q4_bytes(K)]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 1, Q4_BLOCK // 2)
    nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=-2).reshape(*packed.shape[:-1], -1)
    return (nibbles[..., :d_head] ^ 8).view(np.int8) - np.int8(8)


def _decode_q4(packed: Numbers, scales: Scales, d_head: int) -> FloatArray:
    assert scales is not None
    return unpack_q4(packed, d_head).astype(np.float32) * scales.astype(np.float32)


def _q8_0_scales(d_head: int) -> int:
    if d_head % KV_BLOCK:
        raise UnsupportedError(f"a q8_0 KV cache requires heads of a multiple of {KV_BLOCK}, not {d_head}")
    return d_head // KV_BLOCK


def _encode_q8_0(x: FloatArray) -> tuple[Numbers, Scales]:
    blocks = x.clip(-_F16_MAX, _F16_MAX).reshape(*x.shape[:-1], -1, KV_BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        quants = np.nan_to_num(np.rint(blocks * inverse)).astype(np.int8)
    return quants.reshape(x.shape), (largest[..., 0] / np.float32(127)).astype(np.float16)


def _decode_q8_0(quants: Numbers, scales: Scales, d_head: int) -> FloatArray:
    assert scales is not None
    return quants * np.repeat(scales.astype(np.float32), KV_BLOCK, axis=-1)


def _floats(dtype: type[np.floating[Any]]) -> KVNumbers:
    """Floats that are kept as they are, rounded to `dtype`."""
    limit = np.float32(np.finfo(dtype).max)

    def encode(x: FloatArray) -> tuple[Numbers, Scales]:
        return x.clip(-limit, limit).astype(dtype), None

    return KVNumbers(dtype, encode, lambda x, scales, d_head: x.astype(np.float32))


KV_TYPES: dict[KVType, KVNumbers] = {
    "f16": _floats(np.float16),
    "q8_0": KVNumbers(np.int8, _encode_q8_0, _decode_q8_0, n_scales=_q8_0_scales, has_range=True),
    "q4": KVNumbers(
        np.uint8, encode_q4, _decode_q4, q4_bytes, lambda d_head: 1, is_rotated=True, has_range=True
    ),
    "fp8": KVNumbers(np.uint8, None, None, has_range=True),  # e4m3, beyond 448 clamped
    "f32": _floats(np.float32),
}
