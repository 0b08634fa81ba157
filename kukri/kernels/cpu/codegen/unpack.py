"""Operations that take packed weights and their scales apart: fields of bits, bytes of words, look-up tables.

As in `simd.py`, all is written at 512 bits. What a weight type makes of them is in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    broadcast,
    call_llvm,
    constant,
    join,
    join_quarters,
    operation,
    pointer,
    quarters,
    renamed,
    split,
)
from kukri.kernels.cpu.compile.simd import F32x16, I32x16, U8x64

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))


@operation(U8x64, U8x64, types.int64)
def low_bits(builder: Any, a: Any, mask: Any) -> Any:
    """a & mask in each byte."""
    return builder.and_(a, broadcast(builder, builder.trunc(mask, _I8), 64))


@operation(U8x64, U8x64, types.int64, types.int64, types.int64)
def byte_bits(builder: Any, a: Any, right: Any, mask: Any, left: Any) -> Any:
    """((a >> right) & mask) << left in each byte; the result must fit into the byte."""
    # 16 bits at a time, for which x86 has shifts: the mask drops what came from the neighbour. (GFNI moves
    # bits in one instruction, but on Zen 4 in the units of the dot products: a tenth slower at 2 to 8 tokens)
    shorts = U8x64.llvm if cpu_target().lowering == "dotprod" else ir.VectorType(_I16, 32)
    right, left = (broadcast(builder, builder.trunc(v, shorts.element), shorts.count) for v in (right, left))
    shifted = builder.bitcast(builder.lshr(builder.bitcast(a, shorts), right), U8x64.llvm)
    kept = builder.and_(shifted, broadcast(builder, builder.trunc(mask, _I8), 64))
    return builder.bitcast(builder.shl(builder.bitcast(kept, shorts), left), U8x64.llvm)


@operation(U8x64, U8x64, U8x64)
def either(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@operation(I32x16, I32x16, types.int64, types.int64, types.int64)
def word_bits(builder: Any, a: Any, right: Any, mask: Any, left: Any) -> Any:
    """((a >> right) & mask) << left in each 4-byte word."""
    right, mask, left = (broadcast(builder, builder.trunc(v, _I32)) for v in (right, mask, left))
    return builder.shl(builder.and_(builder.lshr(a, right), mask), left)


@operation(I32x16, I32x16)
def next_byte(builder: Any, words: Any) -> Any:
    """Each 4-byte word without its lowest byte, the others moved down."""
    return builder.lshr(words, constant(I32x16.llvm, 8))


@operation(I32x16, I32x16, I32x16)
def either_word(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@operation(I32x16, I32x16, types.int64, types.int64, types.int64)
def byte_pairs(builder: Any, words: Any, right: Any, mask: Any, left: Any) -> Any:
    """((half >> right) & mask) << left of both 16-bit halves of each word."""
    shorts = ir.VectorType(_I16, 32)
    right, mask, left = (broadcast(builder, builder.trunc(v, _I16), 32) for v in (right, mask, left))
    halves = builder.and_(builder.lshr(builder.bitcast(words, shorts), right), mask)
    return builder.bitcast(builder.shl(halves, left), I32x16.llvm)


@operation(I32x16, I32x16, types.int64)
def signed_byte_pairs(builder: Any, words: Any, k: Any) -> Any:
    """Byte k (0 or 1) of both 16-bit halves of each word, as int8 widened to int16."""
    shorts = ir.VectorType(_I16, 32)
    left = broadcast(builder, builder.trunc(builder.sub(_I64(8), builder.mul(k, _I64(8))), _I16), 32)
    halves = builder.shl(builder.bitcast(words, shorts), left)
    return builder.bitcast(builder.ashr(halves, constant(shorts, 8)), I32x16.llvm)


@operation(I32x16, I32x16, types.int64)
def add_to_pairs(builder: Any, pairs: Any, value: Any) -> Any:
    """`value` added to both 16-bit halves of each word."""
    shorts = ir.VectorType(_I16, 32)
    added = broadcast(builder, builder.trunc(value, _I16), 32)
    return builder.bitcast(builder.add(builder.bitcast(pairs, shorts), added), I32x16.llvm)


@operation(F32x16, I32x16)
def words_to_f32(builder: Any, words: Any) -> Any:
    """float(word)."""
    return builder.sitofp(words, F32x16.llvm)


@operation(F32x16, I32x16, types.int64, types.int64)
def byte_to_f32(builder: Any, words: Any, k: Any, offset: Any) -> Any:
    """float(byte k of each word + offset)."""
    shift = broadcast(builder, builder.trunc(builder.mul(k, _I64(8)), _I32))
    byte = builder.and_(builder.lshr(words, shift), constant(I32x16.llvm, 255))
    return builder.sitofp(builder.add(byte, broadcast(builder, builder.trunc(offset, _I32))), F32x16.llvm)


@operation(F32x16, types.int64)
def load_powers(builder: Any, address: Any) -> Any:
    """2^(e - 128) of 16 bytes e."""
    bits = builder.load(pointer(builder, address, ir.VectorType(_I8, 16)), align=1)
    e = builder.zext(bits, I32x16.llvm)
    # a normal number has its exponent from bit 23 on, a smaller one (e < 2) is a bit of the fraction; the
    # larger of the two as signed numbers is the right one
    normal = builder.sub(builder.shl(e, constant(I32x16.llvm, 23)), constant(I32x16.llvm, 1 << 23))
    small = builder.add(builder.shl(e, constant(I32x16.llvm, 21)), constant(I32x16.llvm, 1 << 21))
    is_normal = builder.icmp_signed(">", normal, small)
    return builder.bitcast(builder.select(is_normal, normal, small), F32x16.llvm)


@operation(U8x64, U8x64, U8x64, types.int64, types.int64)
def two_bits_and_one(builder: Any, a: Any, b: Any, right: Any, from_b: Any) -> Any:
    """Indices for `look_up` of 3 bits: two bits of each byte of a, from `right` on, then one of b's, whose
    place is `from_b`. Bits above them may be anything.
    """
    shorts = ir.VectorType(_I16, 32)
    low, high = (
        builder.lshr(builder.bitcast(v, shorts), broadcast(builder, builder.trunc(n, _I16), 32))
        for v, n in ((a, right), (b, builder.sub(from_b, _I64(2))))
    )
    kept = (builder.and_(v, constant(shorts, mask)) for v, mask in ((low, 0x0303), (high, 0xFCFC)))
    return builder.bitcast(builder.or_(*kept), U8x64.llvm)


def look_up(table: Sequence[int], right: int) -> Any:
    """An operation: for some bits of each byte, from `right` on, their entry in a table of 16 bytes, or of 8:
    bits above the 4, or 3, change nothing.
    """
    n_entries, table = len(table), [value & 255 for value in table] * (16 // len(table))

    @operation(U8x64, U8x64)
    def look_up_bytes(builder: Any, packed: Any) -> Any:
        """The table's entries for 64 bytes."""
        lowering = cpu_target().lowering
        # x86 shifts 16 bits at a time: what came from a neighbour changes nothing either
        shorts = U8x64.llvm if lowering == "dotprod" else ir.VectorType(_I16, 32)
        shifted = builder.lshr(builder.bitcast(packed, shorts), constant(shorts, right))
        indices = builder.bitcast(shifted, U8x64.llvm)
        if cpu_target().has_byte_permute:
            tables = ir.Constant(U8x64.llvm, [*table] * 4)  # by 6 bits of each index, of which 3 or 4 count
            return call_llvm(builder, "llvm.x86.avx512.permvar.qi.512", U8x64.llvm, tables, indices)
        indices = builder.and_(indices, constant(U8x64.llvm, n_entries - 1))
        if lowering == "generic":
            result = constant(U8x64.llvm, 0)
            for i, entry in enumerate(table[:n_entries]):
                is_entry = builder.icmp_unsigned("==", indices, constant(U8x64.llvm, i))
                result = builder.select(is_entry, constant(U8x64.llvm, entry), result)
            return result
        if lowering == "avx512vnni":
            tables = ir.Constant(U8x64.llvm, [*table] * 4)
            return call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", U8x64.llvm, tables, indices)
        if lowering == "dotprod":
            entries = ir.Constant(ir.VectorType(_I8, 16), table)
            look = "llvm.aarch64.neon.tbl1.v16i8"
            found = [call_llvm(builder, look, i.type, entries, i) for i in quarters(builder, indices)]
            return join_quarters(builder, found)
        half = ir.Constant(ir.VectorType(_I8, 32), [*table] * 2)
        halves = split(builder, indices)
        return join(
            builder, *(call_llvm(builder, "llvm.x86.avx2.pshuf.b", half.type, half, i) for i in halves)
        )

    return look_up_bytes


