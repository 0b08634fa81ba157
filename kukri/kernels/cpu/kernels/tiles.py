"""Tiles: the vectors, one per token or per row, that a matrix kernel adds up in registers.

The operations unroll over a tile's vectors. All is written at 512 bits, as in `simd.py`; only the dot
products have a lowering per instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_model

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.kernels.dots import (
    I16X16,
    I16X32,
    add_pairs,
    dot2,
    dot4_short,
    dot4_signed,
    even_and_odd,
    matrix_dot,
    pair_words,
    row_sums,
    sdot,
)
from kukri.kernels.cpu.kernels.intrinsics import (
    at,
    broadcast,
    call_llvm,
    constant,
    join,
    named_intrinsic,
    pointer,
    prefetch_line,
    renamed,
    split,
)
from kukri.kernels.cpu.kernels.simd import (
    F32x16,
    I32x16,
    RegisterModel,
    U8x64,
    Vec,
)
from kukri.kernels.cpu.pack.layouts import (
    GROUP,
    I16_SCALES,
    LAST_NEGATIVE_SUMS,
    NEGATIVE_SUMS,
    NEGATIVE_TOTAL,
    ODD_INPUTS,
    Q8_BLOCK_BYTES,
    Q16_BLOCK_BYTES,
    SCALED_SUMS,
    SCALES,
)

_I1, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 16, 32, 64))
_F32 = ir.FloatType()
_I8x16 = ir.VectorType(ir.IntType(8), 16)
I32x32 = Vec("I32x32", _I32, 32)


class Tile(types.Type):  # type: ignore[misc]
    """The Numba type of `n` vectors of one kind, held in registers.

    Their inputs are in a panel that is `width` tokens wide, as `inputs`: f32, q8, q16 or i16. Lanes are rows:
    all 16, or the first or last 8 if `half` is 0 or 1.
    """

    def __init__(self, vec: Vec, n: int, width: int, inputs: str, half: int | None = None) -> None:
        self.vec, self.n, self.width, self.inputs, self.half = vec, n, width, inputs, half
        self.is_q16 = inputs == "q16"
        self.scales = I16_SCALES if inputs == "i16" else SCALES
        self.is_for_matrix = inputs == "q8" and cpu_target().has_int8_matrix
        self.has_pairs = self.is_for_matrix and n > 1  # vectors are of two tokens, until `tile_rows`
        vector = vec.llvm if half is None else ir.VectorType(vec.llvm.element, vec.llvm.count // 2)
        self.llvm = ir.ArrayType(vector, n)
        super().__init__(name=f"Tile({vec.name}, {n}, {width}, {inputs}, {half})")


register_model(Tile)(RegisterModel)


def _tile_operation(result: Callable[..., Any], *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like `operation`, for a first argument that is a Tile; emits with (builder, its type, it, *values)."""

    def define(emit: Callable[..., Any]) -> Any:
        names = ["tile", *(f"a{i}" for i in range(len(parameters)))]

        def typing(context: Any, tile: Tile, *others: Any) -> Any:
            takes = [other if p is None else p for p, other in zip(parameters, others, strict=True)]
            returns = result(tile)

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, tile, *values)
                return context.get_dummy_value() if returns is types.void else value

            return returns(tile, *takes), generate

        return named_intrinsic(emit.__name__, names, typing, emit.__doc__)

    return define


def _each(builder: Any, kind: Tile, make: Callable[[int], Any]) -> Any:
    """A tile as long as one of this kind, and of as many rows, whose entry i is make(i)."""
    entries = [make(i) for i in range(kind.n)]
    if kind.half is not None:
        entries = [split(builder, entry)[kind.half] for entry in entries]
    tile = ir.Constant(ir.ArrayType(entries[0].type, kind.n), ir.Undefined)
    for i, entry in enumerate(entries):
        tile = builder.insert_value(tile, entry, i)
    return tile


