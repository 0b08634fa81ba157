"""Blocks as the blocks that tiles are made of, for types that the CPU packs in another form.

`recode_TYPE` reads a block's numbers and writes the same quants and scales where the other form has them:
quants that were chosen from a table need no table any more. Of floats it makes whole numbers and scales, for
those that are to be multiplied as int16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kukri.kernels.cpu.compile.intrinsics import array_at, device, load_i32, stack_bytes, store_f32, store_i32
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    absolute,
    load_bf16x16,
    load_f16x16,
    max_lanes,
    maximum,
    power_of_two,
    round_even,
    splat,
    store_i16x16,
    to_i32,
)
from kukri.kernels.cpu.pack.block_numbers import make_put, make_take, make_take_quants, n_groups
from kukri.kernels.cpu.pack.layouts import I16_BLOCK, I16_BLOCK_BYTES, I16_SCALES, I16_WEIGHT_BITS
from kukri.quant.types import PACKED
from kukri.quant.types.schema import QuantType, n_numbers

BLOCKS_PER_CLAIM = 256
_LEAST_EXPONENT = -100  # as a block's largest number has: a scale and its inverse are normal numbers
_bytes, _integers = array_at(types.uint8, 1), array_at(types.int32, 1)


def _make_recode(type: QuantType) -> KernelSource:
    block, form = type.layout, type.tiles.layout
    size, n_bytes, form_bytes = type.block_size, type.block_bytes, type.tiles.block_bytes
    take_quants, put_quants = make_take_quants(block, size), make_put(form, form.quant_numbers)
    take_d, put_d = make_take(block, block.scale), make_put(form, form.scale)
    take_s, put_s = make_take(block, block.scales), make_put(form, form.scales)
    n_d, n, repeats = n_numbers(form.places(form.scale)), n_groups(form), n_groups(form) // n_groups(block)
    has_table = block.scale_values is not None
    # the form has the bits of a table of scales as float16
    halves = np.zeros(1, np.uint16)
    if block.scale_values is not None:
        halves = block.scale_values.astype(np.float16).view(np.uint16)
    times, plus = block.times, block.plus - form.plus

    def recode(tile, source, n_blocks, into):
        """Blocks from the address `source` on, written to `into`."""
        if tile < 0:
            return (n_blocks + BLOCKS_PER_CLAIM - 1) // BLOCKS_PER_CLAIM
        quants = _integers(stack_bytes(1024), (size,))
        found = _integers(stack_bytes(64), (16,))
        scales = _integers(stack_bytes(64), (16,))
        for b in range(tile * BLOCKS_PER_CLAIM, min((tile + 1) * BLOCKS_PER_CLAIM, n_blocks)):
            at = source + b * n_bytes
            made = _bytes(into + b * form_bytes, (form_bytes,))
            made[:] = 0
            take_quants(at, quants)
            put_quants(made, quants)
            found[:] = 0
            take_d(at, found)
            if has_table:
                for i in range(n_d):
                    found[i] = halves[found[i]]
            put_d(made, found)
            found[:] = 0
            take_s(at, found)
            for g in range(n):
                scales[g] = times * found[g // repeats] + plus
            put_s(made, scales)
        return 0

    return KernelSource(f"recode_{type.name}", recode)


def _make_recode_floats(type_name: str, load: Any) -> KernelSource:
    @device
    def load_or_zeros(address, i, n):
        return load(address + 2 * i) if i < n else splat(0.0)

    def recode(tile, source, n_rows, n_columns, into):
        """Rows of 16-bit floats, a multiple of 16 in each, as rows of blocks of int16, written to `into`."""
        if tile < 0:
            return n_rows
        made = into + tile * ((n_columns + I16_BLOCK - 1) // I16_BLOCK * I16_BLOCK_BYTES)
        row = source + tile * (2 * n_columns)
        for i in range(0, n_columns, I16_BLOCK):
            a = load_or_zeros(row, i, n_columns)
            b = load_or_zeros(row, i + 16, n_columns)
            c = load_or_zeros(row, i + 32, n_columns)
            d = load_or_zeros(row, i + 48, n_columns)
            both = maximum(absolute(a), absolute(b))
            store_f32(made + I16_SCALES, max_lanes(maximum(both, maximum(absolute(c), absolute(d)))))
            exponent = (load_i32(made + I16_SCALES) >> 23) - 127
            if exponent < 128:  # infinite and nan stay scales
                exponent = max(exponent, _LEAST_EXPONENT) - (I16_WEIGHT_BITS - 1)
                store_i32(made + I16_SCALES, (exponent + 127) << 23)
            factor = power_of_two(to_i32(splat(np.float32(-exponent))))
            store_i16x16(made, to_i32(round_even(a * factor)))
            store_i16x16(made + 32, to_i32(round_even(b * factor)))
            store_i16x16(made + 64, to_i32(round_even(c * factor)))
            store_i16x16(made + 96, to_i32(round_even(d * factor)))
            made += I16_BLOCK_BYTES
        return 0

    return KernelSource(f"recode_{type_name}", recode)


_SOURCES = [
    *(_make_recode(type) for type in PACKED if type.tiles is not type),
    _make_recode_floats("F16", load_f16x16),
    _make_recode_floats("BF16", load_bf16x16),
]
KERNELS = {source.name: source for source in _SOURCES}
