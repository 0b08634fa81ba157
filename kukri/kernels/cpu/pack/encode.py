"""Quantizer kernels: rows of float32 to blocks, `encode_TYPE` for each weight type.

A kernel encodes whole rows on one thread; `quantize.py` runs it on parts of a matrix. Layouts
of blocks are those of `kukri.quant.blocks`. Memory comes as NumPy arrays here, without bounds checks.

Q4_0 to Q8_0 and Q8_K round exactly as GGML's reference does, but for Q4_0 to Q5_1 with importances. The
others search for scales (`scale_search.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kukri.kernels.cpu.compile.kernel_cache import KernelSource
from kukri.kernels.cpu.kernels.intrinsics import array_at, stack_bytes
from kukri.kernels.cpu.pack.scale_search import (
    BOUNDS,
    EXACT,
    HALF,
    ONE,
    SEARCH,
    VALUES,
    ZERO,
    affine_block,
    extreme_of,
    fit_affine,
    fit_symmetric,
    half_bits,
    inverted,
    rounded,
    symmetric_block,
    table_block,
    weigh,
)

_floats, _bytes = array_at(types.float32, 1), array_at(types.uint8, 1)
_rows, _byte_rows = array_at(types.float32, 2), array_at(types.uint8, 2)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # of MXFP4


@njit(**EXACT)
def _put_half(block, at, value):
    bits = half_bits(value)
    block[at], block[at + 1] = bits & 255, bits >> 8


@njit(**EXACT)
def _put_five_bits(block, high, low, q):
    """32 quants of 5 bits: the top ones from byte `high`, the others as nibbles from byte `low`."""
    for i in range(4):
        bits = 0
        for j in range(8):
            bits |= (q[8 * i + j] >> 4) << j
        block[high + i] = bits
    for i in range(16):
        block[low + i] = (q[i] & 15) | (q[i + 16] & 15) << 4


@njit(**EXACT)
def _encode_0(rows, importance, into, most, block_bytes):
    """Q4_0 and Q5_0: the weight of largest size becomes q = 0; `most` is the largest quant.

    With importances the scale is looked for.
    """
    middle = np.float32((most + 1) // 2)
    q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, block_bytes * b : block_bytes * (b + 1)]
            scale = extreme_of(x) / -middle
            if len(importance):
                weigh(x, importance, 32 * b, 32, w)
                scale = rounded(fit_symmetric(x, w, (most + 1) // 2))
            inverse = inverted(scale)
            for i in range(32):
                q[i] = max(0, min(np.int32(x[i] * inverse + (middle + HALF)), most))
            _put_half(block, 0, scale)
            _put_quants(block, 2, q, most)


@njit(**EXACT)
def _encode_1(rows, importance, into, most, block_bytes):
    """Q4_1 and Q5_1: the smallest weight becomes q = 0, the largest `most`.

    With importances scale and minimum are looked for.
    """
    q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, block_bytes * b : block_bytes * (b + 1)]
            least, largest = x[0], x[0]
            for i in range(32):
                least, largest = min(least, x[i]), max(largest, x[i])
            scale = (largest - least) / np.float32(most)
            if len(importance):
                weigh(x, importance, 32 * b, 32, w)
                scale, minimum = fit_affine(x, w, most, -0.9, 0.1, 19)
                scale, least = rounded(scale), -rounded(minimum)
            inverse = inverted(scale)
            for i in range(32):
                q[i] = max(0, min(np.int32((x[i] - least) * inverse + HALF), most))
            _put_half(block, 0, scale)
            _put_half(block, 2, least)
            _put_quants(block, 4, q, most)


@njit(**EXACT)
def _put_quants(block, at, q, most):
    if most == 15:
        for i in range(16):
            block[at + i] = q[i] | q[i + 16] << 4
    else:
        _put_five_bits(block, at, at + 4, q)


@njit(**EXACT)
def _encode_q8_0(rows, importance, into):
    """Blocks of Q8_0. Ties round away from zero."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, 34 * b : 34 * b + 34]
            size = ZERO
            for i in range(32):
                size = max(size, abs(x[i]))
            scale = size / np.float32(127)
            inverse = inverted(scale)
            for i in range(32):
                value = x[i] * inverse
                whole = np.trunc(value)
                block[2 + i] = np.int32(whole + np.trunc((value - whole) * np.float32(2))) & 255
            _put_half(block, 0, scale)