def _entry(builder: Any, kind: Tile, tile: Any, i: int) -> Any:
    """Entry i of a tile, with 16 lanes; those of rows that it does not have are undefined."""
    entry = builder.extract_value(tile, i)
    if kind.half is None:
        return entry
    others = ir.Constant(entry.type, ir.Undefined)
    return join(builder, *((others, entry) if kind.half else (entry, others)))


# --- matrix products of int8 --------------------------------------------------------------------------
# ARM's smmla multiplies 2 rows by 2 tokens, 8 bytes of each, and adds the products to 4 int32. In tiles of
# weights for it (layouts.py), word vectors have 8 bytes of each of rows 0 to 7 or, odd ones, of rows 8 to 15.
# Sums of two or more tokens stay as smmla leaves them, floats too, until a tile is stored (`Tile.has_pairs`):
# vector i has rows 0 to 7 or, if i is odd, 8 to 15, of tokens i & -2 and the next; lanes are
#   two rows of the one, the same two rows of the other, the next two rows of the one, …
# so they meet two rows, twice (`_of_rows`), or each of two tokens, twice (`_of_tokens`).
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
        halves = enumerate(split(builder, _entry(builder, kind, acc, 0)))
        both = [add(sdot, sums, inputs, half) for half, sums in halves]
        return builder.insert_value(acc, join(builder, *both), 0)

    def step(i: int) -> Any:
        inputs = builder.load(pointer(builder, at(builder, where, 8 * (i & -2)), _I8x16), align=1)
        sums = _entry(builder, kind, acc, i)
        return add(matrix_dot, sums, inputs, i & 1)

    return _each(builder, kind, step)


def _of_rows(builder: Any, kind: Tile, v: Any, i: int) -> Any:
    """What meets vector i of a tile, of a vector with a lane for each row."""
    if not kind.has_pairs:
        return v
    lanes = [8 * (i & 1) + 2 * pair + row for pair in range(4) for row in (0, 1, 0, 1)]
    return builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_I32, 16), lanes))


# --- tiles --------------------------------------------------------------------------------------------


class Fetching(NamedTuple):
    """How a CPU is asked for the weights that are multiplied soon."""

    from_tokens: int = 1  # the least tokens of a tile for which it is asked
    ahead_bytes: int = 4096
    nearness: int = 3  # the cache that they come to: L1, or L2 with 2


# By the CPU's name, as measured. On Zen 4 products of one token are faster without, by up to a half, from
# memory and from L2, by its own prefetchers. Intel's cores wait for more lines in L2 than in L1: from memory
# Q4_0, Q5_K and Q6_K are 10 to 20% faster so. On Zen 5 L2 is slower.
_TO_L2 = Fetching(ahead_bytes=8192, nearness=2)
_FETCHING = {
    **dict.fromkeys(("znver4", "x86-64 zen4"), Fetching(from_tokens=8)),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids", "graniterapids", "x86-64 sapphirerapids"), _TO_L2),
}


def fetch_ahead(n_lines: int) -> Any:
    """An operation: prefetches `n_lines` cache lines some way after an address, if the CPU gains by it."""

    @_tile_operation(lambda tile: types.void, types.int64)
    def fetch_lines_ahead(builder: Any, kind: Tile, tile: Any, address: Any) -> None:
        """Prefetches the weights that are multiplied soon."""
        fetching = _FETCHING.get(cpu_target().name, Fetching())
        if kind.half != 1 and kind.n >= fetching.from_tokens:
            for line in range(n_lines):
                where = at(builder, address, fetching.ahead_bytes + 64 * line)
                prefetch_line(builder, where, fetching.nearness)

    return fetch_lines_ahead