def _repeat(k: int) -> Any:
    lanes = ir.Constant(ir.VectorType(_I32, 32), [2 * row + k for row in range(16) for _ in range(2)])

    def emit(builder: Any, pairs: Any) -> Any:
        shorts = builder.bitcast(pairs, ir.VectorType(_I16, 32))
        return builder.bitcast(builder.shuffle_vector(shorts, shorts, lanes), I32x16.llvm)

    emit.__doc__ = """The first (last) int16 of each pair, twice."""
    return emit


repeat_first, repeat_last = (
    operation(I32x16, I32x16)(renamed(name, _repeat(k)))
    for k, name in enumerate(("repeat_first", "repeat_last"))
)


@operation(I32x16, I32x16, types.int64)
def multiples(builder: Any, pairs: Any, half: Any) -> Any:
    """0, 1, 2 and 3 times the first (half = 0) or the last (1) of each pair, at most 85: a byte each."""
    right = broadcast(builder, builder.trunc(builder.mul(half, _I64(16)), _I32))
    numbers = builder.and_(builder.lshr(pairs, right), constant(I32x16.llvm, 0xFFFF))
    return builder.mul(numbers, constant(I32x16.llvm, 0x03020100))


@operation(U8x64, U8x64, types.int64, I32x16)
def look_up_pairs_of_bits(builder: Any, packed: Any, right: Any, tables: Any) -> Any:
    """For two bits of each byte, from `right` on, the entry in its row's table of 4 bytes. AVX-512 alone."""
    shorts = ir.VectorType(_I16, 32)
    right = broadcast(builder, builder.trunc(right, _I16), 32)
    shifted = builder.bitcast(builder.lshr(builder.bitcast(packed, shorts), right), U8x64.llvm)
    rows = ir.Constant(U8x64.llvm, [4 * row for row in range(4) for _ in range(4)] * 4)
    indices = builder.or_(builder.and_(shifted, constant(U8x64.llvm, 3)), rows)
    tables = builder.bitcast(tables, U8x64.llvm)
    return call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", U8x64.llvm, tables, indices)