@njit(**EXACT)
def _encode_q8_k(rows, importance, into):
    """Blocks of Q8_K: a float32 scale, 256 signed bytes, and the sums of each 16."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, 292 * b : 292 * b + 292]
            block[:] = 0
            extreme = extreme_of(x)
            if extreme == 0:
                continue
            inverse = np.float32(-127) / extreme
            bits = np.int64(np.float32(ONE / inverse).view(np.uint32))
            for i in range(4):
                block[i] = (bits >> (8 * i)) & 255
            for g in range(16):
                total = 0
                for i in range(16 * g, 16 * g + 16):
                    q = min(127, np.int32(np.rint(x[i] * inverse)))
                    block[4 + i] = q & 255
                    total += q
                block[260 + 2 * g], block[261 + 2 * g] = total & 255, (total >> 8) & 255


@njit(**SEARCH)
def _put_six_bit_scales(block, s, t):
    """The 8 scales and 8 minimums of Q4_K and Q5_K: bytes 4 to 15 of a block."""
    for g in range(4):
        low_s, low_t = np.uint8(s[g]), np.uint8(t[g])
        high_s, high_t = np.uint8(s[g + 4]), np.uint8(t[g + 4])
        block[4 + g] = low_s | (high_s >> 4) << 6
        block[8 + g] = low_t | (high_t >> 4) << 6
        block[12 + g] = (high_s & 15) | (high_t & 15) << 4


@njit(**SEARCH)
def _encode_affine(rows, importance, into, group, most, steps, scale_most, block_bytes):
    """Q2_K, Q4_K and Q5_K, told apart by the largest quant."""
    w, q, trial = (
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
    )
    s, t = _floats(stack_bytes(64), (256 // group,)), _floats(stack_bytes(64), (256 // group,))
    scales, minimums = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
    group_w, whole = _floats(stack_bytes(64), (16,)), _bytes(stack_bytes(256), (256,))
    q[:] = 0
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, block_bytes * b : block_bytes * (b + 1)]
            weigh(x, importance, 256 * b, group, w)
            d, m = affine_block(
                x, w, group, most, steps, scale_most, s, t, q, trial, scales, minimums, group_w
            )
            for i in range(256):
                whole[i] = np.uint8(q[i])
            if most == 3:
                _put_q2_k(block, whole, s, t, d, m)
            else:
                _put_q4_k_or_q5_k(block, whole, s, t, d, m, most)


@njit(**EXACT)
def _put_q2_k(block, q, s, t, d, m):
    for g in range(16):
        block[g] = np.uint8(s[g]) | np.uint8(t[g]) << 4
    _put_two_bits(block, 16, q)
    _put_half(block, 80, d)
    _put_half(block, 82, m)


@njit(**EXACT)
def _put_q4_k_or_q5_k(block, q, s, t, d, m, most):
    _put_half(block, 0, d)
    _put_half(block, 2, m)
    _put_six_bit_scales(block, s, t)
    at = 16
    if most == 31:
        for i in range(32):
            bits = 0
            for g in range(8):
                bits |= (q[32 * g + i] >> 4) << g
            block[16 + i] = bits
        at = 48
    for g in range(4):
        for i in range(32):
            low, high = q[64 * g + i], q[64 * g + 32 + i]
            block[at + 32 * g + i] = (low & 15) | (high & 15) << 4


@njit(**EXACT)
def _put_two_bits(block, at, q):
    """The low 2 bits of 256 quants in 64 bytes."""
    for half in range(2):
        for i in range(32):
            bits = 0
            for g in range(4):
                bits |= (q[128 * half + 32 * g + i] & 3) << (2 * g)
            block[at + 32 * half + i] = bits


@njit(**SEARCH)
def _encode_symmetric(rows, importance, into, half, scale_half, block_bytes):
    """Q3_K and Q6_K, told apart by `half`, the middle of the quants."""
    w, q, trial = (
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
    )
    s, scales = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
    group_w, whole = _floats(stack_bytes(64), (16,)), _bytes(stack_bytes(256), (256,))
    q[:] = 0
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, block_bytes * b : block_bytes * (b + 1)]
            weigh(x, importance, 256 * b, 16, w)
            d = symmetric_block(x, w, 16, half, scale_half, s, q, trial, scales, group_w)
            for i in range(256):
                whole[i] = np.uint8(q[i] + half)
            if half == 4:
                _put_q3_k(block, whole, s, d)
            else:
                _put_q6_k(block, whole, s, d)


@njit(**EXACT)
def _put_q3_k(block, q, s, d):
    for i in range(32):
        bits = 0
        for g in range(8):
            bits |= (q[32 * g + i] >> 2) << g
        block[i] = bits
    _put_two_bits(block, 32, q)
    for g in range(8):
        block[96 + g] = (np.int32(s[g] + 32) & 15) | (np.int32(s[g + 8] + 32) & 15) << 4
    for g in range(4):
        bits = 0
        for k in range(4):
            bits |= (np.int32(s[g + 4 * k] + 32) >> 4) << (2 * k)
        block[104 + g] = bits
    _put_half(block, 108, d)


@njit(**EXACT)
def _put_q6_k(block, q, s, d):
    for half in range(2):
        for i in range(64):
            block[64 * half + i] = (q[128 * half + i] & 15) | (q[128 * half + 64 + i] & 15) << 4
        for i in range(32):
            bits = 0
            for g in range(4):
                bits |= (q[128 * half + 32 * g + i] >> 4) << (2 * g)
            block[128 + 32 * half + i] = bits
    for g in range(16):
        block[192 + g] = np.int32(s[g]) & 255
    _put_half(block, 208, d)


@njit(**SEARCH)
def _encode_table(rows, importance, into, block_size, block_bytes):
    """IQ4_NL, of one group, and IQ4_XS, of eight."""
    n_groups = block_size // 32
    w, q = _floats(stack_bytes(1024), (block_size,)), _floats(stack_bytes(1024), (block_size,))
    trial, s = _floats(stack_bytes(1024), (block_size,)), _floats(stack_bytes(32), (n_groups,))
    scales, group_w = _floats(stack_bytes(32), (n_groups,)), _floats(stack_bytes(32), (n_groups,))
    q[:] = 0
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // block_size):
            x = rows[r, block_size * b : block_size * (b + 1)]
            block = into[r, block_bytes * b : block_bytes * (b + 1)]
            weigh(x, importance, block_size * b, 32, w)
            d = table_block(x, w, 32, s, q, trial, scales, group_w, VALUES, BOUNDS)
            _put_half(block, 0, d)
            if n_groups == 8:
                _put_iq4_xs_scales(block, s)
            at = 8 if n_groups == 8 else 2
            for g in range(n_groups):
                for i in range(16):
                    low, top = np.uint8(q[32 * g + i]), np.uint8(q[32 * g + 16 + i])
                    block[at + 16 * g + i] = low | top << 4


@njit(**EXACT)
def _put_iq4_xs_scales(block, s):
    high = 0
    for g in range(8):
        high |= (np.int32(s[g] + 32) >> 4) << (2 * g)
    block[2], block[3] = high & 255, high >> 8
    for g in range(4):
        block[4 + g] = (np.int32(s[2 * g] + 32) & 15) | (np.int32(s[2 * g + 1] + 32) & 15) << 4


@njit(**EXACT)
def _encode_mxfp4(rows, importance, into):
    """Blocks of MXFP4: the scale follows from the largest weight, so importances change nothing."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, 17 * b : 17 * b + 17]
            size = abs(extreme_of(x))
            # 2^2 is the highest power of two among the values: 4 and 6 have it
            exponent = max((np.int64(np.float32(size).view(np.uint32)) >> 23) - 2, 0)
            scale = np.float32(2.0 ** (exponent - 128)) if size > 0 else ZERO
            block[0] = exponent
            for i in range(16):
                block[1 + i] = _nearest_fp4(x[i], scale) | _nearest_fp4(x[16 + i], scale) << 4