def make_tile_zeros(inputs: str, half: int | None = None) -> Any:
    """An operation: a tile of zeros for panels of these inputs, of all rows or of one half of them."""

    @intrinsic(prefer_literal=True)
    def zeros(context: Any, n: Any, width: Any) -> Any:
        """A tile of `n` zero vectors, for a panel of `width` tokens (any, without a panel); both literals."""
        tile = Tile(F32x16, n.literal_value, width.literal_value, inputs, half)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return ir.Constant(tile.llvm, None)

        return tile(n, width), generate

    return zeros


tile_zeros_f32 = make_tile_zeros("f32")


def _same(tile: Tile) -> Tile:
    return tile


def _as_i32(tile: Tile) -> Tile:
    return Tile(I32x16, tile.n, tile.width, tile.inputs, tile.half)


def _as_sums(tile: Tile) -> Tile:
    """The type of sums over a block, or a half, of a tile of outputs."""
    is_halved = tile.is_for_matrix and tile.n == 1
    return Tile(I32x32 if is_halved else I32x16, tile.n, tile.width, tile.inputs, tile.half)


@_tile_operation(_as_sums)
def tile_zeros_like(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of int32 zeros, as long as `tile`."""
    return ir.Constant(_as_sums(kind).llvm, None)


@_tile_operation(_same)
def tile_sums_like(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of float32 zeros, as long as `tile`, for sums over the groups of a block."""
    return ir.Constant(kind.llvm, None)


@_tile_operation(lambda tile: types.int64)
def panel_block_bytes(builder: Any, kind: Tile, tile: Any) -> Any:
    """Bytes of a panel block of 32 inputs."""
    return _I64(kind.width * (Q16_BLOCK_BYTES if kind.is_q16 else Q8_BLOCK_BYTES))


def _of_token(builder: Any, kind: Tile, x: Any, part: Any, i: int, element: Any) -> Any:
    """Token i's number in a part of the panel block at x, such as its scale."""
    where = at(builder, x, builder.add(builder.mul(part, _I64(kind.width)), _I64(4 * i)))
    return builder.load(pointer(builder, where, element), align=4)


def _of_tokens(builder: Any, kind: Tile, x: Any, part: int, i: int, element: Any) -> Any:
    """What meets vector i of a tile, of the tokens' numbers in a part of the panel block at x."""
    if not kind.has_pairs:
        return broadcast(builder, _of_token(builder, kind, x, _I64(part), i, element))
    where = at(builder, x, (part & -8) * kind.width + 8 * (i & -2))  # two columns of 8 bytes
    words = builder.load(pointer(builder, where, ir.VectorType(element, 4)), align=4)
    first = (part & 4) // 4
    lanes = [first, first, first + 2, first + 2] * 4
    return builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(_I32, 16), lanes))


def _both_sums(builder: Any, kind: Tile, x: Any, i: int) -> Any:
    """-(sums of both halves) of the q8 block at x: a pair of int16 for each lane of vector i."""
    return builder.bitcast(_of_tokens(builder, kind, x, NEGATIVE_SUMS, i, _I32), I16X32)


def _half_sum(builder: Any, kind: Tile, x: Any, half: int, i: int) -> Any:
    """-(sum of a half of the q16 block at x, of token i)."""
    part = LAST_NEGATIVE_SUMS if half else NEGATIVE_SUMS
    return _of_token(builder, kind, x, _I64(part), i, _I32)


@_tile_operation(lambda tile: types.boolean)
def tile_scales_weights(builder: Any, kind: Tile, tile: Any) -> Any:
    """True if scales are multiplied with weights, once for all tokens: of AVX-512 and several tokens."""
    scales = cpu_target().has_wide_registers and kind.n >= 4 and not kind.is_q16
    return ir.Constant(_I1, int(scales))


@_tile_operation(_as_sums, types.int64, types.int64)
def tile_offset_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any) -> Any:
    """A tile of int32: -(sum of the block at x) << shift, the initial sums for weights q - 2^shift."""
    result = _as_sums(kind)

    def step(i: int) -> Any:
        if kind.is_q16:
            total = builder.add(*(_half_sum(builder, kind, x, half, i) for half in (0, 1)))
            totals = broadcast(builder, total)
        else:
            totals = _of_tokens(builder, kind, x, NEGATIVE_TOTAL, i, _I32)
        starts = builder.shl(totals, broadcast(builder, builder.trunc(shift, _I32)))
        return _as_start(builder, result, starts)

    return _each(builder, kind, step)


