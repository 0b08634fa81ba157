"""Quantizer kernels: rows of float32 to blocks, `encode_TYPE` for each weight type.

A kernel encodes whole rows on one thread; `quantize.py` runs it on parts of a matrix. Where numbers lie in a
block follows from its type (`kukri.quant.types.schema`). Memory comes as NumPy arrays here, without bounds
checks.

Q4_0 to Q8_0 and Q8_K round exactly as GGML's reference does, but for Q4_0 to Q5_1 with importances. The
others search for scales (`scale_search.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kukri.kernels.cpu.compile.intrinsics import array_at, reordered, routine, stack_bytes
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.pack.block_numbers import make_put
from kukri.kernels.cpu.pack.scale_search import (
    BOUNDS,
    HALF,
    ONE,
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
from kukri.quant.types.fp4 import FP4_VALUES, MXFP4
from kukri.quant.types.iq4 import IQ4_NL, IQ4_XS
from kukri.quant.types.q2_0 import Q1_0, Q2_0
from kukri.quant.types.q2_k import Q2_K
from kukri.quant.types.q3_k import Q3_K
from kukri.quant.types.q4_0 import Q4_0, Q5_0
from kukri.quant.types.q4_1 import Q4_1, Q5_1
from kukri.quant.types.q4_k import Q4_K, Q5_K
from kukri.quant.types.q6_k import Q6_K
from kukri.quant.types.q8_0 import Q8_0
from kukri.quant.types.schema import QuantType
from kukri.quant.types.tq import TQ1_0, TQ2_0

_floats, _bytes = array_at(types.float32, 1), array_at(types.uint8, 1)
_rows, _byte_rows = array_at(types.float32, 2), array_at(types.uint8, 2)
_FP4 = np.array(FP4_VALUES, np.float32)


@routine
def _put_half(block, at, value):
    bits = half_bits(value)
    block[at], block[at + 1] = bits & 255, bits >> 8


def _by_blocks(type: QuantType, encode: Any) -> Any:
    """A function (rows, importance, into): `encode(x, importance, first, block)` for each block, of zeros.

    x are the weights from column `first` on.
    """
    size, n_bytes = type.block_size, type.block_bytes

    @routine
    def encode_rows(rows, importance, into):
        for r in range(rows.shape[0]):
            for b in range(rows.shape[1] // size):
                block = into[r, n_bytes * b : n_bytes * (b + 1)]
                block[:] = 0
                encode(rows[r, size * b : size * (b + 1)], importance, size * b, block)

    return encode_rows


def _symmetric_32(type: QuantType) -> Any:
    """Q4_0 and Q5_0: the weight of largest size becomes q = 0.

    With importances the scale is looked for.
    """
    middle = type.layout.offset
    put = make_put(type.layout, type.layout.quant_numbers)

    @routine
    def encode(x, importance, first, block):
        q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
        scale = extreme_of(x) / np.float32(-middle)
        if len(importance):
            weigh(x, importance, first, 32, w)
            scale = rounded(fit_symmetric(x, w, middle))
        inverse = inverted(scale)
        for i in range(32):
            q[i] = max(0, min(np.int32(x[i] * inverse + (np.float32(middle) + HALF)), 2 * middle - 1))
        _put_half(block, 0, scale)
        put(block, q)

    return _by_blocks(type, encode)


def _affine_32(type: QuantType, most: int) -> Any:
    """Q4_1 and Q5_1: the smallest weight becomes q = 0, the largest `most`.

    With importances scale and minimum are looked for.
    """
    put = make_put(type.layout, type.layout.quant_numbers)

    @routine
    def encode(x, importance, first, block):
        q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
        least, largest = x[0], x[0]
        for i in range(32):
            least, largest = min(least, x[i]), max(largest, x[i])
        scale = (largest - least) / np.float32(most)
        if len(importance):
            weigh(x, importance, first, 32, w)
            scale, minimum = fit_affine(x, w, most, -0.9, 0.1, 19)
            scale, least = rounded(scale), -rounded(minimum)
        inverse = inverted(scale)
        for i in range(32):
            q[i] = max(0, min(np.int32((x[i] - least) * inverse + HALF), most))
        _put_half(block, 0, scale)
        _put_half(block, 2, least)
        put(block, q)

    return _by_blocks(type, encode)


@routine
def _encode_q8_0(x, importance, first, block):
    """A block of Q8_0. Ties round away from zero."""
    size = ZERO
    for i in range(32):
        size = max(size, abs(x[i]))
    scale = size / np.float32(127)
    inverse = inverted(scale)
    for i in range(32):
        block[2 + i] = _away(x[i] * inverse) & 255
    _put_half(block, 0, scale)


@routine
def _away(value):
    """The nearest whole number, ties away from zero."""
    whole = np.trunc(value)
    return np.int32(whole + np.trunc((value - whole) * np.float32(2)))


@routine
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


def _affine(type: QuantType, most: int, steps: tuple[float, float, int], scale_most: int) -> Any:
    """Q2_K, Q4_K and Q5_K: scales and minimums are looked for."""
    facts = type.layout
    n_groups = 256 // (16 if type is Q2_K else 32)
    group, (d_at, m_at) = 256 // n_groups, facts.halves
    put, put_s, put_t = (make_put(facts, n) for n in (facts.quant_numbers, facts.scales, facts.minimums))

    @reordered
    def encode(x, importance, first, block):
        w, q, trial = (
            _floats(stack_bytes(1024), (256,)),
            _floats(stack_bytes(1024), (256,)),
            _floats(stack_bytes(1024), (256,)),
        )
        s, t = _floats(stack_bytes(64), (n_groups,)), _floats(stack_bytes(64), (n_groups,))
        scales, minimums = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
        group_w = _floats(stack_bytes(64), (16,))
        weigh(x, importance, first, group, w)
        q[:] = 0
        d, m = affine_block(x, w, group, most, steps, scale_most, s, t, q, trial, scales, minimums, group_w)
        put(block, q)
        put_s(block, s)
        put_t(block, t)
        _put_half(block, d_at, d)
        _put_half(block, m_at, m)

    return _by_blocks(type, encode)


def _symmetric(type: QuantType, scale_half: int) -> Any:
    """Q3_K and Q6_K: scales are looked for."""
    facts = type.layout
    half, plus, (d_at,) = facts.offset, facts.plus, facts.halves
    put, put_s = make_put(facts, facts.quant_numbers), make_put(facts, facts.scales)

    @reordered
    def encode(x, importance, first, block):
        w, q, trial = (
            _floats(stack_bytes(1024), (256,)),
            _floats(stack_bytes(1024), (256,)),
            _floats(stack_bytes(1024), (256,)),
        )
        s, scales = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
        group_w = _floats(stack_bytes(64), (16,))
        weigh(x, importance, first, 16, w)
        q[:] = 0
        d = symmetric_block(x, w, 16, half, scale_half, s, q, trial, scales, group_w)
        for i in range(256):
            q[i] += np.float32(half)
        for g in range(16):
            s[g] -= np.float32(plus)
        put(block, q)
        put_s(block, s)
        _put_half(block, d_at, d)

    return _by_blocks(type, encode)


def _table(type: QuantType) -> Any:
    """IQ4_NL, of one group, and IQ4_XS, of eight."""
    facts, size = type.layout, type.block_size
    n_groups, plus = size // 32, facts.plus
    put = make_put(facts, facts.quant_numbers)
    put_s = make_put(facts, facts.scales) if facts.scales else put

    @reordered
    def encode(x, importance, first, block):
        w, q = _floats(stack_bytes(1024), (size,)), _floats(stack_bytes(1024), (size,))
        trial, s = _floats(stack_bytes(1024), (size,)), _floats(stack_bytes(32), (n_groups,))
        scales, group_w = _floats(stack_bytes(32), (n_groups,)), _floats(stack_bytes(32), (n_groups,))
        weigh(x, importance, first, 32, w)
        q[:] = 0
        d = table_block(x, w, 32, s, q, trial, scales, group_w, VALUES, BOUNDS)
        put(block, q)
        if n_groups > 1:
            for g in range(n_groups):
                s[g] -= np.float32(plus)
            put_s(block, s)
        _put_half(block, 0, d)

    return _by_blocks(type, encode)


_put_mxfp4 = make_put(MXFP4.layout, MXFP4.layout.quant_numbers)


@routine
def _encode_mxfp4(x, importance, first, block):
    """A block of MXFP4: the scale follows from the largest weight, so importances change nothing."""
    q = _bytes(stack_bytes(32), (32,))
    size = abs(extreme_of(x))
    # 2^2 is the highest power of two among the values: 4 and 6 have it
    exponent = max((np.int64(np.float32(size).view(np.uint32)) >> 23) - 2, 0)
    scale = np.float32(2.0 ** (exponent - 128)) if size > 0 else ZERO
    block[0] = exponent
    for i in range(32):
        q[i] = _nearest_fp4(x[i], scale)
    _put_mxfp4(block, q)


@routine
def _nearest_fp4(weight, scale):
    """The first quant of MXFP4 whose value is nearest."""
    best, least = 0, abs(weight)
    for q in range(1, 16):
        error = abs(scale * _FP4[q] - weight)
        if error < least:
            best, least = q, error
    return best


def _ternary(type: QuantType, most: int) -> Any:
    """TQ2_0 and Q2_0: d is the size of the largest weight, so that quants are -1, 0 and 1, kept from 0."""
    size, (d_at,) = type.block_size, type.layout.halves
    put = make_put(type.layout, type.layout.quant_numbers)

    @routine
    def encode(x, importance, first, block):
        q = _bytes(stack_bytes(256), (size,))
        d = abs(extreme_of(x))
        inverse = inverted(d)
        for i in range(size):
            q[i] = max(0, min(_away(x[i] * inverse) + 1, most))
        _put_half(block, d_at, d)
        put(block, q)

    return _by_blocks(type, encode)


@routine
def _encode_tq1_0(x, importance, first, block):
    """A block of TQ1_0: five digits of base 3 a byte, of the last four bytes four, as a fraction of 256."""
    d = abs(extreme_of(x))
    inverse = inverted(d)
    for byte in range(52):
        start, run, n = (
            (byte, 32, 5) if byte < 32 else (128 + byte, 16, 5) if byte < 48 else (192 + byte, 4, 4)
        )
        digits = 0
        for k in range(5):
            digit = _away(x[start + run * k] * inverse) + 1 if k < n else 0
            digits = 3 * digits + digit
        block[byte] = (digits * 256 + 242) // 243
    _put_half(block, 52, d)


_put_q1_0 = make_put(Q1_0.layout, Q1_0.layout.quant_numbers)


@routine
def _encode_q1_0(x, importance, first, block):
    """A block of Q1_0: signs, and the mean size of the weights."""
    q = _bytes(stack_bytes(128), (128,))
    total = ZERO
    for i in range(128):
        total += abs(x[i])
        q[i] = 1 if x[i] >= 0 else 0
    _put_half(block, 0, total / np.float32(128))
    _put_q1_0(block, q)


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
    "Q4_0": _symmetric_32(Q4_0),
    "Q4_1": _affine_32(Q4_1, 15),
    "Q5_0": _symmetric_32(Q5_0),
    "Q5_1": _affine_32(Q5_1, 31),
    "Q8_0": _by_blocks(Q8_0, _encode_q8_0),
    "Q2_K": _affine(Q2_K, 3, (-0.7, 0.1, 20), 15),
    "Q3_K": _symmetric(Q3_K, 32),
    "Q4_K": _affine(Q4_K, 15, (-1.0, 0.1, 21), 63),
    "Q5_K": _affine(Q5_K, 31, (-0.9, 0.1, 19), 63),
    "Q6_K": _symmetric(Q6_K, 128),
    "Q8_K": _encode_q8_k,
    "IQ4_NL": _table(IQ4_NL),
    "IQ4_XS": _table(IQ4_XS),
    "MXFP4": _by_blocks(MXFP4, _encode_mxfp4),
    "Q1_0": _by_blocks(Q1_0, _encode_q1_0),
    "Q2_0": _ternary(Q2_0, 3),
    "TQ1_0": _by_blocks(TQ1_0, _encode_tq1_0),
    "TQ2_0": _ternary(TQ2_0, 2),
}
_SOURCES = [_make_kernel(*entry) for entry in _ENCODERS.items()]
KERNELS = {source.name: source for source in _SOURCES}
