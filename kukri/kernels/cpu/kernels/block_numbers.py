"""Functions that read a block's numbers and weights one by one, or write them, made from its type's facts.

Facts and arithmetic are those of `kukri.quant.types.schema`. Functions for kernels take addresses, those for
quantizers NumPy arrays without bounds checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kukri.kernels.cpu.kernels.intrinsics import (
    device,
    load_i8,
    load_i32,
    load_u8,
    load_u16,
    stack_bytes,
    store_f32,
    store_u16,
)
from kukri.kernels.cpu.kernels.simd import load_f16
from kukri.kernels.cpu.pack.scale_search import EXACT
from kukri.quant.types.schema import Block, Codebook, Cut, Numbers, n_numbers

_LOADS = {1: load_u8, 2: load_u16, 4: load_i32}
_POWERS = (1, 3, 9, 27, 81)


def _divider(n: int) -> Any:
    """A function of i that is not negative: i div n and i mod n."""
    if n & (n - 1) == 0:
        shift, mask = n.bit_length() - 1, n - 1

        @device
        def by_shift(i):
            return i >> shift, i & mask

        return by_shift

    @device
    def divide(i):
        return i // n, i % n

    return divide


def _make_part(cut: Cut) -> Any:
    """A function (address of a block, i): what `cut` contributes to its number i."""
    by_chunk, by_run = _divider(cut.run * len(cut.shifts)), _divider(cut.run)
    by_inner = _divider(cut.inner)
    at, stride, unit, run, mask, left = cut.at, cut.stride, cut.unit, cut.run, cut.mask, cut.left
    start = cut.shifts[0]
    step = cut.shifts[1] - start if len(cut.shifts) > 1 else 0
    load = load_i8 if cut.is_signed else _LOADS[unit]

    @device
    def unit_and_place(source, i):
        chunk, within = by_chunk(i)
        place, of_run = by_run(within)
        outer, inner = by_inner(chunk * run + of_run)
        return load(source + at + outer * stride + inner * unit), place

    if cut.is_signed:

        @device
        def part(source, i):
            value, _ = unit_and_place(source, i)
            return value

    elif mask == 0:

        @device
        def part(source, i):
            value, digit = unit_and_place(source, i)
            return (((value * _POWERS[digit]) & 255) * 3) >> 8

    else:

        @device
        def part(source, i):
            value, place = unit_and_place(source, i)
            return ((value >> (start + step * place)) & mask) << left

    return part


def make_number(block: Block, which: Numbers) -> Any:
    """A function (address of a block, i): number i of those."""
    cuts = block.cuts(which)
    return _join(cuts, n_numbers(cuts))


def _join(cuts: tuple[Cut, ...], n: int) -> Any:
    cut, *others = cuts
    part, first, stop = _make_part(cut), cut.first, cut.first + cut.n
    if first > 0 or stop < n:
        whole = part

        @device
        def part(source, i):
            value = 0
            if first <= i < stop:
                value = whole(source, i - first)
            return value

    if not others:
        return part
    rest = _join(tuple(others), n)

    @device
    def number(source, i):
        return part(source, i) | rest(source, i)

    return number


def make_quant(block: Block) -> Any:
    """A function (address of a block, i): quant i."""
    number, book = make_number(block, block.quant_numbers), block.quants
    if not isinstance(book, Codebook):
        return number
    entries, sign, has_codes = book.grid.reshape(-1), book.sign, book.has_codes
    width = book.grid.shape[1]
    by_width, by_sign = _divider(width), _divider(book.sign_weights)
    sign_number = make_number(block, book.signs)

    @device
    def quant(source, i):
        entry, within = by_width(i)
        which, of_code = by_sign(i)
        bits = sign_number(source, which)
        if has_codes:
            even = bits ^ (bits >> 4)
            even = even ^ (even >> 2)
            even = even ^ (even >> 1)
            bits = ((bits | (even & 1) << 7) >> of_code) & 1
        return np.int64(entries[number(source, entry) * width + within]) | (bits * sign)

    return quant


def _make_float(block: Block, which: Numbers, values: Any) -> Any:
    """A function (address of a block, i): number i of those, as a float."""
    number = make_number(block, which)
    if values is not None:

        @device
        def entry(source, i):
            return values[number(source, i)]

        return entry

    @device
    def half(source, i):
        bits = stack_bytes(64)
        store_u16(bits, number(source, i))
        return load_f16(bits)

    return half


def _make_scale(block: Block) -> Any:
    """A function (address of a block, g): what multiplies the levels of group g."""
    d = _make_float(block, block.scale, block.scale_values)
    factor, times, plus = np.float32(block.factor), block.times, block.plus
    if not block.scales:
        has_many = n_numbers(block.cuts(block.scale)) > 1

        @device
        def plain(source, g):
            return d(source, g if has_many else 0) * factor

        return plain
    number = make_number(block, block.scales)

    @device
    def scale(source, g):
        return d(source, 0) * factor * np.float32(times * number(source, g) + plus)

    return scale


def _make_level(block: Block) -> Any:
    """A function: what a quant stands for, as a float."""
    offset = block.offset
    if block.values is None:

        @device
        def shifted(q):
            return np.float32(q - offset)

        return shifted
    values = np.array(block.values, np.float32)

    @device
    def value(q):
        return values[q]

    return value


def n_groups(block: Block) -> int:
    """Groups of a block's weights that have a scale of their own."""
    return n_numbers(block.cuts(block.scales or block.scale))


