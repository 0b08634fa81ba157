"""Activation panels: the rows of a step in tiles, and kernels that quantize rows into panels.

A matrix kernel reads its inputs from panels of 8 tokens, in the layouts of `cpu/pack/layouts.py`. The
formats are defined in `kukri.kernels.reference`. Kernels that work on rows are written as the work on one,
from which `row_kernel` makes the kernel; `rows` in its record is the address of the number of rows (tokens,
or logit rows) of the step. Buffers are float32, strides are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    at,
    device,
    load_f32,
    load_i64,
    operation,
    pointer,
    store_f32,
    store_i32,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    I32x16,
    absolute,
    fma,
    load_f32x16,
    max_lanes,
    maximum,
    minimum,
    round_even,
    splat,
    sum_lanes,
    sum_lanes_i32,
    to_i32,
)
from kukri.kernels.cpu.pack.layouts import (
    F32_INPUT_BYTES,
    GROUP,
    HALF_STARTS,
    I16_BLOCK,
    I16_BLOCK_BYTES,
    I16_MOST,
    I16_SCALES,
    LAST_NEGATIVE_SUMS,
    NEGATIVE_SUMS,
    NEGATIVE_TOTAL,
    ODD_INPUTS,
    Q8_BLOCK,
    Q8_BLOCK_BYTES,
    Q16_BLOCK_BYTES,
    RAISED_BITS,
    SCALED_SUMS,
    SCALES,
    TOKENS,
)

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_COLUMN, _I16_MOST = cpu_target().column_bytes, float(I16_MOST)
_FIRST_START, _LAST_START = HALF_STARTS


@operation(types.void, types.int64, I32x16, types.int64)
def store_words(builder: Any, address: Any, value: Any, width: Any) -> None:
    """Stores 16 int32 within int8 as a token's words of four or eight bytes in a q8 panel, `width` wide."""
    column = cpu_target().column_bytes
    word = ir.IntType(8 * column)
    words = builder.bitcast(builder.trunc(value, ir.VectorType(_I8, 16)), ir.VectorType(word, 16 // column))
    for i in range(16 // column):
        where = pointer(builder, at(builder, address, builder.mul(width, _I64(column * i))), word)
        builder.store(builder.extract_element(words, _I32(i)), where, align=4)


@operation(types.void, types.int64, I32x16, types.int64)
def store_pairs(builder: Any, address: Any, value: Any, width: Any) -> None:
    """Stores 16 int32 within int16 as pairs: four groups of a q16 panel, whose even and odd inputs part.

    The panel is `width` tokens wide.
    """
    shorts = builder.trunc(value, ir.VectorType(_I16, 16))
    for start, offset in ((0, 0), (1, ODD_INPUTS)):
        order = [4 * group + start + i for group in range(4) for i in (0, 2)]
        lanes = ir.Constant(ir.VectorType(_I32, 8), order)
        pairs = builder.bitcast(builder.shuffle_vector(shorts, shorts, lanes), ir.VectorType(_I32, 4))
        for group in range(4):
            part = builder.mul(width, _I64(offset + GROUP * group))
            where = pointer(builder, at(builder, address, part), _I32)
            builder.store(builder.extract_element(pairs, _I32(group)), where, align=4)


@operation(types.void, types.int64, I32x16, types.int64)
def store_short_pairs(builder: Any, address: Any, value: Any, width: Any) -> None:
    """Stores 16 int32 within int16 as a token's pairs in an i16 panel, `width` wide."""
    pairs = builder.bitcast(builder.trunc(value, ir.VectorType(_I16, 16)), ir.VectorType(_I32, 8))
    for i in range(8):
        where = pointer(builder, at(builder, address, builder.mul(width, _I64(4 * i))), _I32)
        builder.store(builder.extract_element(pairs, _I32(i)), where, align=4)


@device
def row_tiles(n_rows):
    """Tiles of a row-wise kernel: a row each for a few rows, panels of 8 for many."""
    return n_rows if n_rows <= TOKENS else (n_rows + TOKENS - 1) >> 3


@device
def first_row(tile, n_rows):
    """The first row of a tile."""
    return tile if n_rows <= TOKENS else tile * TOKENS


@device
def stop_row(tile, n_rows):
    """One past the last row of a tile."""
    return tile + 1 if n_rows <= TOKENS else min(tile * TOKENS + TOKENS, n_rows)


@device
def panel_width(row, n_rows):
    """Return the width of a row's panel: its number of tokens, rounded up to 1, 2, 4 or 8."""
    count = n_rows - (row & -TOKENS)
    if count > 4:
        return 8
    return 4 if count > 2 else count


def row_kernel(each: Callable[..., None], n_parts: Any = None) -> KernelSource:
    """The kernel that calls `each(row, a, b, …)` for each row; its record has `rows`, a, b, …

    Two parameters are not in the record: `width`, the width of the row's panel, and `part`, if there is
    `n_parts`, a device function of n that gives the number of parts of columns into which rows are cut.
    """
    code = each.__code__
    given = {"width": "panel_width(row, n_rows)", "part": "tile % parts"}
    parameters = code.co_varnames[1 : code.co_argcount]
    names = ", ".join(name for name in parameters if name not in given)
    arguments = ", ".join(given.get(name, name) for name in parameters)
    parts = "1" if n_parts is None else "n_parts(n)"
    namespace = {**globals(), "load_i64": load_i64, "each": device(each), "n_parts": n_parts}
    exec(
        f"""def kernel(tile, rows, {names}):
    n_rows = load_i64(rows)
    parts = {parts}
    if tile < 0:
        return row_tiles(n_rows) * parts
    row_tile = tile // parts
    for row in range(first_row(row_tile, n_rows), stop_row(row_tile, n_rows)):
        each(row, {arguments})
    return 0""",
        namespace,
    )
    return KernelSource(each.__name__, namespace["kernel"])


# A token's share of a panel is written at its `lane`, 0 to 7; the panel is `width` tokens wide.


@device
def panel_of(panels, step, row):
    """The address of the panel that has a row; panels begin `step` bytes apart for each of 8 tokens."""
    return panels + (row >> 3) * (TOKENS * step)


@device
def _part(part, width):
    """Bytes from a token's share of a panel block to one of its parts, such as SCALES."""
    return (part & -_COLUMN) * width + (part & (_COLUMN - 1))


@device
def store_scale(scale, total, share, width):
    """Writes the scale of 32 whole numbers and their scaled sum as a token's share of a panel block."""
    store_f32(share + _part(SCALES, width), scale)
    store_f32(share + _part(SCALED_SUMS, width), scale * total)


@device
def store_block(low, high, scale, target, lane, width):
    """Writes 32 int8 and their scale as one token's share of a panel block."""
    share = target + _COLUMN * lane
    store_words(share, low, width)
    store_words(share + 4 * GROUP * width, high, width)
    first = sum_lanes_i32(low)
    last = sum_lanes_i32(high)
    store_scale(scale, first + last, share, width)
    store_i32(share + _part(NEGATIVE_SUMS, width), (-first & 0xFFFF) | (-last << 16))
    store_i32(share + _part(NEGATIVE_TOTAL, width), -first - last)
    store_i32(share + _part(_FIRST_START, width), RAISED_BITS - 32 * first)
    store_i32(share + _part(_LAST_START, width), RAISED_BITS - 32 * last)


@device
def scale_of(a, b, most):
    """(scale, its inverse) with which 32 values are whole numbers of -most to most."""
    largest = max_lanes(maximum(absolute(a), absolute(b)))
    return np.float32(largest * (1.0 / most)), np.float32(
        most / largest if largest > 0.0 else largest
    )  # keeps nan


@device
def quantize_block(a, b, target, lane, width):
    """Writes 32 values as one token's share of a q8 panel block -> (scale, its inverse)."""
    scale, inverse = scale_of(a, b, 127.0)
    low = to_i32(round_even(a * splat(inverse)))
    high = to_i32(round_even(b * splat(inverse)))
    store_block(low, high, scale, target, lane, width)
    return scale, inverse


@device
def quantize_row(x, n, panels, row, width):
    """Writes n values at x as token `row` of q8 panels."""
    target = panel_of(panels, n // Q8_BLOCK * Q8_BLOCK_BYTES, row)
    for b in range(n // Q8_BLOCK):
        quantize_block(load_f32x16(x + 128 * b), load_f32x16(x + 128 * b + 64), target, row & 7, width)
        target += Q8_BLOCK_BYTES * width


def panel_q8(row, width, x, x_stride, n, panels):
    """Quantizes rows of n float32 to q8 panels."""
    quantize_row(x + row * x_stride, n, panels, row, width)


def panel_q8x2(row, width, x, x_stride, n, panels):
    """Quantizes rows of n float32 to q8x2 panels: after each row its rounding errors, quantized."""
    target = panel_of(panels, 2 * (n // Q8_BLOCK * Q8_BLOCK_BYTES), row)
    lane = 2 * (row & 7)
    for i in range(0, 4 * n, 4 * Q8_BLOCK):
        low = load_f32x16(x + row * x_stride + i)
        high = load_f32x16(x + row * x_stride + i + 64)
        scale, inverse = quantize_block(low, high, target, lane, 2 * width)
        low = fma(round_even(low * splat(inverse)), splat(-scale), low)
        high = fma(round_even(high * splat(inverse)), splat(-scale), high)
        quantize_block(low, high, target, lane + 1, 2 * width)
        target += 2 * Q8_BLOCK_BYTES * width


def panel_q16(row, width, x, x_stride, n, panels):
    """Quantizes rows of n float32 to q16 panels."""
    lane = row & 7
    target = panel_of(panels, n // Q8_BLOCK * Q16_BLOCK_BYTES, row)
    for i in range(0, 4 * n, 4 * Q8_BLOCK):
        a = load_f32x16(x + row * x_stride + i)
        b = load_f32x16(x + row * x_stride + i + 64)
        scale, inverse = scale_of(a, b, 32767.0)
        low = to_i32(round_even(a * splat(inverse)))
        high = to_i32(round_even(b * splat(inverse)))
        share = target + 4 * lane
        store_pairs(share, low, width)
        store_pairs(share + 4 * GROUP * width, high, width)
        first = sum_lanes_i32(low)
        last = sum_lanes_i32(high)
        store_scale(scale, first + last, share, width)
        store_i32(share + NEGATIVE_SUMS * width, -first)
        store_i32(share + LAST_NEGATIVE_SUMS * width, -last)
        target += Q16_BLOCK_BYTES * width


@device
def _row_range(x, n):
    """(the least, the largest) of n values and 0; nan if a value is infinite or nan."""
    low = splat(0.0)
    high = splat(0.0)
    spoiled = splat(0.0)
    for i in range(0, 4 * n, 64):
        v = load_f32x16(x + i)
        low = minimum(v, low)
        high = maximum(v, high)
        spoiled = fma(v, splat(0.0), spoiled)
    return -max_lanes(splat(0.0) - low), max_lanes(high) + sum_lanes(spoiled)


@device
def _with_zero(x, inverse, zero):
    return to_i32(maximum(minimum(round_even(load_f32x16(x) * inverse) + zero, splat(127.0)), splat(-128.0)))


def panel_q8t(row, width, x, x_stride, n, panels):
    """Quantizes rows of n float32 to q8t panels, as `kukri.quant.per_token.quantize_tokens`."""
    source = x + row * x_stride
    least, largest = _row_range(source, n)
    span = largest - least
    scale = np.float32(span * (1.0 / 255.0))
    inverse = np.float32(255.0 / span if span > 1e-35 else span * 0.0)  # keeps nan
    zero = round_even(splat(np.float32(-128.0 - least * inverse)))
    target = panel_of(panels, n // Q8_BLOCK * Q8_BLOCK_BYTES + _COLUMN, row)
    for i in range(0, 4 * n, 128):
        low = _with_zero(source + i, splat(inverse), zero)
        high = _with_zero(source + i + 64, splat(inverse), zero)
        store_block(low, high, scale, target, row & 7, width)
        target += Q8_BLOCK_BYTES * width
    store_f32(target + _COLUMN * (row & 7), -scale * max_lanes(zero))


@device
def _load_or_zeros(x, i, n):
    return load_f32x16(x + 4 * i) if i < n else splat(0.0)


def panel_i16(row, width, x, x_stride, n, panels):
    """Quantizes rows of n float32, a multiple of 16, to i16 panels."""
    source = x + row * x_stride
    n_blocks = (n + I16_BLOCK - 1) // I16_BLOCK
    share = panel_of(panels, n_blocks * I16_BLOCK_BYTES, row) + 4 * (row & 7)
    for i in range(0, n, I16_BLOCK):
        a = _load_or_zeros(source, i, n)
        b = _load_or_zeros(source, i + 16, n)
        c = _load_or_zeros(source, i + 32, n)
        d = _load_or_zeros(source, i + 48, n)
        both = maximum(absolute(a), absolute(b))
        scale, inverse = scale_of(both, maximum(absolute(c), absolute(d)), _I16_MOST)
        factor = splat(inverse)
        store_short_pairs(share, to_i32(round_even(a * factor)), width)
        store_short_pairs(share + 32 * width, to_i32(round_even(b * factor)), width)
        store_short_pairs(share + 64 * width, to_i32(round_even(c * factor)), width)
        store_short_pairs(share + 96 * width, to_i32(round_even(d * factor)), width)
        store_f32(share + I16_SCALES * width, scale)
        share += I16_BLOCK_BYTES * width


def panel_f32(row, width, x, x_stride, n, panels):
    """Brings rows of n float32 into f32 panels."""
    target = panel_of(panels, n * F32_INPUT_BYTES, row) + 4 * (row & 7)
    for i in range(n):
        store_f32(target + F32_INPUT_BYTES * width * i, load_f32(x + row * x_stride + 4 * i))


_ROW_KERNELS = [
    row_kernel(each) for each in (panel_q8, panel_q8x2, panel_q16, panel_q8t, panel_i16, panel_f32)
]
KERNELS = {source.name: source for source in _ROW_KERNELS}
