"""Products of weights and inputs, added to the integer sums of a tile by each instruction set's own ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from kukri.kernels.cpu.codegen.dots import (
    I16X16,
    I16X32,
    add_pairs,
    dot2,
    dot4_short,
    dot4_signed,
    even_and_odd,
    matrix_dot,
    sdot,
)
from kukri.kernels.cpu.codegen.tiles import (
    Tile,
    each,
    entry_of,
    of_token,
    same,
    tile_operation,
)
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    at,
    broadcast,
    join,
    pointer,
    prefetch_line,
    renamed,
    split,
)
from kukri.kernels.cpu.compile.simd import (
    I32x16,
    U8x64,
)
from kukri.kernels.cpu.pack.layouts import (
    GROUP,
    ODD_INPUTS,
)

_I1, _I32, _I64 = (ir.IntType(n) for n in (1, 32, 64))
_I8x16 = ir.VectorType(ir.IntType(8), 16)


# ARM's smmla multiplies 2 rows by 2 tokens, 8 bytes of each, and adds the products to 4 int32. In tiles of
# weights for it (layouts.py), word vectors have 8 bytes of each of rows 0 to 7 or, odd ones, of rows 8 to 15.
# Sums of two or more tokens stay as smmla leaves them, floats too, until a tile is stored (`Tile.has_pairs`):
# vector i has rows 0 to 7 or, if i is odd, 8 to 15, of tokens i & -2 and the next; lanes are
#   two rows of the one, the same two rows of the other, the next two rows of the one, …
# so they meet two rows, twice (`of_rows`), or each of two tokens, twice (`of_tokens`).
#
# One token is multiplied by sdot. Its sums have two lanes for each row (I32x32), added at last (`row_sums`).


def _matrix_dots(builder: Any, kind: Tile, acc: Any, w: Any, x: Any, group: Any) -> Any:
    """acc with the products of vector `group` of weights and 8 inputs of the block at x."""
    where = at(builder, x, builder.mul(builder.and_(group, _I64(-2)), _I64(GROUP * kind.width)))
    is_last = builder.trunc(group, _I1)

    def add(dot: Callable[..., Any], sums: Any, inputs: Any, half: int) -> Any:
        added = dot(builder, sums, inputs, w)
        # `group` is a constant, or 2j or 2j + 1, so that LLVM keeps one of the two
        return builder.select(is_last, *((added, sums) if half else (sums, added)))

    if kind.n == 1:
        inputs = broadcast(builder, builder.load(pointer(builder, where, _I64), align=1), 2)
        inputs = builder.bitcast(inputs, _I8x16)
        halves = enumerate(split(builder, entry_of(builder, kind, acc, 0)))
        both = [add(sdot, sums, inputs, half) for half, sums in halves]
        return builder.insert_value(acc, join(builder, *both), 0)

    def step(i: int) -> Any:
        inputs = builder.load(pointer(builder, at(builder, where, 8 * (i & -2)), _I8x16), align=1)
        sums = entry_of(builder, kind, acc, i)
        return add(matrix_dot, sums, inputs, i & 1)

    return each(builder, kind, step)


class Fetching(NamedTuple):
    """How a CPU is asked for the weights that are multiplied soon."""

    from_tokens: int = 1  # the least tokens of a tile for which it is asked
    ahead_bytes: int = 4096
    nearness: int = 3  # the cache that they come to: L1, or L2 with 2


# By the CPU's name, as measured. On Zen 4 products of one token are faster without, by up to a half, from
# memory and from L2, by its own prefetchers. Intel's cores wait for more lines in L2 than in L1: from memory
# Q4_0, Q5_K and Q6_K are 10 to 20% faster so. On Zen 5 L2 is slower.
_TO_L2 = Fetching(ahead_bytes=8192, nearness=2)


ZEN_4 = ("znver4", "x86-64 zen4")
_FETCHING = {
    **dict.fromkeys(ZEN_4, Fetching(from_tokens=8)),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids", "graniterapids", "x86-64 sapphirerapids"), _TO_L2),
}


def fetch_ahead(n_lines: int) -> Any:
    """An operation: prefetches `n_lines` cache lines some way after an address, if the CPU gains by it."""

    @tile_operation(lambda tile: types.void, types.int64)
    def fetch_lines_ahead(builder: Any, kind: Tile, tile: Any, address: Any) -> None:
        """Prefetches the weights that are multiplied soon."""
        fetching = _FETCHING.get(cpu_target().name, Fetching())
        if kind.half != 1 and kind.n >= fetching.from_tokens:
            for line in range(n_lines):
                where = at(builder, address, fetching.ahead_bytes + 64 * line)
                prefetch_line(builder, where, fetching.nearness)

    return fetch_lines_ahead


def _in_order(builder: Any, kind: Tile, sums: Any) -> Any:
    """The same value, out of an empty instruction that the compiler cannot look into."""
    halves = split(builder, sums)
    same = ir.FunctionType(halves[0].type, [halves[0].type])
    for i in (0, 1) if kind.half is None else (kind.half,):
        halves[i] = builder.call(ir.InlineAsm(same, "", "=x,0", side_effect=True), [halves[i]])
    return join(builder, *halves)


def _tile_dot(dot4: Callable[..., Any], is_signed: bool) -> Callable[..., Any]:
    def emit(builder: Any, kind: Tile, acc: Any, w: Any, x: Any, group: Any) -> Any:
        # AVX2's sums are plain additions, which LLVM makes trees of: with several tokens, the trees' leaves
        # are more than there are registers
        may_spill = kind.n > 1 and cpu_target().lowering == "avx2"
        if kind.is_for_matrix:
            return _matrix_dots(builder, kind, acc, w, x, group)
        if kind.is_q16:
            even, odd = even_and_odd(builder, w, is_signed)
            dots = [(dot2, even, 0), (dot2, odd, ODD_INPUTS)]
        else:
            dots = [(dot4, w, 0)]

        def step(i: int) -> Any:
            sums = entry_of(builder, kind, acc, i)
            for dot, weights, offset in dots:
                part = builder.add(builder.mul(group, _I64(GROUP)), _I64(offset))
                word = of_token(builder, kind, x, part, i, _I32)
                inputs = builder.bitcast(broadcast(builder, word), weights.type)
                sums = dot(builder, sums, weights, inputs)
                sums = _in_order(builder, kind, sums) if may_spill else sums
            return sums

        return each(builder, kind, step)

    emit.__doc__ = (
        """acc[i] += the products of 16 x 4 weights and the 4 inputs of a group of the block at x."""
    )
    return emit


def sums_int16(kind: Tile) -> bool:
    """True if runs are added up in int16."""
    return cpu_target().lowering == "avx2" and not kind.is_q16


@tile_operation(same)
def tile_short_start(builder: Any, kind: Tile, acc: Any) -> Any:
    """Initial sums of a run of `tile_dot4_short`, to be added to `acc` by `tile_short_end`."""
    return ir.Constant(kind.llvm, None) if sums_int16(kind) else acc


tile_dot4_short = tile_operation(same, U8x64, types.int64, types.int64)(
    renamed("tile_dot4_short", _tile_dot(dot4_short, is_signed=False))
)


@tile_operation(same, None)
def tile_short_end(builder: Any, kind: Tile, acc: Any, short: Any) -> Any:
    """`acc` with the run added that `tile_short_start(acc)` began."""
    return _widen_run(builder, kind, acc, short, [None, None]) if sums_int16(kind) else short


def _widen_run(builder: Any, kind: Tile, acc: Any, short: Any, factors: list[Any]) -> Any:
    """`acc` with a run in int16 added, times the factors of both halves of its rows."""

    def step(i: int) -> Any:
        total, run = entry_of(builder, kind, acc, i), entry_of(builder, kind, short, i)
        halves = zip(split(builder, total), split(builder, run), factors, strict=True)
        return join(builder, *(add_pairs(builder, a, builder.bitcast(b, I16X16), c) for a, b, c in halves))

    return each(builder, kind, step)


@tile_operation(same, None, I32x16)
def tile_scaled_short_end(builder: Any, kind: Tile, acc: Any, short: Any, scales: Any) -> Any:
    """Like `tile_short_end` for half a block, of which `scales` has the scale of each row, twice, as int16.

    On AVX2 the instruction that widens a run multiplies it too; elsewhere the functions that take the sums of
    both halves do.
    """
    if not sums_int16(kind):
        return short
    return _widen_run(builder, kind, acc, short, split(builder, builder.bitcast(scales, I16X32)))


tile_dot4_signed = tile_operation(same, U8x64, types.int64, types.int64)(
    renamed("tile_dot4_signed", _tile_dot(dot4_signed, is_signed=True))
)


@tile_operation(same, U8x64, types.int64, types.int64)
def tile_dot2(builder: Any, kind: Tile, acc: Any, w: Any, x: Any, pair: Any) -> Any:
    """acc[i] += the products of 16 x 2 int16 and a pair of inputs of the i16 block at x."""
    may_spill = kind.n > 1 and cpu_target().lowering == "avx2"  # as in `_tile_dot`
    weights = builder.bitcast(w, I16X32)

    def step(i: int) -> Any:
        word = of_token(builder, kind, x, builder.mul(pair, _I64(4)), i, _I32)
        inputs = builder.bitcast(broadcast(builder, word), I16X32)
        sums = dot2(builder, entry_of(builder, kind, acc, i), weights, inputs)
        return _in_order(builder, kind, sums) if may_spill else sums

    return each(builder, kind, step)


@tile_operation(same, U8x64, types.int64, types.int64)
def tile_dot2_rows(builder: Any, kind: Tile, acc: Any, w: Any, address: Any, stride: Any) -> Any:
    """acc[i] += the products of 16 x 2 int16 and the pair of int16 at address + i * stride."""
    may_spill = kind.n > 1 and cpu_target().lowering == "avx2"  # as in `_tile_dot`
    weights = builder.bitcast(w, I16X32)

    def step(i: int) -> Any:
        where = at(builder, address, builder.mul(stride, _I64(i)))
        word = broadcast(builder, builder.load(pointer(builder, where, _I32), align=4))
        sums = dot2(builder, entry_of(builder, kind, acc, i), weights, builder.bitcast(word, I16X32))
        return _in_order(builder, kind, sums) if may_spill else sums

    return each(builder, kind, step)