def make_reader(block: Block, block_size: int) -> Any:
    """A function (address of a block, address of float32): writes the block's weights."""
    n, size = n_groups(block), block_size // n_groups(block)
    scale_of, quant, level = _make_scale(block), make_quant(block), _make_level(block)
    if not block.minimum:

        @device
        def read(source, target):
            for g in range(n):
                scale = scale_of(source, g)
                for i in range(size * g, size * (g + 1)):
                    store_f32(target + 4 * i, scale * level(quant(source, i)))

        return read
    minimum = _make_float(block, block.minimum, None)
    if not block.minimums:

        @device
        def read_shifted(source, target):
            scale = scale_of(source, 0)
            low = minimum(source, 0)
            for i in range(size):
                store_f32(target + 4 * i, scale * level(quant(source, i)) + low)

        return read_shifted
    multiple = make_number(block, block.minimums)

    @device
    def read_groups(source, target):
        for g in range(n):
            scale = scale_of(source, g)
            low = minimum(source, 0) * np.float32(multiple(source, g))
            for i in range(size * g, size * (g + 1)):
                store_f32(target + 4 * i, scale * level(quant(source, i)) - low)

    return read_groups


def make_put(block: Block, which: Numbers) -> Any:
    """A function (uint8 [bytes of a block], numbers): writes them where the bytes have zeros."""
    put = None
    for cut in block.cuts(which):
        put = _make_put_part(cut, put)
    return put


def _make_put_part(cut: Cut, before: Any) -> Any:
    at, stride, inner, unit, n_units, run = cut.at, cut.stride, cut.inner, cut.unit, cut.n_units, cut.run
    mask, left, first, n = cut.mask, cut.left, cut.first, len(cut.shifts)
    start = cut.shifts[0]
    step = cut.shifts[1] - start if n > 1 else 0
    has_more = before is not None
    before = before if has_more else _nothing

    @njit(**EXACT)
    def put(into, numbers):
        if has_more:
            before(into, numbers)
        for j in range(n_units):
            value = 0
            for k in range(n):
                number = np.int64(numbers[first + (j // run * n + k) * run + j % run])
                value |= ((number >> left) & mask) << (start + step * k)
            place = at + j // inner * stride + j % inner * unit
            for byte in range(unit):
                into[place + byte] |= (value >> (8 * byte)) & 255

    return put


@njit(**EXACT)
def _nothing(into, numbers):
    pass
