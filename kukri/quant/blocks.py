"""Blocks of weights to float32, a function for each type, vectorised over blocks.

Bit-exact with GGML's reference (ggml-quants.c, as mirrored by the `gguf` package), whose arithmetic is
float32 throughout. `kukri.kernels.cpu.pack.quantize` has the way back.

`d` is a block's float16 scale, `m` its float16 minimum, `q` a quant. Types of 256 weights divide them into
groups g, each with a whole scale s and, with a minimum, a whole t.

In the diagrams `|` parts fields and the number after a field is its bytes. What shares a byte is added up
with its place: `q0 + 16 q16` keeps q0 in the low bits. Where the top bits h of a quant lie apart, q is the
rest of it. Numbers of several bytes are little-endian.

Weights beyond a type's range become infinite, as in GGML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kukri.errors import ShapeError, UnsupportedError
from kukri.quant.types import QuantType

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

_CHUNK_WEIGHTS = 1 << 18  # weights converted at a time: temporaries stay in the cache


def _f32(blocks: ByteArray) -> FloatArray:
    """float32.

    | w: 4 |
    """
    return blocks.view(np.float32)


def _f16(blocks: ByteArray) -> FloatArray:
    """IEEE half precision.

    | w: 2 |
    """
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: ByteArray) -> FloatArray:
    """The upper half of a float32.

    | w: 2 |
    """
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: ByteArray) -> FloatArray:
    """32 weights d * (q - 8), q of 4 bits.

    | d: 2 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    quants = _bit_fields(blocks[:, 2:], 4, run=16).astype(np.float32)
    quants -= 8
    quants *= _half(blocks, 0)
    return quants


def _q4_1(blocks: ByteArray) -> FloatArray:
    """32 weights d * q + m, q of 4 bits.

    | d: 2 | m: 2 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    quants = _bit_fields(blocks[:, 4:], 4, run=16).astype(np.float32)
    quants *= _half(blocks, 0)
    quants += _half(blocks, 2)
    return quants


def _q5_0(blocks: ByteArray) -> FloatArray:
    """32 weights d * (q - 16), q of 5 bits, the top one in h.

    | d: 2 | h0 + 2 h1 + … 2^31 h31: 4 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    quants = _five_bits(blocks[:, 6:], blocks[:, 2:6], run=16, high_run=1)
    quants -= 16
    quants *= _half(blocks, 0)
    return quants


def _q5_1(blocks: ByteArray) -> FloatArray:
    """32 weights d * q + m, q of 5 bits, the top one in h.

    | d: 2 | m: 2 | h0 + 2 h1 + … 2^31 h31: 4 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    quants = _five_bits(blocks[:, 8:], blocks[:, 4:8], run=16, high_run=1)
    quants *= _half(blocks, 0)
    quants += _half(blocks, 2)
    return quants


def _q8_0(blocks: ByteArray) -> FloatArray:
    """32 weights d * q, q of 8 bits, signed.

    | d: 2 | q0, q1, … q31: 32 |
    """
    quants = blocks[:, 2:].view(np.int8).astype(np.float32)
    quants *= _half(blocks, 0)
    return quants


# what the 16 quants of MXFP4 stand for, doubled: floats of 2 exponent bits and 1 of fraction
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: ByteArray) -> FloatArray:
    """32 weights 2^(e - 128) * MXFP4_VALUES[q], q of 4 bits (OCP Microscaling Formats 1.0).

    | e: 1 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    weights = MXFP4_VALUES[_bit_fields(blocks[:, 1:], 4, run=16)]
    exponents = blocks[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)  # below the least normal float32
    weights *= np.where(exponents < 2, small, (exponents - 1) << 23).view(np.float32)
    return weights


def _q2_k(blocks: ByteArray) -> FloatArray:
    """256 weights in 16 groups of 16: d s[g] q - m t[g], q of 2 bits, s and t of 4.

    | s0 + 16 t0, … s15 + 16 t15: 16 | two halves of q0 + 4 q32 + 16 q64 + 64 q96, … q127: 64 | d: 2 | m: 2 |
    """
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    quants = _bit_fields(blocks[:, 16:80], 2, run=32).astype(np.float32)
    groups = quants.reshape(-1, 16, 16)
    groups *= (_half(blocks, 80) * scales)[..., None]
    groups -= (_half(blocks, 82) * minimums)[..., None]
    return quants


