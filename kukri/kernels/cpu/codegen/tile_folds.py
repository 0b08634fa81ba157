"""Sums of a block: what they begin with, and how they are scaled and folded into a tile of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kukri.kernels.cpu.codegen.dots import (
    I16X32,
    dot2,
    pair_words,
    row_sums,
)
from kukri.kernels.cpu.codegen.tile_products import ZEN_4, sums_int16
from kukri.kernels.cpu.codegen.tiles import (
    I32x32,
    Tile,
    as_sums,
    each,
    entry_of,
    fma,
    of_rows,
    of_token,
    of_tokens,
    same,
    tile_operation,
)
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    at,
    broadcast,
    constant,
    pointer,
    renamed,
)
from kukri.kernels.cpu.compile.simd import (
    F32x16,
    I32x16,
)
from kukri.kernels.cpu.pack.layouts import (
    HALF_STARTS,
    LAST_NEGATIVE_SUMS,
    NEGATIVE_SUMS,
    NEGATIVE_TOTAL,
    RAISED_BITS,
    SCALED_SUMS,
    SCALES,
)

_I1, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 16, 32, 64))
_F32 = ir.FloatType()


def _as_i32(tile: Tile) -> Tile:
    return Tile(I32x16, tile.n, tile.width, tile.inputs, tile.half)


def _both_sums(builder: Any, kind: Tile, x: Any, i: int) -> Any:
    """-(sums of both halves) of the q8 block at x: a pair of int16 for each lane of vector i."""
    return builder.bitcast(of_tokens(builder, kind, x, NEGATIVE_SUMS, i, _I32), I16X32)


def _half_sum(builder: Any, kind: Tile, x: Any, half: int, i: int) -> Any:
    """-(sum of a half of the q16 block at x, of token i)."""
    part = LAST_NEGATIVE_SUMS if half else NEGATIVE_SUMS
    return of_token(builder, kind, x, _I64(part), i, _I32)


@tile_operation(lambda tile: types.boolean)
def tile_scales_weights(builder: Any, kind: Tile, tile: Any) -> Any:
    """True if scales are multiplied with weights, once for all tokens: of AVX-512 and several tokens."""
    scales = cpu_target().has_wide_registers and kind.n >= 4 and not kind.is_q16
    return ir.Constant(_I1, int(scales))


@tile_operation(as_sums, types.int64, types.int64)
def tile_offset_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any) -> Any:
    """A tile of int32: -(sum of the block at x) << shift, the initial sums for weights q - 2^shift."""
    return _offset_starts(builder, kind, x, shift)


def _offset_starts(builder: Any, kind: Tile, x: Any, shift: Any) -> Any:
    result = as_sums(kind)

    def step(i: int) -> Any:
        if kind.is_q16:
            total = builder.add(*(_half_sum(builder, kind, x, half, i) for half in (0, 1)))
            totals = broadcast(builder, total)
        else:
            totals = of_tokens(builder, kind, x, NEGATIVE_TOTAL, i, _I32)
        starts = builder.shl(totals, broadcast(builder, builder.trunc(shift, _I32)))
        return _as_start(builder, result, starts)

    return each(builder, kind, step)


# The bits of the float 1.5 * 2^23 plus a whole number within 2^22, added up as int32, are the float sum's.
# Sums that begin with those bits are *raised*: they are floats without a conversion, and an FMA takes
# 1.5 * 2^23 away while it multiplies, exactly. Sums of 16-bit inputs are too large and begin with 0.
_RAISED = 1.5 * 2**23


def _start_bits(kind: Tile) -> int:
    """What sums begin with that may be raised: not those of one token on AVX2, where it takes longer."""
    return 0 if kind.is_q16 or (kind.n == 1 and cpu_target().lowering == "avx2") else RAISED_BITS


@tile_operation(as_sums)
def tile_raised_start(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of int32, the initial sums of a block that `tile_fold_raised` takes: see `_start_bits`."""
    result, start = as_sums(kind), constant(I32x16.llvm, _start_bits(kind))
    return each(builder, kind, lambda i: _as_start(builder, result, start))