def _as_start(builder: Any, sums: Tile, starts: Any) -> Any:
    """A vector of sums with a start for each row."""
    if sums.vec is I32x16:
        return starts
    return builder.bitcast(builder.zext(starts, ir.VectorType(_I64, 16)), I32x32.llvm)  # in one lane of two


def _starts_with_offsets(kind: Tile) -> bool:
    """True if sums of half a block have offsets from their start, as `dot2` is no instruction."""
    return cpu_target().lowering == "dotprod" and not kind.is_q16


@_tile_operation(_as_sums, types.int64, types.int64, types.int64)
def tile_half_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any, half: Any) -> Any:
    """A tile of int32, the initial sums of a half of the block at x that `tile_fold_halves` takes."""
    if not _starts_with_offsets(kind):
        return ir.Constant(_as_sums(kind).llvm, None)
    return _half_offsets(builder, kind, x, shift, half)


@_tile_operation(_as_sums, types.int64, types.int64, types.int64)
def tile_half_offset_start(builder: Any, kind: Tile, tile: Any, x: Any, shift: Any, half: Any) -> Any:
    """Like `tile_offset_start` for a half of the block at x."""
    return _half_offsets(builder, kind, x, shift, half)


def _half_offsets(builder: Any, kind: Tile, x: Any, shift: Any, half: Any) -> Any:
    """A tile of int32: -(sum of a half of the block at x) << shift."""
    result, is_last = _as_sums(kind), builder.trunc(half, _I1)

    def step(i: int) -> Any:
        if kind.is_q16:
            first, last = (broadcast(builder, _half_sum(builder, kind, x, k, i)) for k in (0, 1))
        else:
            first, last = pair_words(builder, _of_tokens(builder, kind, x, NEGATIVE_SUMS, i, _I32))
        starts = builder.select(is_last, last, first)
        shifted = builder.shl(starts, broadcast(builder, builder.trunc(shift, _I32)))
        return _as_start(builder, result, shifted)

    return _each(builder, kind, step)


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
            sums = _entry(builder, kind, acc, i)
            for dot, weights, offset in dots:
                part = builder.add(builder.mul(group, _I64(GROUP)), _I64(offset))
                word = _of_token(builder, kind, x, part, i, _I32)
                inputs = builder.bitcast(broadcast(builder, word), weights.type)
                sums = dot(builder, sums, weights, inputs)
                sums = _in_order(builder, kind, sums) if may_spill else sums
            return sums

        return _each(builder, kind, step)

    emit.__doc__ = (
        """acc[i] += the products of 16 x 4 weights and the 4 inputs of a group of the block at x."""
    )
    return emit


def _sums_int16(kind: Tile) -> bool:
    """True if runs are added up in int16."""
    return cpu_target().lowering == "avx2" and not kind.is_q16


@_tile_operation(_same)
def tile_short_start(builder: Any, kind: Tile, acc: Any) -> Any:
    """Initial sums of a run of `tile_dot4_short`, to be added to `acc` by `tile_short_end`."""
    return ir.Constant(kind.llvm, None) if _sums_int16(kind) else acc


tile_dot4_short = _tile_operation(_same, U8x64, types.int64, types.int64)(
    renamed("tile_dot4_short", _tile_dot(dot4_short, is_signed=False))
)


@_tile_operation(_same, None)
def tile_short_end(builder: Any, kind: Tile, acc: Any, short: Any) -> Any:
    """`acc` with the run added that `tile_short_start(acc)` began."""
    return _widen_run(builder, kind, acc, short, [None, None]) if _sums_int16(kind) else short


