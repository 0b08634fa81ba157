"""Tiles: the vectors, one per token or per row, that a matrix kernel adds up in registers.

The operations unroll over a tile's vectors. All is written at 512 bits, as in `simd.py`; only the dot
products (`tile_products.py`) have a lowering per instruction set. `tile_folds.py` scales a block's sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_model

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    at,
    broadcast,
    call_llvm,
    join,
    named_intrinsic,
    pointer,
    split,
)
from kukri.kernels.cpu.compile.simd import (
    F32x16,
    I32x16,
    RegisterModel,
    Vec,
)
from kukri.kernels.cpu.pack.layouts import (
    I16_SCALES,
    Q8_BLOCK_BYTES,
    Q16_BLOCK_BYTES,
    SCALES,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)


_F32 = ir.FloatType()


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


def tile_operation(result: Callable[..., Any], *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
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


def each(builder: Any, kind: Tile, make: Callable[[int], Any]) -> Any:
    """A tile as long as one of this kind, and of as many rows, whose entry i is make(i)."""
    entries = [make(i) for i in range(kind.n)]
    if kind.half is not None:
        entries = [split(builder, entry)[kind.half] for entry in entries]
    tile = ir.Constant(ir.ArrayType(entries[0].type, kind.n), ir.Undefined)
    for i, entry in enumerate(entries):
        tile = builder.insert_value(tile, entry, i)
    return tile


def entry_of(builder: Any, kind: Tile, tile: Any, i: int) -> Any:
    """Entry i of a tile, with 16 lanes; those of rows that it does not have are undefined."""
    entry = builder.extract_value(tile, i)
    if kind.half is None:
        return entry
    others = ir.Constant(entry.type, ir.Undefined)
    return join(builder, *((others, entry) if kind.half else (entry, others)))


def of_rows(builder: Any, kind: Tile, v: Any, i: int) -> Any:
    """What meets vector i of a tile, of a vector with a lane for each row."""
    if not kind.has_pairs:
        return v
    lanes = [8 * (i & 1) + 2 * pair + row for pair in range(4) for row in (0, 1, 0, 1)]
    return builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_I32, 16), lanes))


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


def same(tile: Tile) -> Tile:
    """The type of a tile like the first argument."""
    return tile


def as_sums(tile: Tile) -> Tile:
    """The type of sums over a block, or a half, of a tile of outputs."""
    is_halved = tile.is_for_matrix and tile.n == 1
    return Tile(I32x32 if is_halved else I32x16, tile.n, tile.width, tile.inputs, tile.half)


@tile_operation(as_sums)
def tile_zeros_like(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of int32 zeros, as long as `tile`."""
    return ir.Constant(as_sums(kind).llvm, None)


@tile_operation(same)
def tile_sums_like(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of float32 zeros, as long as `tile`, for sums over the groups of a block."""
    return ir.Constant(kind.llvm, None)


@tile_operation(lambda tile: types.int64)
def panel_block_bytes(builder: Any, kind: Tile, tile: Any) -> Any:
    """Bytes of a panel block of 32 inputs."""
    return _I64(kind.width * (Q16_BLOCK_BYTES if kind.is_q16 else Q8_BLOCK_BYTES))


def of_token(builder: Any, kind: Tile, x: Any, part: Any, i: int, element: Any) -> Any:
    """Token i's number in a part of the panel block at x, such as its scale."""
    where = at(builder, x, builder.add(builder.mul(part, _I64(kind.width)), _I64(4 * i)))
    return builder.load(pointer(builder, where, element), align=4)


def of_tokens(builder: Any, kind: Tile, x: Any, part: int, i: int, element: Any) -> Any:
    """What meets vector i of a tile, of the tokens' numbers in a part of the panel block at x."""
    if not kind.has_pairs:
        return broadcast(builder, of_token(builder, kind, x, _I64(part), i, element))
    where = at(builder, x, (part & -8) * kind.width + 8 * (i & -2))  # two columns of 8 bytes
    words = builder.load(pointer(builder, where, ir.VectorType(element, 4)), align=4)
    first = (part & 4) // 4
    lanes = [first, first, first + 2, first + 2] * 4
    return builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(_I32, 16), lanes))


def _as_f32(tile: Tile) -> Tile:
    return Tile(F32x16, tile.n, tile.width, tile.inputs, tile.half)