@tile_operation(as_sums, types.int64, types.int64)
def tile_raised_offset_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any) -> Any:
    """The same for weights q - 2^shift."""
    if kind.is_q16:
        return _offset_starts(builder, kind, x, shift)
    result, start = as_sums(kind), constant(I32x16.llvm, _start_bits(kind))

    def step(i: int) -> Any:
        # as measured, Zen 4 shifts and adds while it multiplies, where a `dot2` of several tokens' sums takes
        # the place of one with weights
        if cpu_target().lowering == "dotprod" or (kind.n > 1 and cpu_target().name in ZEN_4):
            totals = of_tokens(builder, kind, x, NEGATIVE_TOTAL, i, _I32)
            starts = builder.add(builder.shl(totals, broadcast(builder, builder.trunc(shift, _I32))), start)
        else:
            factors = broadcast(builder, builder.shl(_I16(1), builder.trunc(shift, _I16)), 32)
            starts = dot2(builder, start, factors, _both_sums(builder, kind, x, i))
        return _as_start(builder, result, starts)

    return each(builder, kind, step)


def _as_start(builder: Any, sums: Tile, starts: Any) -> Any:
    """A vector of sums with a start for each row."""
    if sums.vec is I32x16:
        return starts
    return builder.bitcast(builder.zext(starts, ir.VectorType(_I64, 16)), I32x32.llvm)  # in one lane of two


@tile_operation(as_sums, types.int64, types.int64, types.int64)
def tile_raised_half_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any, half: Any) -> Any:
    """Like `tile_raised_offset_start` for a half of the block at x."""
    return _half_starts(builder, kind, x, shift, half)


@tile_operation(as_sums, types.int64, types.int64, types.int64)
def tile_half_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any, half: Any) -> Any:
    """A tile of int32, the initial sums of a half of the block at x that `tile_fold_halves` takes."""
    if _are_raised(kind, are_short=False):
        return _half_starts(builder, kind, x, shift, half)
    return ir.Constant(as_sums(kind).llvm, None)


@tile_operation(as_sums, types.int64, types.int64, types.int64)
def tile_short_half_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any, half: Any) -> Any:
    """A tile of int32, the initial sums of a half of the block at x that `tile_fold_short_halves` takes."""
    if _are_raised(kind, are_short=True):
        return _half_starts(builder, kind, x, shift, half)
    return ir.Constant(as_sums(kind).llvm, None)


def _are_raised(kind: Tile, are_short: bool) -> bool:
    """True if sums of halves begin raised and without the weights' offset: where that is the sooner way."""
    is_short = are_short and cpu_target().lowering != "dotprod"  # where `dot2` is no instruction
    return not (kind.is_q16 or sums_int16(kind) or is_short)


def _half_starts(builder: Any, kind: Tile, x: Any, shift: Any, half: Any) -> Any:
    """A tile of int32: `_start_bits` - (sum of a half of the block at x) << shift."""
    result, is_last, start_bits = as_sums(kind), builder.trunc(half, _I1), _start_bits(kind)
    raised, left = constant(I32x16.llvm, RAISED_BITS), builder.trunc(shift, _I32)

    def of_half(i: int, part: int) -> Any:
        if kind.is_q16:
            sums = broadcast(builder, _half_sum(builder, kind, x, part, i))
            return builder.shl(sums, broadcast(builder, left))
        of_32 = of_tokens(builder, kind, x, HALF_STARTS[part], i, _I32)
        if cpu_target().lowering == "dotprod":
            # no number is too large for it, so that LLVM makes one shift of both, or none
            sums = builder.shl(builder.sub(of_32, raised), broadcast(builder, left), flags=["nsw"])
            return builder.add(builder.ashr(sums, constant(sums.type, 5)), raised)
        factor = builder.shl(_I32(1), builder.add(left, _I32(16 * part)))
        factors = builder.bitcast(broadcast(builder, factor), I16X32)
        others = dot2(builder, constant(I32x16.llvm, start_bits), factors, _both_sums(builder, kind, x, i))
        if not start_bits:
            return others
        is_32 = broadcast(builder, builder.icmp_signed("==", left, _I32(5)))
        return builder.select(is_32, of_32, others)  # both constants: LLVM keeps one of the two

    def step(i: int) -> Any:
        return _as_start(builder, result, builder.select(is_last, of_half(i, 1), of_half(i, 0)))

    return each(builder, kind, step)