def _widen_run(builder: Any, kind: Tile, acc: Any, short: Any, factors: list[Any]) -> Any:
    """`acc` with a run in int16 added, times the factors of both halves of its rows."""

    def step(i: int) -> Any:
        total, run = _entry(builder, kind, acc, i), _entry(builder, kind, short, i)
        halves = zip(split(builder, total), split(builder, run), factors, strict=True)
        return join(builder, *(add_pairs(builder, a, builder.bitcast(b, I16X16), c) for a, b, c in halves))

    return _each(builder, kind, step)


@_tile_operation(_same, None, I32x16)
def tile_scaled_short_end(builder: Any, kind: Tile, acc: Any, short: Any, scales: Any) -> Any:
    """Like `tile_short_end` for half a block, of which `scales` has the scale of each row, twice, as int16.

    On AVX2 the instruction that widens a run multiplies it too; elsewhere the functions that take the sums of
    both halves do.
    """
    if not _sums_int16(kind):
        return short
    return _widen_run(builder, kind, acc, short, split(builder, builder.bitcast(scales, I16X32)))


tile_dot4_signed = _tile_operation(_same, U8x64, types.int64, types.int64)(
    renamed("tile_dot4_signed", _tile_dot(dot4_signed, is_signed=True))
)


@_tile_operation(_same, U8x64, types.int64, types.int64)
def tile_dot2(builder: Any, kind: Tile, acc: Any, w: Any, x: Any, pair: Any) -> Any:
    """acc[i] += the products of 16 x 2 int16 and a pair of inputs of the i16 block at x."""
    may_spill = kind.n > 1 and cpu_target().lowering == "avx2"  # as in `_tile_dot`
    weights = builder.bitcast(w, I16X32)

    def step(i: int) -> Any:
        word = _of_token(builder, kind, x, builder.mul(pair, _I64(4)), i, _I32)
        inputs = builder.bitcast(broadcast(builder, word), I16X32)
        sums = dot2(builder, _entry(builder, kind, acc, i), weights, inputs)
        return _in_order(builder, kind, sums) if may_spill else sums

    return _each(builder, kind, step)


@_tile_operation(_same, U8x64, types.int64, types.int64)
def tile_dot2_rows(builder: Any, kind: Tile, acc: Any, w: Any, address: Any, stride: Any) -> Any:
    """acc[i] += the products of 16 x 2 int16 and the pair of int16 at address + i * stride."""
    may_spill = kind.n > 1 and cpu_target().lowering == "avx2"  # as in `_tile_dot`
    weights = builder.bitcast(w, I16X32)

    def step(i: int) -> Any:
        where = at(builder, address, builder.mul(stride, _I64(i)))
        word = broadcast(builder, builder.load(pointer(builder, where, _I32), align=4))
        sums = dot2(builder, _entry(builder, kind, acc, i), weights, builder.bitcast(word, I16X32))
        return _in_order(builder, kind, sums) if may_spill else sums

    return _each(builder, kind, step)


def _as_f32(tile: Tile) -> Tile:
    return Tile(F32x16, tile.n, tile.width, tile.inputs, tile.half)


@_tile_operation(_as_f32, types.int64)
def tile_scaled(builder: Any, kind: Tile, tile: Any, address: Any) -> Any:
    """float(tile[i]) * (float32 at address + 4 * i)."""

    def step(i: int) -> Any:
        entry = _entry(builder, kind, tile, i)
        entry = builder.sitofp(entry, F32x16.llvm) if kind.vec is I32x16 else entry
        factor = builder.load(pointer(builder, at(builder, address, 4 * i), _F32), align=4)
        return builder.fmul(entry, broadcast(builder, factor))

    return _each(builder, kind, step)


