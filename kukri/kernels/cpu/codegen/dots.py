"""Dot products of bytes and of int16 in the lanes of a vector, with a lowering per instruction set."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import call_llvm, constant, join, join_quarters, quarters, split
from kukri.kernels.cpu.compile.simd import I32x16

_I1, _I16, _I32 = (ir.IntType(n) for n in (1, 16, 32))
I16X16, I16X32 = ir.VectorType(_I16, 16), ir.VectorType(_I16, 32)


# --- dot products of int8 -----------------------------------------------------------------------------
# dot4(acc, u, s): acc[i] += sum over k < 4 of u[4i + k] * s[4i + k], u unsigned, s signed bytes.
# Unsigned operands above 127 would saturate the 16-bit sums of AVX2, so there are two forms: weights of up
# to 6 bits and signed bytes. On instruction sets that have only unsigned times signed, signed bytes are kept
# as w + 128; kernels then begin with what takes the bias away (`CpuTarget.has_signed_bias`).
#
# The first form sums *runs* of a few dots. On AVX2, whose dot is a multiplication into sums of two products
# in int16 and another to widen those, a run is added up in int16 and widened once, at its end. A dot adds at
# most 2 * 128 * max(u) to an int16, whose largest is 32,767. Runs may therefore have
#   8 dots of 4 bits  (8 * 256 * 15 = 30,720)      2 dots of 6 bits  (2 * 256 * 63 = 32,256)
#   4 dots of 5 bits  (4 * 256 * 31 = 31,744)      8 dots of 3 or 2 bits


def dot4_unsigned(builder: Any, acc: Any, u: Any, s: Any) -> Any:
    """acc with the products of unsigned bytes of up to 6 bits, or of 8 on VNNI, and signed bytes."""
    lowering = cpu_target().lowering
    if lowering == "avx512vnni":
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", I32x16.llvm, acc, u, s)
    if lowering == "dotprod":  # weights of up to 6 bits are the same as signed bytes
        return sdot(builder, acc, u, s)
    if lowering == "generic":
        return _dot4_generic(builder, acc, u, s, builder.zext)
    halves = zip(split(builder, acc), split(builder, u), split(builder, s), strict=True)
    return join(builder, *(_vnni_256(builder, *half) for half in halves))


def _vnni_256(builder: Any, acc: Any, u: Any, s: Any) -> Any:
    return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.256", acc.type, acc, u, s)


def _by_quarters(builder: Any, name: str, acc: Any, a: Any, b: Any) -> Any:
    """An instruction of ARM's, on 128 bits at a time; an `a` of 128 bits meets all quarters of b."""
    firsts = quarters(builder, a) if a.type == b.type else [a] * 4
    parts = zip(quarters(builder, acc), firsts, quarters(builder, b), strict=True)
    sums = [call_llvm(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", c.type, c, x, y) for c, x, y in parts]
    return join_quarters(builder, sums)


def sdot(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """ARM's dot product of signed bytes: each lane adds up four products."""
    return _by_quarters(builder, "sdot", acc, a, b)


def matrix_dot(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """ARM's product of two rows of a and two of b, 8 signed bytes of each: a lane adds up 8 products."""
    return _by_quarters(builder, "smmla", acc, a, b)


def row_sums(builder: Any, sums: Any) -> Any:
    """A sum for each row, of sums by `matrix_dot`: those of one token have two lanes for a row."""
    if sums.type.count == 16:
        return sums
    name = "llvm.aarch64.neon.addp.v4i32"
    fours = [four for half in split(builder, sums) for four in quarters(builder, half)]
    rows = [call_llvm(builder, name, a.type, a, b) for a, b in zip(fours[::2], fours[1::2], strict=True)]
    return join_quarters(builder, rows)


def _pair_sums(builder: Any, u: Any, s: Any) -> Any:
    """u[2i] s[2i] + u[2i + 1] s[2i + 1], as 16 int16."""
    return call_llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", I16X16, u, s)


def add_pairs(builder: Any, acc: Any, shorts: Any, factors: Any = None) -> Any:
    """acc[i] + shorts[2i] + shorts[2i + 1], widened to int32; each times its factor, int16, if given."""
    factors = constant(I16X16, 1) if factors is None else factors
    quads = call_llvm(builder, "llvm.x86.avx2.pmadd.wd", acc.type, shorts, factors)
    return builder.add(acc, quads)


def _dot4_generic(builder: Any, acc: Any, u: Any, s: Any, widen_u: Any) -> Any:
    for k in range(4):
        lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(k, 64, 4)))
        a = widen_u(builder.shuffle_vector(u, u, lanes), I32x16.llvm)
        b = builder.sext(builder.shuffle_vector(s, s, lanes), I32x16.llvm)
        acc = builder.add(acc, builder.mul(a, b))
    return acc


def dot4_signed(builder: Any, acc: Any, w: Any, s: Any) -> Any:
    """acc with the products of weights, as tiles hold signed bytes, and signed bytes."""
    if cpu_target().has_signed_bias:
        return dot4_unsigned(builder, acc, w, s)
    if cpu_target().lowering == "dotprod":
        return sdot(builder, acc, w, s)
    if cpu_target().lowering == "generic":
        return _dot4_generic(builder, acc, w, s, builder.sext)
    # |w| times s with the sign of w: products stay below the 16-bit saturation
    halves = []
    for a, x, y in zip(split(builder, acc), split(builder, w), split(builder, s), strict=True):
        size = call_llvm(builder, "llvm.abs.v32i8", x.type, x, _I1(0))
        signed = call_llvm(builder, "llvm.x86.avx2.psign.b", x.type, y, x)
        halves.append(add_pairs(builder, a, _pair_sums(builder, size, signed)))
    return join(builder, *halves)


def dot4_short(builder: Any, short: Any, u: Any, s: Any) -> Any:
    """A dot of a run. On AVX2 `short` holds 32 int16, two for a lane."""
    if cpu_target().lowering != "avx2":
        return dot4_unsigned(builder, short, u, s)
    halves = []
    for a, x, y in zip(split(builder, short), split(builder, u), split(builder, s), strict=True):
        summed = builder.add(builder.bitcast(a, I16X16), _pair_sums(builder, x, y))
        halves.append(builder.bitcast(summed, a.type))
    return join(builder, *halves)


# --- dot products of int16 ----------------------------------------------------------------------------
# The even bytes of weights, widened to int16, meet the inputs 4g and 4g + 2 of a q16 panel, the odd ones
# 4g + 1 and 4g + 3: each lane adds up its own row, as with dot4.


def even_and_odd(builder: Any, w: Any, is_signed: bool) -> tuple[Any, Any]:
    """The bytes of `w` as 32 int16 each."""
    shorts, eight = builder.bitcast(w, I16X32), constant(I16X32, 8)
    if is_signed:
        return builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)
    return builder.and_(shorts, constant(I16X32, 255)), builder.lshr(shorts, eight)


def dot2(builder: Any, acc: Any, w: Any, x: Any) -> Any:
    """acc[i] + w[2i] x[2i] + w[2i + 1] x[2i + 1] of int16."""
    if cpu_target().lowering == "avx512vnni":  # LLVM makes one instruction of the two
        return builder.add(acc, call_llvm(builder, "llvm.x86.avx512.pmaddw.d.512", acc.type, w, x))
    if cpu_target().lowering == "dotprod":  # no shuffles: by lanes of int32
        words = (pair_words(builder, builder.bitcast(pairs, acc.type)) for pairs in (w, x))
        for a, b in zip(*words, strict=True):
            acc = builder.add(acc, builder.mul(a, b))
        return acc
    if cpu_target().lowering == "generic":
        for a, b in zip(_alternate(builder, w), _alternate(builder, x), strict=True):
            acc = builder.add(acc, builder.mul(builder.sext(a, acc.type), builder.sext(b, acc.type)))
        return acc
    halves = []
    for a, b, c in zip(split(builder, acc), split(builder, w), split(builder, x), strict=True):
        halves.append(builder.add(a, call_llvm(builder, "llvm.x86.avx2.pmadd.wd", a.type, b, c)))
    return join(builder, *halves)


def _alternate(builder: Any, a: Any) -> list[Any]:
    """Entries 0, 2, 4, … and 1, 3, 5, … of 32."""
    lanes = (ir.Constant(ir.VectorType(_I32, 16), list(range(first, 32, 2))) for first in (0, 1))
    return [builder.shuffle_vector(a, a, lane) for lane in lanes]


def pair_words(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The first and the last of each pair, as int32."""
    sixteen = constant(I32x16.llvm, 16)
    return builder.ashr(builder.shl(pairs, sixteen), sixteen), builder.ashr(pairs, sixteen)