@tile_operation(same, F32x16, types.int64)
def tile_add_min(builder: Any, kind: Tile, acc: Any, v: Any, x: Any) -> Any:
    """acc[i] += v * (the scaled sum of the block at x): the mins of a block."""

    def step(i: int) -> Any:
        factor = of_tokens(builder, kind, x, SCALED_SUMS, i, _F32)
        return fma(builder, of_rows(builder, kind, v, i), factor, entry_of(builder, kind, acc, i))

    return each(builder, kind, step)


@tile_operation(same, None, F32x16, types.int64)
def tile_fold(builder: Any, kind: Tile, out: Any, acc: Any, scale: Any, x: Any) -> Any:
    """out[i] += float(acc[i]) * scale * (the scale of the block at x): one block's integer sums."""

    def step(i: int) -> Any:
        sums = row_sums(builder, entry_of(builder, kind, acc, i))
        factor = of_tokens(builder, kind, x, kind.scales, i, _F32)
        return _fold(builder, entry_of(builder, kind, out, i), sums, of_rows(builder, kind, scale, i), factor)

    return each(builder, kind, step)


@tile_operation(same, None, F32x16, types.int64)
def tile_fold_raised(builder: Any, kind: Tile, out: Any, acc: Any, scale: Any, x: Any) -> Any:
    """`tile_fold` of raised sums, the same to the bit; for finite scales of up to 22 bits."""
    taken = builder.fmul(scale, constant(F32x16.llvm, -_RAISED))

    def step(i: int) -> Any:
        sums = row_sums(builder, entry_of(builder, kind, acc, i))
        factor = of_tokens(builder, kind, x, kind.scales, i, _F32)
        result, scales = entry_of(builder, kind, out, i), of_rows(builder, kind, scale, i)
        if not _start_bits(kind):
            return _fold(builder, result, sums, scales, factor)
        floats = builder.bitcast(sums, F32x16.llvm)
        scaled = fma(builder, floats, scales, of_rows(builder, kind, taken, i))
        return fma(builder, scaled, factor, result)

    return each(builder, kind, step)


@tile_operation(lambda tile: types.void, F32x16, types.int64, types.int64)
def tile_fold_into(builder: Any, kind: Tile, acc: Any, scale: Any, x: Any, address: Any) -> None:
    """The same for sums in memory: 16 float32 at address + 64 * i are out[i]."""
    for i in range(kind.n):
        place = pointer(builder, at(builder, address, 64 * i), F32x16.llvm)
        factor = of_tokens(builder, kind, x, kind.scales, i, _F32)
        sums = _fold(builder, builder.load(place, align=1), entry_of(builder, kind, acc, i), scale, factor)
        builder.store(sums, place, align=1)


# Two halves of a block, 16 inputs each, may have scales of their own: `pairs` are those of each row, int16.
# All is whole numbers up to the float scale d, of up to 24 bits, which floats hold; only scaled sums of int16
# inputs are larger. Runs of both halves end with `tile_scaled_short_end`.


def _scaled_sum(builder: Any, kind: Tile, halves: list[Any], pairs: Any, are_short: bool) -> Any:
    """Both halves' sums times the first and the last of pairs, int32; `are_short`: they are within int16."""
    first, last = halves
    if sums_int16(kind):  # as tile_scaled_short_end has multiplied them
        return builder.add(first, last)
    if are_short and cpu_target().lowering != "dotprod":
        low = builder.and_(first, constant(I32x16.llvm, 0xFFFF))
        both = builder.or_(low, builder.shl(last, constant(I32x16.llvm, 16)))
        zero = constant(I32x16.llvm, 0)
        return dot2(builder, zero, builder.bitcast(both, I16X32), builder.bitcast(pairs, I16X32))
    a, b = pair_words(builder, pairs)
    return builder.add(builder.mul(first, a), builder.mul(last, b))


def _fold(builder: Any, out: Any, sums: Any, scale: Any, factor: Any) -> Any:
    """out + float(sums) * scale * factor."""
    return fma(builder, builder.fmul(builder.sitofp(sums, F32x16.llvm), scale), factor, out)


def _fold_both(builder: Any, out: Any, halves: list[Any], scales: list[Any], factor: Any) -> Any:
    """out + (the halves' sums, raised, times scales) * factor.

    In floats, x86 takes four instructions for it, and eight in whole numbers, whose products are two each.
    """
    raised = constant(F32x16.llvm, _RAISED)
    first, last = (builder.bitcast(sums, F32x16.llvm) for sums in halves)
    taken = builder.fmul(scales[0], constant(F32x16.llvm, -_RAISED))
    scaled = fma(builder, builder.fsub(last, raised), scales[1], fma(builder, first, scales[0], taken))
    return fma(builder, scaled, factor, out)


