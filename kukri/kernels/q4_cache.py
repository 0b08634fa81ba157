"""The q4 KV cache as NumPy defines it: heads are rotated, then each is quantized with one scale.

A head's numbers are mixed by a fixed rotation, as in QuaRot (Ashkboos et al. 2024): what was large in one
dimension is spread over all, so 4 bits hold it better. Queries are rotated as keys are, which leaves scores
as they were, and attention's result is rotated back.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray

Q4_BLOCK = 32  # dimensions of which 16 bytes have the first 16 in their low bits and the rest in their high
Q4_SCALES = (8.0, 8.5, 9.0, 9.5, 10.0, 10.5)  # a scale is a head's extreme over one of these, negated
_F16_MAX = np.float32(np.finfo(np.float16).max)


def q4_bytes(d_head: int) -> int:
    """Bytes of one head's 4-bit numbers: those of whole blocks of 32 dimensions."""
    return -(-d_head // Q4_BLOCK) * (Q4_BLOCK // 2)


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


def quantize_heads(x: FloatArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """(bytes [..., q4_bytes(K)], scales [...]) of rotated heads [..., K]; NaN stays in the scale.

    Of the scales tried, that which leaves the least squared error; of equal ones the first.
    """
    low, high = x.min(-1), x.max(-1)
    extreme = np.where(-low >= high, low, high)
    scales: FloatArray = np.zeros_like(extreme)
    numbers, least = np.zeros_like(x), np.full_like(extreme, np.inf)
    for i, divisor in enumerate(Q4_SCALES):
        scale = (extreme / np.float32(-divisor)).clip(-_F16_MAX, _F16_MAX)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
            rounded = np.rint(x * inverse[..., None]).clip(-8, 7)
        error = np.square(x - rounded * scale[..., None]).sum(-1)
        is_better = (error < least) | (i == 0)
        scales, least = np.where(is_better, scale, scales), np.where(is_better, error, least)
        numbers = np.where(is_better[..., None], rounded, numbers)
    nibbles = np.zeros((*x.shape[:-1], 2 * q4_bytes(x.shape[-1])), np.uint8)
    nibbles[..., : x.shape[-1]] = np.nan_to_num(numbers).astype(np.int8).view(np.uint8) & 15
    halves = nibbles.reshape(*x.shape[:-1], -1, 2, Q4_BLOCK // 2)
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed.reshape(*x.shape[:-1], -1), scales.astype(np.float16)


def unpack_heads(packed: npt.NDArray[np.uint8], d_head: int) -> npt.NDArray[np.int8]:
    """The numbers [..., K], -8 to 7, of bytes [..., q4_bytes(K)]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 1, Q4_BLOCK // 2)
    nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=-2).reshape(*packed.shape[:-1], -1)
    return (nibbles[..., :d_head] ^ 8).view(np.int8) - np.int8(8)