@_tile_operation(_same, F32x16, types.int64, types.int64)
def tile_fma(builder: Any, kind: Tile, acc: Any, v: Any, address: Any, stride: Any) -> Any:
    """acc[i] += v * (float32 at address + i * stride)."""

    def step(i: int) -> Any:
        where = at(builder, address, builder.mul(stride, _I64(i)))
        factor = broadcast(builder, builder.load(pointer(builder, where, _F32), align=4))
        return _fma(builder, v, factor, _entry(builder, kind, acc, i))

    return _each(builder, kind, step)


@_tile_operation(_same, None)
def tile_sum(builder: Any, kind: Tile, a: Any, b: Any) -> Any:
    """A tile of a[i] + b[i]."""

    def step(i: int) -> Any:
        return builder.fadd(*(_entry(builder, kind, tile, i) for tile in (a, b)))

    return _each(builder, kind, step)


@_tile_operation(_same, None, F32x16)
def tile_add_scaled(builder: Any, kind: Tile, acc: Any, part: Any, scale: Any) -> Any:
    """acc[i] += part[i] * scale."""

    def step(i: int) -> Any:
        factor = _of_rows(builder, kind, scale, i)
        return _fma(builder, _entry(builder, kind, part, i), factor, _entry(builder, kind, acc, i))

    return _each(builder, kind, step)


@_tile_operation(_same, F32x16, types.int64)
def tile_add_min(builder: Any, kind: Tile, acc: Any, v: Any, x: Any) -> Any:
    """acc[i] += v * (the scaled sum of the block at x): the mins of a block."""

    def step(i: int) -> Any:
        factor = _of_tokens(builder, kind, x, SCALED_SUMS, i, _F32)
        return _fma(builder, _of_rows(builder, kind, v, i), factor, _entry(builder, kind, acc, i))

    return _each(builder, kind, step)


@_tile_operation(_same, None, F32x16, types.int64)
def tile_fold(builder: Any, kind: Tile, out: Any, acc: Any, scale: Any, x: Any) -> Any:
    """out[i] += float(acc[i]) * scale * (the scale of the block at x): one block's integer sums."""

    def step(i: int) -> Any:
        sums = row_sums(builder, _entry(builder, kind, acc, i))
        factor = _of_tokens(builder, kind, x, kind.scales, i, _F32)
        return _fold(builder, _entry(builder, kind, out, i), sums, _of_rows(builder, kind, scale, i), factor)

    return _each(builder, kind, step)


@_tile_operation(lambda tile: types.void, F32x16, types.int64, types.int64)
def tile_fold_into(builder: Any, kind: Tile, acc: Any, scale: Any, x: Any, address: Any) -> None:
    """The same for sums in memory: 16 float32 at address + 64 * i are out[i]."""
    for i in range(kind.n):
        place = pointer(builder, at(builder, address, 64 * i), F32x16.llvm)
        factor = _of_tokens(builder, kind, x, kind.scales, i, _F32)
        sums = _fold(builder, builder.load(place, align=1), _entry(builder, kind, acc, i), scale, factor)
        builder.store(sums, place, align=1)


# Two halves of a block, 16 inputs each, may have scales of their own: `pairs` are those of each row, int16.
# All is whole numbers up to the float scale d; only scaled sums of int16 inputs, too large, become floats.
# Runs of both halves end with `tile_scaled_short_end`.


def _scaled_sum(builder: Any, kind: Tile, first: Any, last: Any, pairs: Any, are_short: bool) -> Any:
    """first * (the first of pairs) + last * (the last), int32; `are_short`: both sums are within int16."""
    if _sums_int16(kind):  # as tile_scaled_short_end has multiplied them
        return builder.add(first, last)
    if are_short and cpu_target().lowering != "dotprod":
        low = builder.and_(first, constant(I32x16.llvm, 0xFFFF))
        both = builder.or_(low, builder.shl(last, constant(I32x16.llvm, 16)))
        zero = constant(I32x16.llvm, 0)
        return dot2(builder, zero, builder.bitcast(both, I16X32), builder.bitcast(pairs, I16X32))
    a, b = pair_words(builder, pairs)
    return builder.add(builder.mul(first, a), builder.mul(last, b))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", F32x16.llvm, a, b, c)