@njit(**EXACT)
def _nearest_fp4(weight, scale):
    """The first quant of MXFP4 whose value is nearest."""
    best, least = 0, abs(weight)
    for q in range(1, 16):
        error = abs(scale * _FP4[q] - weight)
        if error < least:
            best, least = q, error
    return best


@njit(**EXACT)
def _q4_0(rows, importance, into):
    """Blocks of Q4_0."""
    _encode_0(rows, importance, into, 15, 18)


@njit(**EXACT)
def _q4_1(rows, importance, into):
    """Blocks of Q4_1."""
    _encode_1(rows, importance, into, 15, 20)


@njit(**EXACT)
def _q5_0(rows, importance, into):
    """Blocks of Q5_0."""
    _encode_0(rows, importance, into, 31, 22)


@njit(**EXACT)
def _q5_1(rows, importance, into):
    """Blocks of Q5_1."""
    _encode_1(rows, importance, into, 31, 24)


@njit(**EXACT)
def _q2_k(rows, importance, into):
    """Blocks of Q2_K."""
    _encode_affine(rows, importance, into, 16, 3, (-0.7, 0.1, 20), 15, 84)


@njit(**EXACT)
def _q3_k(rows, importance, into):
    """Blocks of Q3_K."""
    _encode_symmetric(rows, importance, into, 4, 32, 110)