def _tile_fold_halves(are_short: bool) -> Callable[..., Any]:
    def emit(
        builder: Any, kind: Tile, out: Any, first: Any, last: Any, pairs: Any, shift: Any, x: Any
    ) -> Any:
        scales = [builder.sitofp(word, F32x16.llvm) for word in pair_words(builder, pairs)]
        offsets = builder.shl(
            builder.bitcast(pairs, I16X32), broadcast(builder, builder.trunc(shift, _I16), 32)
        )

        def step(i: int) -> Any:
            result = entry_of(builder, kind, out, i)
            halves = [row_sums(builder, entry_of(builder, kind, tile, i)) for tile in (first, last)]
            factor = of_tokens(builder, kind, x, SCALES, i, _F32)
            if kind.is_q16:
                for half, (sums, scale) in enumerate(zip(halves, scales, strict=True)):
                    offset = builder.shl(_half_sum(builder, kind, x, half, i), builder.trunc(shift, _I32))
                    sums = builder.add(sums, broadcast(builder, offset))
                    result = _fold(builder, result, sums, scale, factor)
                return result
            if _are_raised(kind, are_short):
                own = [of_rows(builder, kind, scale, i) for scale in scales]
                return _fold_both(builder, result, halves, own, factor)
            sums = _scaled_sum(builder, kind, halves, of_rows(builder, kind, pairs, i), are_short)
            sums = dot2(builder, sums, offsets, _both_sums(builder, kind, x, i))
            return fma(builder, builder.sitofp(sums, F32x16.llvm), factor, result)

        return each(builder, kind, step)

    emit.__doc__ = (
        """out[i] += the sums of both halves of the block at x, of weights q - 2^shift, times pairs."""
    )
    return emit


tile_fold_halves, tile_fold_short_halves = (
    tile_operation(same, None, None, I32x16, types.int64, types.int64)(
        renamed(name, _tile_fold_halves(are_short))
    )
    for name, are_short in (("tile_fold_halves", False), ("tile_fold_short_halves", True))
)


@tile_operation(_as_i32, None, I32x16)
def tile_scale_halves(builder: Any, kind: Tile, first: Any, last: Any, pairs: Any) -> Any:
    """first[i] * (the first of pairs) + last[i] * (the last), whole numbers; of int8 inputs within int16."""

    def step(i: int) -> Any:
        halves = [row_sums(builder, entry_of(builder, kind, tile, i)) for tile in (first, last)]
        scales = of_rows(builder, kind, pairs, i)
        return _scaled_sum(builder, kind, halves, scales, are_short=not kind.is_q16)

    return each(builder, kind, step)


@tile_operation(same, None, types.int64)
def tile_fold_sums(builder: Any, kind: Tile, out: Any, acc: Any, x: Any) -> Any:
    """out[i] += acc[i] * the scale of the block at x."""

    def step(i: int) -> Any:
        sums = builder.sitofp(row_sums(builder, entry_of(builder, kind, acc, i)), F32x16.llvm)
        factor = of_tokens(builder, kind, x, SCALES, i, _F32)
        return fma(builder, sums, factor, entry_of(builder, kind, out, i))

    return each(builder, kind, step)


@tile_operation(same, I32x16, types.int64)
def tile_fold_mins(builder: Any, kind: Tile, out: Any, pairs: Any, x: Any) -> Any:
    """out[i] -= both halves' sums times pairs * the scale, all of the block at x."""
    mins = [builder.sitofp(word, F32x16.llvm) for word in pair_words(builder, pairs)]

    def step(i: int) -> Any:
        result = entry_of(builder, kind, out, i)
        factor = of_tokens(builder, kind, x, SCALES, i, _F32)
        if kind.is_q16:
            for half, low in enumerate(mins):
                total = broadcast(builder, _half_sum(builder, kind, x, half, i))
                result = _fold(builder, result, total, low, factor)
            return result
        zero = constant(I32x16.llvm, 0)
        scales = builder.bitcast(of_rows(builder, kind, pairs, i), I16X32)
        low = dot2(builder, zero, scales, _both_sums(builder, kind, x, i))
        return fma(builder, builder.sitofp(low, F32x16.llvm), factor, result)

    return each(builder, kind, step)