def _fold(builder: Any, out: Any, sums: Any, scale: Any, factor: Any) -> Any:
    """out + float(sums) * scale * factor."""
    return _fma(builder, builder.fmul(builder.sitofp(sums, F32x16.llvm), scale), factor, out)


def _tile_fold_halves(are_short: bool) -> Callable[..., Any]:
    def emit(
        builder: Any, kind: Tile, out: Any, first: Any, last: Any, pairs: Any, shift: Any, x: Any
    ) -> Any:
        scales = [builder.sitofp(word, F32x16.llvm) for word in pair_words(builder, pairs)]
        offsets = builder.shl(
            builder.bitcast(pairs, I16X32), broadcast(builder, builder.trunc(shift, _I16), 32)
        )

        def step(i: int) -> Any:
            result = _entry(builder, kind, out, i)
            halves = [row_sums(builder, _entry(builder, kind, tile, i)) for tile in (first, last)]
            factor = _of_tokens(builder, kind, x, SCALES, i, _F32)
            if not kind.is_q16:
                scale = _of_rows(builder, kind, pairs, i)
                sums = _scaled_sum(builder, kind, halves[0], halves[1], scale, are_short)
                if not _starts_with_offsets(kind):
                    sums = dot2(builder, sums, offsets, _both_sums(builder, kind, x, i))
                return _fma(builder, builder.sitofp(sums, F32x16.llvm), factor, result)
            for half, (sums, scale) in enumerate(zip(halves, scales, strict=True)):
                offset = builder.shl(_half_sum(builder, kind, x, half, i), builder.trunc(shift, _I32))
                sums = builder.add(sums, broadcast(builder, offset))
                result = _fold(builder, result, sums, scale, factor)
            return result

        return _each(builder, kind, step)

    emit.__doc__ = (
        """out[i] += the sums of both halves of the block at x, of weights q - 2^shift, times pairs."""
    )
    return emit


tile_fold_halves, tile_fold_short_halves = (
    _tile_operation(_same, None, None, I32x16, types.int64, types.int64)(
        renamed(name, _tile_fold_halves(are_short))
    )
    for name, are_short in (("tile_fold_halves", False), ("tile_fold_short_halves", True))
)


@_tile_operation(_as_i32, None, I32x16)
def tile_scale_halves(builder: Any, kind: Tile, first: Any, last: Any, pairs: Any) -> Any:
    """first[i] * (the first of pairs) + last[i] * (the last), whole numbers; of int8 inputs within int16."""

    def step(i: int) -> Any:
        halves = [row_sums(builder, _entry(builder, kind, tile, i)) for tile in (first, last)]
        scales = _of_rows(builder, kind, pairs, i)
        return _scaled_sum(builder, kind, halves[0], halves[1], scales, are_short=not kind.is_q16)

    return _each(builder, kind, step)


@_tile_operation(_same, None, types.int64)
def tile_fold_sums(builder: Any, kind: Tile, out: Any, acc: Any, x: Any) -> Any:
    """out[i] += acc[i] * the scale of the block at x."""

    def step(i: int) -> Any:
        sums = builder.sitofp(row_sums(builder, _entry(builder, kind, acc, i)), F32x16.llvm)
        factor = _of_tokens(builder, kind, x, SCALES, i, _F32)
        return _fma(builder, sums, factor, _entry(builder, kind, out, i))

    return _each(builder, kind, step)