@tile_operation(_as_f32, types.int64)
def tile_scaled(builder: Any, kind: Tile, tile: Any, address: Any) -> Any:
    """float(tile[i]) * (float32 at address + 4 * i)."""

    def step(i: int) -> Any:
        entry = entry_of(builder, kind, tile, i)
        entry = builder.sitofp(entry, F32x16.llvm) if kind.vec is I32x16 else entry
        factor = builder.load(pointer(builder, at(builder, address, 4 * i), _F32), align=4)
        return builder.fmul(entry, broadcast(builder, factor))

    return each(builder, kind, step)


@tile_operation(same, F32x16, types.int64, types.int64)
def tile_fma(builder: Any, kind: Tile, acc: Any, v: Any, address: Any, stride: Any) -> Any:
    """acc[i] += v * (float32 at address + i * stride)."""

    def step(i: int) -> Any:
        where = at(builder, address, builder.mul(stride, _I64(i)))
        factor = broadcast(builder, builder.load(pointer(builder, where, _F32), align=4))
        return fma(builder, v, factor, entry_of(builder, kind, acc, i))

    return each(builder, kind, step)


@tile_operation(same, None)
def tile_sum(builder: Any, kind: Tile, a: Any, b: Any) -> Any:
    """A tile of a[i] + b[i]."""

    def step(i: int) -> Any:
        return builder.fadd(*(entry_of(builder, kind, tile, i) for tile in (a, b)))

    return each(builder, kind, step)


@tile_operation(same, None, F32x16)
def tile_add_scaled(builder: Any, kind: Tile, acc: Any, part: Any, scale: Any) -> Any:
    """acc[i] += part[i] * scale."""

    def step(i: int) -> Any:
        factor = of_rows(builder, kind, scale, i)
        return fma(builder, entry_of(builder, kind, part, i), factor, entry_of(builder, kind, acc, i))

    return each(builder, kind, step)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of 16 float32, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", F32x16.llvm, a, b, c)


@tile_operation(same)
def tile_rows(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile with a vector for each token, a lane for each row."""
    if not kind.has_pairs:
        return tile

    def step(i: int) -> Any:
        both = [entry_of(builder, kind, tile, (i & -2) + half) for half in (0, 1)]
        lanes = [4 * pair + 2 * (i & 1) + row for pair in range(8) for row in (0, 1)]
        return builder.shuffle_vector(*both, ir.Constant(ir.VectorType(_I32, 16), lanes))

    return each(builder, kind, step)


def _of_pairs(tile: Tile) -> Tile:
    return Tile(tile.vec, tile.n // 2, tile.width // 2, tile.inputs, tile.half)


@tile_operation(_of_pairs)
def tile_pair_sums(builder: Any, kind: Tile, tile: Any) -> Any:
    """A tile of tile[2i] + tile[2i + 1]."""

    def step(i: int) -> Any:
        return builder.fadd(*(entry_of(builder, kind, tile, 2 * i + k) for k in (0, 1)))

    return each(builder, _of_pairs(kind), step)


@tile_operation(lambda tile: types.void, types.int64, types.int64, types.int64)
def tile_store(builder: Any, kind: Tile, tile: Any, address: Any, stride: Any, count: Any) -> None:
    """Stores the first `count` entries at address + i * stride, where 16 rows of float32 have their place."""
    for i in range(kind.n):
        with builder.if_then(builder.icmp_signed(">", count, _I64(i)), likely=True):
            entry = builder.extract_value(tile, i)
            where = at(builder, at(builder, address, builder.mul(stride, _I64(i))), 32 * (kind.half or 0))
            builder.store(entry, pointer(builder, where, entry.type), align=1)


@tile_operation(same, types.int64, types.int64, types.int64)
def tile_add(builder: Any, kind: Tile, tile: Any, address: Any, stride: Any, count: Any) -> Any:
    """tile[i] += the 16 float32 at address + i * stride, for i < count; other entries are undefined."""

    def step(i: int) -> Any:
        # rows past the end read row 0 instead, which exists
        offset = builder.select(
            builder.icmp_signed(">", count, _I64(i)), builder.mul(stride, _I64(i)), _I64(0)
        )
        row = builder.load(pointer(builder, at(builder, address, offset), F32x16.llvm), align=1)
        return builder.fadd(entry_of(builder, kind, tile, i), row)

    return each(builder, kind, step)


@tile_operation(lambda tile: types.void, types.int64, types.int64, types.int64, types.int64)
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
        builder.store(fma(builder, entry_of(builder, kind, tile, i), factors[1], kept), place, align=1)
