"""Functions that read a block's numbers and weights, or write them, made from the facts of its type.

Facts and arithmetic are those of `kukri.quant.types.schema`. Functions for kernels take addresses, those for
quantizers NumPy arrays without bounds checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kukri.kernels.cpu.compile.intrinsics import (
    array_at,
    device,
    load_i8,
    load_i32,
    load_u8,
    load_u16,
    routine,
    stack_bytes,
    store_f32,
    store_u16,
)
from kukri.kernels.cpu.compile.simd import load_f16
from kukri.quant.types.schema import Block, Codebook, Numbers, Placement, n_numbers

_LOADS = {1: load_u8, 2: load_u16, 4: load_i32}
_POWERS = (1, 3, 9, 27, 81)
_integers = array_at(types.int32, 1)


def make_take(block: Block, which: Numbers) -> Any:
    """A function (address of a block, int32 [numbers], zeros): reads those numbers."""
    take = _none
    for place in block.places(which):
        take = _make_take_part(place, take)
    return take


@device
def _none(source, numbers):
    pass


def _make_take_part(place: Placement, before: Any) -> Any:
    at, stride, inner, unit = place.at, place.stride, place.inner, place.unit
    n_units, run = place.n_units, place.run
    mask, left, first, n = place.mask, place.left, place.first, len(place.shifts)
    start, step = place.shifts[0], (place.shifts[-1] - place.shifts[0]) // max(n - 1, 1)
    load = load_i8 if place.is_signed else _LOADS[unit]
    is_signed = place.is_signed

    @device
    def number(value, k):
        if is_signed:
            return value
        if mask == 0:
            return (((value * _POWERS[k]) & 255) * 3) >> 8
        return ((value >> (start + step * k)) & mask) << left

    @device
    def take(source, numbers):
        before(source, numbers)
        for chunk in range(n_units // run):
            for k in range(n):
                for i in range(run):
                    j = chunk * run + i
                    value = load(source + at + j // inner * stride + j % inner * unit)
                    numbers[first + (chunk * n + k) * run + i] |= number(value, k)

    return take


def make_take_quants(block: Block, block_size: int) -> Any:
    """A function (address of a block, int32 [block_size]): reads the quants."""
    book = block.quants
    if not isinstance(book, Codebook):
        take = make_take(block, block.quant_numbers)

        @device
        def take_quants(source, quants):
            quants[:] = 0
            take(source, quants)

        return take_quants
    take_index, take_signs = make_take(block, book.index), make_take(block, book.signs)
    entries, width, sign, per = book.grid.reshape(-1), book.grid.shape[1], book.sign, book.sign_weights
    n_entries, n_signs, has_codes = block_size // width, block_size // per, book.has_codes
    entries_bytes, signs_bytes = 4 * n_entries, 4 * n_signs

    @device
    def sign_of(signs, i):
        if has_codes:
            return signs[i >> 3] >> (i & 7) & 1
        return signs[i // per]

    @device
    def take_from_table(source, quants):
        index = _integers(stack_bytes(entries_bytes), (n_entries,))
        signs = _integers(stack_bytes(signs_bytes), (n_signs,))
        index[:] = 0
        signs[:] = 0
        take_index(source, index)
        take_signs(source, signs)
        if has_codes:
            for k in range(n_signs):
                even = signs[k] ^ (signs[k] >> 4)
                even = even ^ (even >> 2)
                signs[k] |= ((even ^ (even >> 1)) & 1) << 7
        for entry in range(n_entries):
            base = index[entry] * width
            for i in range(width):
                quants[entry * width + i] = entries[base + i] | sign_of(signs, entry * width + i) * sign

    return take_from_table


@device
def _of_half(bits):
    """The float16 of these bits."""
    place = stack_bytes(64)
    store_u16(place, bits)
    return load_f16(place)


def n_groups(block: Block) -> int:
    """Groups of a block's weights that have a scale of their own."""
    return n_numbers(block.places(block.scales or block.scale))


def make_reader(block: Block, block_size: int) -> Any:
    """A function (address of a block, address of float32): writes the block's weights."""
    n, n_scales = n_groups(block), n_numbers(block.places(block.scale))
    size, quants_bytes, groups_bytes = block_size // n, 4 * block_size, 4 * n
    take_quants = make_take_quants(block, block_size)
    take_d, take_s = make_take(block, block.scale), make_take(block, block.scales)
    take_m, take_t = make_take(block, block.minimum), make_take(block, block.minimums)
    has_table, has_scales = block.values is not None, bool(block.scales)
    has_minimum, has_minimums = bool(block.minimum), bool(block.minimums)
    values = np.array(block.values or (0,), np.float32)
    has_scale_table = block.scale_values is not None
    scale_values = block.scale_values if has_scale_table else np.zeros(1, np.float32)
    factor, times, plus, offset = np.float32(block.factor), block.times, block.plus, block.offset

    @device
    def level(q):
        return values[q] if has_table else np.float32(q - offset)

    @device
    def scale_of(d, s, g):
        number = d[g if n_scales > 1 else 0]
        scale = scale_values[number] if has_scale_table else _of_half(number)
        scale = scale * factor
        return scale * np.float32(times * s[g] + plus) if has_scales else scale

    @device
    def shifted(weight, m, t, g):
        if has_minimums:
            return weight - _of_half(m[0]) * np.float32(t[g])
        return weight + _of_half(m[0]) if has_minimum else weight

    @device
    def read(source, target):
        q = _integers(stack_bytes(quants_bytes), (block_size,))
        d = _integers(stack_bytes(groups_bytes), (n,))
        s = _integers(stack_bytes(groups_bytes), (n,))
        m = _integers(stack_bytes(4), (1,))
        t = _integers(stack_bytes(groups_bytes), (n,))
        d[:] = 0
        s[:] = 0
        m[:] = 0
        t[:] = 0
        take_quants(source, q)
        take_d(source, d)
        take_s(source, s)
        take_m(source, m)
        take_t(source, t)
        for g in range(n):
            scale = scale_of(d, s, g)
            for i in range(size * g, size * (g + 1)):
                store_f32(target + 4 * i, shifted(scale * level(q[i]), m, t, g))

    return read


def make_put(block: Block, which: Numbers) -> Any:
    """A function (uint8 [bytes of a block], numbers): writes them where the bytes have zeros."""
    put = _nothing
    for place in block.places(which):
        put = _make_put_part(place, put)
    return put


@routine
def _nothing(into, numbers):
    pass


def _make_put_part(place: Placement, before: Any) -> Any:
    at, stride, inner, unit = place.at, place.stride, place.inner, place.unit
    n_units, run = place.n_units, place.run
    mask, left, first, n = place.mask, place.left, place.first, len(place.shifts)
    start, step = place.shifts[0], (place.shifts[-1] - place.shifts[0]) // max(n - 1, 1)

    @routine
    def put(into, numbers):
        before(into, numbers)
        for chunk in range(n_units // run):
            for k in range(n):
                for i in range(run):
                    j = chunk * run + i
                    number = np.int32(numbers[first + (chunk * n + k) * run + i])
                    value = ((number >> left) & mask) << (start + step * k)
                    place = at + j // inner * stride + j % inner * unit
                    for byte in range(unit):
                        into[place + byte] |= (value >> (8 * byte)) & 255

    return put