@njit(**EXACT)
def _q4_k(rows, importance, into):
    """Blocks of Q4_K."""
    _encode_affine(rows, importance, into, 32, 15, (-1.0, 0.1, 21), 63, 144)


@njit(**EXACT)
def _q5_k(rows, importance, into):
    """Blocks of Q5_K."""
    _encode_affine(rows, importance, into, 32, 31, (-0.9, 0.1, 19), 63, 176)


@njit(**EXACT)
def _q6_k(rows, importance, into):
    """Blocks of Q6_K."""
    _encode_symmetric(rows, importance, into, 32, 128, 210)


@njit(**EXACT)
def _iq4_nl(rows, importance, into):
    """Blocks of IQ4_NL."""
    _encode_table(rows, importance, into, 32, 18)


@njit(**EXACT)
def _iq4_xs(rows, importance, into):
    """Blocks of IQ4_XS."""
    _encode_table(rows, importance, into, 256, 136)


def _make_kernel(weight_type: str, encode: Any) -> KernelSource:
    """`encode_TYPE`: fills `into`, rows of blocks; `importance` holds float32 [n_columns] or none."""

    def kernel(tile, rows, n_rows, n_columns, importance, n_importance, into, row_bytes):
        encode(
            _rows(rows, (n_rows, n_columns)),
            _floats(importance, (n_importance,)),
            _byte_rows(into, (n_rows, row_bytes)),
        )
        return 0

    return KernelSource(f"encode_{weight_type}", kernel)


_ENCODERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _encode_q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _encode_q8_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _encode_mxfp4,
}  # fmt: skip
_SOURCES = [_make_kernel(*entry) for entry in _ENCODERS.items()]
KERNELS = {source.name: source for source in _SOURCES}