def _q3_k(blocks: ByteArray) -> FloatArray:
    """256 weights in 16 groups of 16: d (s[g] - 32) (q - 4), q of 3 bits, s of 6.

    The top bit of q is in h; the low 4 bits of s are a, the top 2 are b.

    | h0 + 2 h32 + … 128 h224, … h255: 32 | two halves of q0 + 4 q32 + 16 q64 + 64 q96, … q127: 64 |
    | a0 + 16 a8, … a7 + 16 a15: 8 | b0 + 4 b4 + 16 b8 + 64 b12, … b15: 4 | d: 2 |
    """
    top_bits = _bit_fields(blocks[:, :32], 1, run=32)
    quants = (_bit_fields(blocks[:, 32:96], 2, run=32) | top_bits << 2).astype(np.float32)
    quants -= 4
    scales = _bit_fields(blocks[:, 96:104], 4, run=8) | _bit_fields(blocks[:, 104:108], 2, run=4) << 4
    groups = quants.reshape(-1, 16, 16)
    groups *= (_half(blocks, 108) * (scales.astype(np.float32) - 32))[..., None]
    return quants


def _q4_k(blocks: ByteArray) -> FloatArray:
    """256 weights in 8 groups of 32: d s[g] q - m t[g], q of 4 bits, s and t of 6.

    The low 4 bits of s4 to s7 are a, of t4 to t7 are b; the top 2 bits of s4 to s7 are u, of t4 to t7 are v.

    | d: 2 | m: 2 | s0 + 64 u4, … s3 + 64 u7: 4 | t0 + 64 v4, … t3 + 64 v7: 4 | a4 + 16 b4, … a7 + 16 b7: 4 |
    | four quarters of q0 + 16 q32, q1 + 16 q33, … q31 + 16 q63: 128 |
    """
    quants = _bit_fields(blocks[:, 16:], 4, run=32).astype(np.float32)
    return _scale_and_shift(quants, blocks)


def _q5_k(blocks: ByteArray) -> FloatArray:
    """256 weights in 8 groups of 32: d s[g] q - m t[g], q of 5 bits, the top one in h.

    | d, m, s and t as in Q4_K: 16 | h0 + 2 h32 + … 128 h224, … h255: 32 |
    | four quarters of q0 + 16 q32, q1 + 16 q33, … q31 + 16 q63: 128 |
    """
    quants = _five_bits(blocks[:, 48:], blocks[:, 16:48], run=32, high_run=32)
    return _scale_and_shift(quants, blocks)


def _q6_k(blocks: ByteArray) -> FloatArray:
    """256 weights in 16 groups of 16: d s[g] (q - 32), q of 6 bits, the top two in h, s of 8, signed.

    | two halves of q0 + 16 q64, q1 + 16 q65, … q63 + 16 q127: 128 |
    | two halves of h0 + 4 h32 + 16 h64 + 64 h96, … h127: 64 | s0, s1, … s15: 16 | d: 2 |
    """
    top_bits = _bit_fields(blocks[:, 128:192], 2, run=32)
    quants = (_bit_fields(blocks[:, :128], 4, run=64) | top_bits << 4).astype(np.float32)
    quants -= 32
    groups = quants.reshape(-1, 16, 16)
    groups *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]
    return quants


# what the 16 quants of IQ4_NL and IQ4_XS stand for: closer together around zero (ggml's kvalues_iq4nl)
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # fmt: skip


def _iq4_nl(blocks: ByteArray) -> FloatArray:
    """32 weights d * IQ4_VALUES[q], q of 4 bits.

    | d: 2 | q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 16 |
    """
    weights = IQ4_VALUES[_bit_fields(blocks[:, 2:], 4, run=16)]
    weights *= _half(blocks, 0)
    return weights


