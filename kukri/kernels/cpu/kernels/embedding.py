"""The embedding: rows of a matrix, read from the file as they are and widened to float32.

Byte layouts are drawn in `kukri.quant.blocks`, whose arithmetic this repeats a block at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels.cpu.compile.kernel_cache import KernelSource
from kukri.kernels.cpu.kernels.intrinsics import (
    device,
    load_f32,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_f32,
)
from kukri.kernels.cpu.kernels.panels import first_row, row_tiles, stop_row
from kukri.kernels.cpu.kernels.simd import (
    first_lane,
    load_bf16,
    load_f16,
    load_f32x16,
    store_f32x16,
)
from kukri.kernels.cpu.kernels.unpack import (
    load_powers,
)
from kukri.kernels.cpu.pack.layouts import LAYOUTS
from kukri.kernels.cpu.run.abi import N_TOKENS
from kukri.quant.blocks import IQ4_VALUES, MXFP4_VALUES

_FP4 = tuple(np.float32(value) for value in MXFP4_VALUES)
_IQ4 = tuple(np.float32(value) for value in IQ4_VALUES)


@device
def _f32(source, target):
    store_f32(target, load_f32(source))


@device
def _f16(source, target):
    store_f32(target, load_f16(source))


@device
def _bf16(source, target):
    store_f32(target, load_bf16(source))


@device
def _q4_0(source, target):
    d = load_f16(source)
    for j in range(16):
        byte = load_u8(source + 2 + j)
        store_f32(target + 4 * j, d * np.float32((byte & 15) - 8))
        store_f32(target + 64 + 4 * j, d * np.float32((byte >> 4) - 8))


@device
def _q4_1(source, target):
    d = load_f16(source)
    m = load_f16(source + 2)
    for j in range(16):
        byte = load_u8(source + 4 + j)
        store_f32(target + 4 * j, d * np.float32(byte & 15) + m)
        store_f32(target + 64 + 4 * j, d * np.float32(byte >> 4) + m)


@device
def _fifth_bit(bits, i):
    return ((load_u8(bits + (i >> 3)) >> (i & 7)) & 1) << 4


@device
def _q5_0(source, target):
    d = load_f16(source)
    for j in range(16):
        byte = load_u8(source + 6 + j)
        low = (byte & 15) | _fifth_bit(source + 2, j)
        high = (byte >> 4) | _fifth_bit(source + 2, j + 16)
        store_f32(target + 4 * j, d * np.float32(low - 16))
        store_f32(target + 64 + 4 * j, d * np.float32(high - 16))


@device
def _q5_1(source, target):
    d = load_f16(source)
    m = load_f16(source + 2)
    for j in range(16):
        byte = load_u8(source + 8 + j)
        low = (byte & 15) | _fifth_bit(source + 4, j)
        high = (byte >> 4) | _fifth_bit(source + 4, j + 16)
        store_f32(target + 4 * j, d * np.float32(low) + m)
        store_f32(target + 64 + 4 * j, d * np.float32(high) + m)


@device
def _mxfp4(source, target):
    d = first_lane(load_powers(source))
    for j in range(16):
        byte = load_u8(source + 1 + j)
        store_f32(target + 4 * j, d * _FP4[byte & 15])
        store_f32(target + 64 + 4 * j, d * _FP4[byte >> 4])


@device
def _q8_0(source, target):
    d = load_f16(source)
    for j in range(32):
        store_f32(target + 4 * j, d * np.float32(load_i8(source + 2 + j)))


@device
def _iq4_group(scale, source, target):
    for j in range(16):
        byte = load_u8(source + j)
        store_f32(target + 4 * j, scale * _IQ4[byte & 15])
        store_f32(target + 64 + 4 * j, scale * _IQ4[byte >> 4])


@device
def _iq4_nl(source, target):
    _iq4_group(load_f16(source), source + 2, target)


@device
def _iq4_xs(source, target):
    d = load_f16(source)
    top = load_u16(source + 2)
    for g in range(8):
        low = (load_u8(source + 4 + (g >> 1)) >> (4 * (g & 1))) & 15
        scale = low | (((top >> (2 * g)) & 3) << 4)
        _iq4_group(d * np.float32(scale - 32), source + 8 + 16 * g, target + 128 * g)


@device
def _six_bits(scales, which, g):
    """Scale (0) or min (1) of group g from the 12 bytes of Q4_K and Q5_K."""
    if g < 4:
        return load_u8(scales + 4 * which + g) & 63
    low = (load_u8(scales + 4 + g) >> (4 * which)) & 15
    return low | ((load_u8(scales + 4 * which + g - 4) >> 6) << 4)


@device
def _q4_k_quant(source, g, i):
    return (load_u8(source + 16 + 32 * (g >> 1) + i) >> (4 * (g & 1))) & 15


@device
def _q5_k_quant(source, g, i):
    return _q4_k_quant(source + 32, g, i) | ((load_u8(source + 16 + i) >> g) & 1) << 4


def _make_k_block(quant: Any) -> Any:
    """A function for Q4_K's or Q5_K's blocks: 8 groups with a scale and a min of 6 bits."""

    @device
    def block(source, target):
        d = load_f16(source)
        m = load_f16(source + 2)
        for g in range(8):
            scale = d * np.float32(_six_bits(source + 4, 0, g))
            low = m * np.float32(_six_bits(source + 4, 1, g))
            for i in range(32):
                store_f32(target + 4 * (32 * g + i), scale * np.float32(quant(source, g, i)) - low)

    return block


_q4_k = _make_k_block(_q4_k_quant)
_q5_k = _make_k_block(_q5_k_quant)


@device
def _q6_k(source, target):
    d = load_f16(source + 208)
    for g in range(8):
        half = g >> 2
        for i in range(32):
            q = (load_u8(source + 64 * half + 32 * (g & 1) + i) >> (4 * ((g >> 1) & 1))) & 15
            q |= ((load_u8(source + 128 + 32 * half + i) >> (2 * (g & 3))) & 3) << 4
            scale = d * np.float32(load_i8(source + 192 + 2 * g + (i >> 4)))
            store_f32(target + 4 * (32 * g + i), scale * np.float32(q - 32))


@device
def _q3_k(source, target):
    d = load_f16(source + 108)
    for g in range(8):
        half = g >> 2
        for i in range(32):
            k = 2 * g + (i >> 4)
            scale = (load_u8(source + 96 + (k & 7)) >> (4 * (k >> 3))) & 15
            scale |= ((load_u8(source + 104 + (k & 3)) >> (2 * (k >> 2))) & 3) << 4
            q = (load_u8(source + 32 + 32 * half + i) >> (2 * (g & 3))) & 3
            q |= ((load_u8(source + i) >> g) & 1) << 2
            store_f32(target + 4 * (32 * g + i), d * np.float32(scale - 32) * np.float32(q - 4))


@device
def _q2_k(source, target):
    d = load_f16(source + 80)
    m = load_f16(source + 82)
    for g in range(8):
        for i in range(32):
            both = load_u8(source + 2 * g + (i >> 4))
            q = (load_u8(source + 16 + 32 * (g >> 2) + i) >> (2 * (g & 3))) & 3
            scale, low = d * np.float32(both & 15), m * np.float32(both >> 4)
            store_f32(target + 4 * (32 * g + i), scale * np.float32(q) - low)


def _make_embed(block: Any, weight_type: str) -> KernelSource:
    layout = LAYOUTS[weight_type]
    block_bytes, target_step = layout.block_bytes, 4 * layout.block_size

    def embed(tile, batch, indices, w, n_blocks, residual, residual_stride, y, y_stride):
        """y[t] = the row of `w` (as in the file) for token t's number, plus residual[t] unless that is 0.

        `indices` is the address of the int32 array's address. With a residual, rows have room for
        whole vectors.
        """
        n_rows = load_i64(batch + N_TOKENS)
        if tile < 0:
            return row_tiles(n_rows)
        numbers = load_i64(indices)
        for row in range(first_row(tile, n_rows), stop_row(tile, n_rows)):
            source = w + load_i32(numbers + 4 * row) * (n_blocks * block_bytes)
            target = y + row * y_stride
            for b in range(n_blocks):
                block(source + b * block_bytes, target + b * target_step)
            if residual != 0:
                for i in range(0, n_blocks * target_step, 64):
                    added = load_f32x16(residual + row * residual_stride + i)
                    store_f32x16(target + i, load_f32x16(target + i) + added)
        return 0

    return KernelSource(f"embed_{weight_type}", embed)


_ROWS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}

KERNELS = {f"embed_{name}": _make_embed(block, name) for name, block in _ROWS.items()}