@_tile_operation(_same, I32x16, types.int64)
def tile_fold_mins(builder: Any, kind: Tile, out: Any, pairs: Any, x: Any) -> Any:
    """out[i] -= both halves' sums times pairs * the scale, all of the block at x."""
    mins = [builder.sitofp(word, F32x16.llvm) for word in pair_words(builder, pairs)]

    def step(i: int) -> Any:
        result = _entry(builder, kind, out, i)
        factor = _of_tokens(builder, kind, x, SCALES, i, _F32)
        if kind.is_q16:
            for half, low in enumerate(mins):
                total = broadcast(builder, _half_sum(builder, kind, x, half, i))
                result = _fold(builder, result, total, low, factor)
            return result
        zero = constant(I32x16.llvm, 0)
        scales = builder.bitcast(_of_rows(builder, kind, pairs, i), I16X32)
        low = dot2(builder, zero, scales, _both_sums(builder, kind, x, i))
        return _fma(builder, builder.sitofp(low, F32x16.llvm), factor, result)

    return _each(builder, kind, step)


@_tile_operation(_same)
def tile_rows(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile with a vector for each token, a lane for each row."""
    if not kind.has_pairs:
        return tile

    def step(i: int) -> Any:
        both = [_entry(builder, kind, tile, (i & -2) + half) for half in (0, 1)]
        lanes = [4 * pair + 2 * (i & 1) + row for pair in range(8) for row in (0, 1)]
        return builder.shuffle_vector(*both, ir.Constant(ir.VectorType(_I32, 16), lanes))

    return _each(builder, kind, step)


def _of_pairs(tile: Tile) -> Tile:
    return Tile(tile.vec, tile.n // 2, tile.width // 2, tile.inputs, tile.half)


@_tile_operation(_of_pairs)
def tile_pair_sums(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of tile[2i] + tile[2i + 1]."""

    def step(i: int) -> Any:
        return builder.fadd(*(_entry(builder, kind, tile, 2 * i + k) for k in (0, 1)))

    return _each(builder, _of_pairs(kind), step)


@_tile_operation(lambda tile: types.void, types.int64, types.int64, types.int64)
def tile_store(builder: Any, kind: Tile, tile: Any, address: Any, stride: Any, count: Any) -> None:
    """Stores the first `count` entries at address + i * stride, where 16 rows of float32 have their place."""
    for i in range(kind.n):
        with builder.if_then(builder.icmp_signed(">", count, _I64(i)), likely=True):
            entry = builder.extract_value(tile, i)
            where = at(builder, at(builder, address, builder.mul(stride, _I64(i))), 32 * (kind.half or 0))
            builder.store(entry, pointer(builder, where, entry.type), align=1)


@_tile_operation(_same, types.int64, types.int64, types.int64)
def tile_add(builder: Any, kind: Tile, tile: Any, address: Any, stride: Any, count: Any) -> Any:
    """tile[i] += the 16 float32 at address + i * stride, for i < count; other entries are undefined."""

    def step(i: int) -> Any:
        # rows past the end read row 0 instead, which exists
        offset = builder.select(
            builder.icmp_signed(">", count, _I64(i)), builder.mul(stride, _I64(i)), _I64(0)
        )
        row = builder.load(pointer(builder, at(builder, address, offset), F32x16.llvm), align=1)
        return builder.fadd(_entry(builder, kind, tile, i), row)

    return _each(builder, kind, step)


@_tile_operation(lambda tile: types.void, types.int64, types.int64, types.int64, types.int64)
def tile_merge(builder: Any, kind: Tile, tile: Any, address: Any, stride: Any, keep: Any, take: Any) -> None:
    """16 float32 at address + i * stride = them * keep[i] + tile[i] * take[i], factors at addresses."""
    for i in range(kind.n):
        where = at(builder, address, builder.mul(stride, _I64(i)))
        place = pointer(builder, where, F32x16.llvm)
        factors = [
            broadcast(builder, builder.load(pointer(builder, at(builder, of, 4 * i), _F32), align=4))
            for of in (keep, take)
        ]
        kept = builder.fmul(builder.load(place, align=1), factors[0])
        builder.store(_fma(builder, _entry(builder, kind, tile, i), factors[1], kept), place, align=1)