def _iq4_xs(blocks: ByteArray) -> FloatArray:
    """256 weights in 8 groups of 32: d (s[g] - 32) IQ4_VALUES[q], q of 4 bits, s of 6.

    The low 4 bits of s are a, the top 2 are b.

    | d: 2 | b0 + 4 b1 + … 2^14 b7: 2 | a0 + 16 a1, a2 + 16 a3, … a6 + 16 a7: 4 |
    | eight groups of q0 + 16 q16, q1 + 16 q17, … q15 + 16 q31: 128 |
    """
    scales = _bit_fields(blocks[:, 4:8], 4, run=1) | _bit_fields(blocks[:, 2:4], 2, run=1) << 4
    weights = IQ4_VALUES[_bit_fields(blocks[:, 8:], 4, run=16)]
    groups = weights.reshape(-1, 8, 32)
    groups *= (_half(blocks, 0) * (scales.astype(np.float32) - 32))[..., None]
    return weights


def _bf16_bytes(weights: FloatArray) -> ByteArray:
    """Rounded to nearest even; NaN stays NaN (made quiet)."""
    bits = weights.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).view(np.uint8)


# float32 [n, 1] -> uint8 [n, bytes of one], of float types: `kernels.cpu.encode` has the others
FLOAT_BYTES: dict[str, Callable[[FloatArray], ByteArray]] = {
    "F32": lambda weights: weights.view(np.uint8),
    "F16": lambda weights: weights.astype(np.float16).view(np.uint8),
    "BF16": _bf16_bytes,
}

# the types that run, from uint8 [n, block_bytes] to float32 [n, block_size]: every reader of files and the
# reference backend go by this table
BLOCKS: dict[str, Callable[[ByteArray], FloatArray]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "MXFP4": _mxfp4, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
# the types that weights can be converted to; Q8_K is for activations, and no file has it
WRITTEN = (*BLOCKS, "Q8_K")


def dequantize(data: npt.ArrayLike, type: QuantType) -> FloatArray:
    """The weights of uint8 [rows, row_bytes] -> float32 [rows, columns].

    A view of `data` for F32. Raises ShapeError when a row is no whole number of blocks, and UnsupportedError,
    listing the types that run, for another.
    """
    if type.name not in BLOCKS:
        raise UnsupportedError(f"kukri does not run weight type {type.name}: it runs {', '.join(BLOCKS)}")
    rows, convert = np.ascontiguousarray(data), BLOCKS[type.name]
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % type.block_bytes:
        raise ShapeError(
            f"{rows.dtype} {rows.shape} is not rows of {type.block_bytes}-byte {type.name} blocks"
        )
    if type.name == "F32":
        return convert(rows)
    weights = np.empty((rows.shape[0], rows.shape[1] // type.block_bytes * type.block_size), np.float32)
    into = weights.reshape(-1, type.block_size)
    blocks = rows.reshape(-1, type.block_bytes)
    with np.errstate(all="ignore"):
        for part in _chunks(len(blocks), type):
            into[part] = convert(blocks[part])
    return weights


def _chunks(n_blocks: int, type: QuantType) -> Iterator[slice]:
    step = max(1, _CHUNK_WEIGHTS // type.block_size)
    return (slice(start, start + step) for start in range(0, n_blocks, step))


def _half(blocks: ByteArray, at: int) -> FloatArray:
    """The float16 at byte `at` of each block -> float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _bit_fields(packed: ByteArray, n_bits: int, run: int) -> ByteArray:
    """uint8 [n, bytes] -> uint8 [n, bytes * 8 / n_bits]: the fields of `n_bits` that share bytes.

    Of each `run` bytes first the lowest field of every byte, then the next higher one of every byte, …
    """
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts[:, None]
    fields &= np.uint8((1 << n_bits) - 1)
    return fields.reshape(len(packed), -1)


def _five_bits(low: ByteArray, high: ByteArray, run: int, high_run: int) -> FloatArray:
    """Quants of 5 bits, low nibbles and top bits apart -> float32 [n, weights]."""
    quants = _bit_fields(low, 4, run) | _bit_fields(high, 1, high_run) << 4
    return quants.astype(np.float32)


def _scale_and_shift(quants: FloatArray, blocks: ByteArray) -> FloatArray:
    """d s[g] q - m t[g], in place, with the first 16 bytes of a block of Q4_K or Q5_K."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([first & 63, (third & 15) | (first >> 6 << 4)])
    minimums = np.hstack([second & 63, (third >> 4) | (second >> 6 << 4)])
    groups = quants.reshape(-1, 8, 32)
    groups *= (_half(blocks, 0) * scales)[..., None]
    groups -= (_half(blocks, 2) * minimums)[..., None]
    return quants
