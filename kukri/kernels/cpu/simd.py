"""Vector values inside Numba functions, and the compiler that turns kernels into object code.

`F32x16`, `I32x16` and `U8x64` are LLVM vectors that live in registers; a *tile* is a fixed number of them
(one per token or per row) that the operations below unroll over. Everything is written at 512 bits: LLVM
splits it for narrower CPUs. Only the int8 dot product has a lowering per instruction set.

Addresses are int64 byte addresses, as kernels find them in their records; nothing here checks bounds.
"""

from __future__ import annotations

import operator
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from kukri.kernels.cpu.features import cpu_target

if TYPE_CHECKING:
    from kukri.kernels.cpu.jit import KernelSource

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_F32, _F16 = ir.FloatType(), ir.HalfType()
_MASK16 = ir.VectorType(_I32, 16)


class Vec(types.Type):  # type: ignore[misc]
    """The Numba type of an LLVM vector of `count` elements."""

    def __init__(self, name: str, element: Any, count: int) -> None:
        self.llvm = ir.VectorType(element, count)
        super().__init__(name=name)


class Tile(types.Type):  # type: ignore[misc]
    """The Numba type of `n` vectors of one kind, held in registers."""

    def __init__(self, vec: Vec, n: int) -> None:
        self.vec, self.n = vec, n
        self.llvm = ir.ArrayType(vec.llvm, n)
        super().__init__(name=f"Tile({vec.name}, {n})")


@register_model(Vec)
@register_model(Tile)
class _RegisterModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


F32x16 = Vec("F32x16", _F32, 16)
I32x16 = Vec("I32x16", _I32, 16)
U8x64 = Vec("U8x64", _I8, 64)
F64x16 = Vec("F64x16", ir.DoubleType(), 16)

# The options of every kernel and of the functions that kernels are made of.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "boundscheck": False}


def device(function: Callable[..., Any]) -> Any:
    """Marks a function that kernels call; it is always inlined."""
    return njit(forceinline=True, **_OPTIONS)(function)


def routine(function: Callable[..., Any]) -> Any:
    """Marks a function that kernels call and that is compiled once for all its callers."""
    return njit(**_OPTIONS)(function)


def part(function: Callable[..., Any]) -> Any:
    """Marks a function with one caller, which is compiled as a part of it: sooner than on its own."""
    return njit(inline="always", **_OPTIONS)(function)


def compile_kernel(source: KernelSource) -> tuple[str, bytes]:
    """(symbol, object code) of a kernel, compiled for `cpu_target()`."""
    loads = ", ".join(f"load_i64(record + {8 * i})" for i in range(len(source.parameters)))
    namespace: dict[str, Any] = {"body": part(source.function), "load_i64": load_i64}
    exec(f"def entry(record, tile):\n    return body(tile, {loads})", namespace)
    options = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    function: Any = njit("int64(int64, int64)", **options)(namespace["entry"])
    (compiled,) = function.overloads.values()
    library = compiled.library
    code = library.codegen._tm.emit_object(library._final_module)
    return compiled.fndesc.llvm_func_name, code


# --- how operations are defined -----------------------------------------------------------------------


def _operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Defines an operation on values of fixed types; the decorated function emits its LLVM code."""

    def define(emit: Callable[..., Any]) -> Any:
        names = [f"a{i}" for i in range(len(parameters))]

        def typing(context: Any, *_: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*parameters), generate

        return _named_intrinsic(emit.__name__, names, typing, emit.__doc__)

    return define


def _tile_operation(result: Callable[..., Any], *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like `_operation`, for a first argument that is a Tile; emits with (builder, n, tile, *values)."""

    def define(emit: Callable[..., Any]) -> Any:
        names = ["tile", *(f"a{i}" for i in range(len(parameters)))]

        def typing(context: Any, tile: Tile, *others: Any) -> Any:
            takes = [other if p is None else p for p, other in zip(parameters, others, strict=True)]
            returns = result(tile)

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, tile.n, *values)
                return context.get_dummy_value() if returns is types.void else value

            return returns(tile, *takes), generate

        return _named_intrinsic(emit.__name__, names, typing, emit.__doc__)

    return define


def _named_intrinsic(name: str, parameters: list[str], typing: Callable[..., Any], doc: str | None) -> Any:
    # Numba reads an intrinsic's parameter names from its code, so a function with those names is made
    arguments = ", ".join(parameters)
    namespace = {"typing": typing}
    head = f"def {name}(context, {arguments}):" if arguments else f"def {name}(context):"
    exec(f"{head}\n    return typing(context, {arguments})", namespace)
    made: Any = namespace[name]
    made.__doc__ = doc
    return intrinsic(made)


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _splat(builder: Any, value: Any, count: int = 16) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _each(builder: Any, n: int, vector: Any, make: Callable[[int], Any]) -> Any:
    """A tile whose entry i is make(i)."""
    tile = ir.Constant(ir.ArrayType(vector, n), ir.Undefined)
    for i in range(n):
        tile = builder.insert_value(tile, make(i), i)
    return tile


def _at(builder: Any, address: Any, offset: Any) -> Any:
    return builder.add(address, offset if isinstance(offset, ir.Value) else _I64(offset))


# --- scalars and addresses ----------------------------------------------------------------------------


def _scalar_load(element: Any, widen: str | None = None) -> Callable[..., Any]:
    def emit(builder: Any, address: Any) -> Any:
        value = builder.load(_pointer(builder, address, element), align=1)
        return getattr(builder, widen)(value, _I64) if widen else value

    return emit


def _scalar_store(element: Any, narrow: bool = False) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, value: Any) -> None:
        value = builder.trunc(value, element) if narrow else value
        builder.store(value, _pointer(builder, address, element), align=1)

    return emit


def _renamed(name: str, emit: Callable[..., Any]) -> Callable[..., Any]:
    emit.__name__ = name
    return emit


load_i64 = _operation(types.int64, types.int64)(_renamed("load_i64", _scalar_load(_I64)))
load_i32 = _operation(types.int64, types.int64)(_renamed("load_i32", _scalar_load(_I32, "sext")))
load_u16 = _operation(types.int64, types.int64)(_renamed("load_u16", _scalar_load(_I16, "zext")))
load_u8 = _operation(types.int64, types.int64)(_renamed("load_u8", _scalar_load(_I8, "zext")))
load_i8 = _operation(types.int64, types.int64)(_renamed("load_i8", _scalar_load(_I8, "sext")))
load_f32 = _operation(types.float32, types.int64)(_renamed("load_f32", _scalar_load(_F32)))
store_i64 = _operation(types.void, types.int64, types.int64)(_renamed("store_i64", _scalar_store(_I64)))
store_i32 = _operation(types.void, types.int64, types.int64)(_renamed("store_i32", _scalar_store(_I32, True)))
load_f64 = _operation(types.float64, types.int64)(_renamed("load_f64", _scalar_load(ir.DoubleType())))
store_f64 = _operation(types.void, types.int64, types.float64)(
    _renamed("store_f64", _scalar_store(ir.DoubleType()))
)
store_u16 = _operation(types.void, types.int64, types.int64)(_renamed("store_u16", _scalar_store(_I16, True)))
store_f32 = _operation(types.void, types.int64, types.float32)(_renamed("store_f32", _scalar_store(_F32)))


@_operation(types.float32, types.int64)
def load_f16(builder: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""
    bits = builder.load(_pointer(builder, address, _I16), align=1)
    vector = _half_to_float(builder, _splat(builder, bits))
    return builder.extract_element(vector, _I32(0))


@_operation(types.float32, types.int64)
def load_bf16(builder: Any, address: Any) -> Any:
    """The bfloat16 at an address, as float32."""
    bits = builder.load(_pointer(builder, address, _I16), align=1)
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)


@_operation(types.float32, types.int64)
def f32_of_bits(builder: Any, bits: Any) -> Any:
    """The float that `float_bits` packed into an int64."""
    return builder.fptrunc(builder.bitcast(bits, ir.DoubleType()), _F32)


def _prefetch(builder: Any, address: Any) -> None:
    pointer = _pointer(builder, address, _I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])


@_operation(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for a cache line that will be read soon."""
    _prefetch(builder, address)


@intrinsic(prefer_literal=True)
def stack_bytes(context: Any, n: Any) -> Any:
    """The address of `n` (a literal) bytes of this call's stack, 64-byte aligned."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.ArrayType(_I8, n.literal_value)
        with builder.goto_entry_block():
            slot = builder.alloca(kind)
            slot.align = 64
        return builder.ptrtoint(slot, _I64)

    return types.int64(n), generate


# --- vectors ------------------------------------------------------------------------------------------


@_operation(F32x16, types.int64)
def load_f32x16(builder: Any, address: Any) -> Any:
    """16 float32."""
    return builder.load(_pointer(builder, address, F32x16.llvm), align=1)


@_operation(I32x16, types.int64)
def load_i32x16(builder: Any, address: Any) -> Any:
    """16 int32."""
    return builder.load(_pointer(builder, address, I32x16.llvm), align=1)


@_operation(U8x64, types.int64)
def load_u8x64(builder: Any, address: Any) -> Any:
    """64 bytes."""
    return builder.load(_pointer(builder, address, U8x64.llvm), align=1)


@_operation(F32x16, types.int64)
def load_f16x16(builder: Any, address: Any) -> Any:
    """16 float16, widened to float32."""
    bits = builder.load(_pointer(builder, address, ir.VectorType(_I16, 16)), align=1)
    return _half_to_float(builder, bits)


@_operation(F32x16, types.int64)
def load_i8x16(builder: Any, address: Any) -> Any:
    """16 int8, as float32."""
    wide = builder.load(_pointer(builder, address, ir.VectorType(_I8, 16)), align=1)
    return builder.sitofp(builder.sext(wide, I32x16.llvm), F32x16.llvm)


@_operation(F32x16, types.int64)
def splat_f16(builder: Any, address: Any) -> Any:
    """A vector of 16 times the float16 at an address."""
    bits = builder.load(_pointer(builder, address, _I16), align=2)
    lanes = builder.insert_element(ir.Constant(ir.VectorType(_I16, 16), ir.Undefined), bits, _I32(0))
    places = ir.Constant(ir.VectorType(_I32, 16), [0] * 16)
    return _half_to_float(builder, builder.shuffle_vector(lanes, lanes, places))


@_operation(F32x16, types.int64)
def load_bf16x16(builder: Any, address: Any) -> Any:
    """16 bfloat16, widened to float32."""
    bits = builder.load(_pointer(builder, address, ir.VectorType(_I16, 16)), align=1)
    wide = builder.shl(builder.zext(bits, I32x16.llvm), _constant(I32x16.llvm, 16))
    return builder.bitcast(wide, F32x16.llvm)


def _half_to_float(builder: Any, bits: Any) -> Any:
    if cpu_target().has_half:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(_F16, 16)), F32x16.llvm)
    # Without hardware: move exponent and fraction into place and rescale by 2^112; inf and nan apart
    wide = builder.zext(bits, I32x16.llvm)
    magnitude = builder.and_(wide, _constant(I32x16.llvm, 0x7FFF))
    shifted = builder.bitcast(builder.shl(magnitude, _constant(I32x16.llvm, 13)), F32x16.llvm)
    scaled = builder.bitcast(builder.fmul(shifted, _constant(F32x16.llvm, 2.0**112)), I32x16.llvm)
    special = builder.icmp_unsigned(">=", magnitude, _constant(I32x16.llvm, 0x7C00))
    infinite = builder.or_(scaled, _constant(I32x16.llvm, 0x7F800000))
    sign = builder.shl(builder.and_(wide, _constant(I32x16.llvm, 0x8000)), _constant(I32x16.llvm, 16))
    return builder.bitcast(builder.or_(builder.select(special, infinite, scaled), sign), F32x16.llvm)


def _float_to_half(builder: Any, value: Any) -> Any:
    if cpu_target().has_half:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(_F16, 16)), ir.VectorType(_I16, 16))
    # Without hardware, round to nearest even on the bits (values below 65520 in size, or nan)
    bits = builder.bitcast(value, I32x16.llvm)
    sign = builder.and_(builder.lshr(bits, _constant(I32x16.llvm, 16)), _constant(I32x16.llvm, 0x8000))
    magnitude = builder.and_(bits, _constant(I32x16.llvm, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _constant(I32x16.llvm, 13)), _constant(I32x16.llvm, 1))
    rounded = builder.add(builder.add(magnitude, odd), _constant(I32x16.llvm, 0xFFF - (112 << 23)))
    normal = builder.lshr(rounded, _constant(I32x16.llvm, 13))
    # a subnormal half: adding 0.5 leaves its fraction, rounded, in the low bits
    shifted = builder.fadd(builder.bitcast(magnitude, F32x16.llvm), _constant(F32x16.llvm, 0.5))
    small = builder.sub(builder.bitcast(shifted, I32x16.llvm), _constant(I32x16.llvm, 0x3F000000))
    is_small = builder.icmp_unsigned("<", magnitude, _constant(I32x16.llvm, 113 << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, _constant(I32x16.llvm, 0x7F800000))
    rounded_bits = builder.select(is_small, small, normal)
    half = builder.or_(builder.select(is_nan, _constant(I32x16.llvm, 0x7E00), rounded_bits), sign)
    return builder.trunc(half, ir.VectorType(_I16, 16))


@_operation(types.void, types.int64, F32x16)
def store_f32x16(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 float32."""
    builder.store(value, _pointer(builder, address, F32x16.llvm), align=1)


@_operation(types.void, types.int64, F32x16)
def store_f16x16(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 values rounded to float16; the caller keeps them in its range."""
    half = _float_to_half(builder, value)
    builder.store(half, _pointer(builder, address, half.type), align=1)


@_operation(types.void, types.int64, F32x16, types.int64)
def store_f16(builder: Any, address: Any, value: Any, stride: Any) -> None:
    """Stores 16 values rounded to float16, `stride` bytes apart; the caller keeps them in its range."""
    half = _float_to_half(builder, value)
    for i in range(16):
        where = _pointer(builder, _at(builder, address, builder.mul(stride, _I64(i))), _I16)
        builder.store(builder.extract_element(half, _I32(i)), where, align=2)


@_operation(F32x16, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """A vector of 16 equal float32."""
    return _splat(builder, value)


@_operation(F32x16, F32x16, F32x16, F32x16)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    return _call(builder, "llvm.fma.v16f32", F32x16.llvm, a, b, c)


def _select_max(builder: Any, a: Any, b: Any, relation: str) -> Any:
    return builder.select(builder.fcmp_ordered(relation, a, b), a, b)


@_operation(F32x16, F32x16, F32x16)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where either is nan."""
    return _select_max(builder, a, b, ">")


@_operation(F32x16, F32x16, F32x16)
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair; b where either is nan."""
    return _select_max(builder, a, b, "<")


@_operation(F32x16, F32x16)
def absolute(builder: Any, a: Any) -> Any:
    """|a|."""
    return _call(builder, "llvm.fabs.v16f32", F32x16.llvm, a)


@_operation(F32x16, F32x16)
def round_even(builder: Any, a: Any) -> Any:
    """a rounded to the nearest whole number, ties to even."""
    return _call(builder, "llvm.rint.v16f32", F32x16.llvm, a)


@_operation(I32x16, F32x16)
def to_i32(builder: Any, a: Any) -> Any:
    """a, a whole number within int32, as int32."""
    return builder.fptosi(a, I32x16.llvm)


@_operation(F32x16, I32x16)
def power_of_two(builder: Any, n: Any) -> Any:
    """2^n for n from -126 to 127."""
    biased = builder.add(n, _constant(I32x16.llvm, 127))
    return builder.bitcast(builder.shl(biased, _constant(I32x16.llvm, 23)), F32x16.llvm)


@_operation(F32x16, F32x16, types.float32, F32x16)
def zero_below(builder: Any, a: Any, bound: Any, value: Any) -> Any:
    """`value`, but 0 where a < bound."""
    below = builder.fcmp_ordered("<", a, _splat(builder, bound))
    return builder.select(below, _constant(F32x16.llvm, 0.0), value)


@_operation(F32x16, F32x16)
def to_f16_range(builder: Any, a: Any) -> Any:
    """a limited to what float16 holds; nan stays nan."""
    limit, negative = _constant(F32x16.llvm, 65504.0), _constant(F32x16.llvm, -65504.0)
    low = builder.select(builder.fcmp_ordered(">", a, limit), limit, a)
    return builder.select(builder.fcmp_ordered("<", low, negative), negative, low)


def _lanes_from(builder: Any, first: Any) -> Any:
    lanes = ir.Constant(I32x16.llvm, list(range(16)))
    return builder.add(lanes, _splat(builder, builder.trunc(first, _I32)))


@_operation(F32x16, F32x16, types.int64, types.int64, types.int64)
def mask_outside(builder: Any, a: Any, base: Any, first: Any, last: Any) -> Any:
    """a, but -inf in lanes whose position base + lane lies outside first..last (inclusive)."""
    position = _lanes_from(builder, base)
    low = builder.icmp_signed(">=", position, _splat(builder, builder.trunc(first, _I32)))
    high = builder.icmp_signed("<=", position, _splat(builder, builder.trunc(last, _I32)))
    return builder.select(builder.and_(low, high), a, _constant(F32x16.llvm, float("-inf")))


def _halve(builder: Any, a: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines lanes pairwise, far halves first, down to one scalar: always the same tree."""
    count = a.type.count
    while count > 1:
        count //= 2
        low = builder.shuffle_vector(a, a, ir.Constant(ir.VectorType(_I32, count), list(range(count))))
        high = builder.shuffle_vector(
            a, a, ir.Constant(ir.VectorType(_I32, count), list(range(count, 2 * count)))
        )
        a = combine(low, high)
    return builder.extract_element(a, _I32(0))


@_operation(types.float32, F32x16)
def sum_lanes(builder: Any, a: Any) -> Any:
    """The sum of 16 lanes, in a fixed order."""
    return _halve(builder, a, builder.fadd)


@_operation(types.float32, F32x16)
def max_lanes(builder: Any, a: Any) -> Any:
    """The largest of 16 lanes."""
    return _halve(builder, a, lambda x, y: _select_max(builder, x, y, ">"))


@_operation(F64x16, types.float64)
def splat_f64(builder: Any, value: Any) -> Any:
    """A vector of 16 equal float64."""
    return _splat(builder, value)


@_operation(F64x16, F32x16)
def widen(builder: Any, a: Any) -> Any:
    """16 float32 as float64."""
    return builder.fpext(a, F64x16.llvm)


@_operation(F64x16, F64x16, F64x16)
def add_f64(builder: Any, a: Any, b: Any) -> Any:
    """a + b, rounded to float64."""
    return builder.fadd(a, b)


@_operation(F64x16, F64x16, F64x16)
def multiply_f64(builder: Any, a: Any, b: Any) -> Any:
    """a * b, rounded to float64."""
    return builder.fmul(a, b)


@_operation(types.float64, F64x16)
def sum_lanes_f64(builder: Any, a: Any) -> Any:
    """The sum of 16 float64 lanes, in a fixed order."""
    return _halve(builder, a, builder.fadd)


@_operation(types.int64, F32x16, types.float32)
def lanes_from(builder: Any, a: Any, bound: Any) -> Any:
    """A bit per lane, lowest first: lane >= bound."""
    reached = builder.fcmp_ordered(">=", a, _splat(builder, bound))
    return builder.zext(builder.bitcast(reached, _I16), _I64)


@_operation(types.int64, I32x16)
def sum_lanes_i32(builder: Any, a: Any) -> Any:
    """The sum of 16 int32 lanes."""
    return builder.sext(_halve(builder, a, builder.add), _I64)


@_operation(types.int64, F32x16, types.float32)
def lanes_above(builder: Any, a: Any, bound: Any) -> Any:
    """A bit per lane, lowest first: lane > bound."""
    above = builder.fcmp_ordered(">", a, _splat(builder, bound))
    return builder.zext(builder.bitcast(above, _I16), _I64)


@_operation(types.int64, F32x16)
def lanes_nan(builder: Any, a: Any) -> Any:
    """A bit per lane, lowest first: lane is nan."""
    return builder.zext(builder.bitcast(builder.fcmp_unordered("uno", a, a), _I16), _I64)


@_operation(types.void, types.int64, I32x16)
def store_words(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 int32 within int8 as four 4-byte words, 32 bytes apart: four groups of a q8 panel."""
    words = builder.bitcast(builder.trunc(value, ir.VectorType(_I8, 16)), ir.VectorType(_I32, 4))
    for i in range(4):
        where = _pointer(builder, _at(builder, address, 32 * i), _I32)
        builder.store(builder.extract_element(words, _I32(i)), where, align=4)


@_operation(types.void, types.int64, I32x16)
def store_i8x16(builder: Any, address: Any, value: Any) -> None:
    """Stores 16 int32 within int8 as bytes."""
    narrow = builder.trunc(value, ir.VectorType(_I8, 16))
    builder.store(narrow, _pointer(builder, address, narrow.type), align=1)


@_operation(types.void, types.int64, I32x16, types.int64)
def store_i8(builder: Any, address: Any, value: Any, stride: Any) -> None:
    """Stores 16 int32 within int8 as bytes, `stride` apart."""
    narrow = builder.trunc(value, ir.VectorType(_I8, 16))
    for i in range(16):
        where = _pointer(builder, _at(builder, address, builder.mul(stride, _I64(i))), _I8)
        builder.store(builder.extract_element(narrow, _I32(i)), where, align=1)


@_operation(types.void, types.int64, F32x16)
def store_first_f16(builder: Any, address: Any, value: Any) -> None:
    """Stores the first of 16 values rounded to float16; the caller keeps it in its range."""
    first = builder.extract_element(_float_to_half(builder, value), _I32(0))
    builder.store(first, _pointer(builder, address, first.type), align=2)


@_operation(U8x64, U8x64)
def low_nibbles(builder: Any, a: Any) -> Any:
    """The low four bits of each byte."""
    return builder.and_(a, _constant(U8x64.llvm, 15))


@_operation(U8x64, U8x64)
def high_nibbles(builder: Any, a: Any) -> Any:
    """The high four bits of each byte."""
    return builder.lshr(a, _constant(U8x64.llvm, 4))


@_operation(U8x64, U8x64, types.int64, types.int64, types.int64)
def byte_bits(builder: Any, a: Any, right: Any, mask: Any, left: Any) -> Any:
    """((a >> right) & mask) << left in each byte; the result must fit into the byte."""
    # 16 bits at a time, for which CPUs have shifts: the mask drops what came from the neighbour
    shorts = ir.VectorType(_I16, 32)
    right, left = (_splat(builder, builder.trunc(v, _I16), 32) for v in (right, left))
    shifted = builder.bitcast(builder.lshr(builder.bitcast(a, shorts), right), U8x64.llvm)
    kept = builder.and_(shifted, _splat(builder, builder.trunc(mask, _I8), 64))
    return builder.bitcast(builder.shl(builder.bitcast(kept, shorts), left), U8x64.llvm)


@_operation(U8x64, U8x64, U8x64)
def either(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@_operation(I32x16, I32x16, types.int64, types.int64, types.int64)
def word_bits(builder: Any, a: Any, right: Any, mask: Any, left: Any) -> Any:
    """((a >> right) & mask) << left in each 4-byte word."""
    right, mask, left = (_splat(builder, builder.trunc(v, _I32)) for v in (right, mask, left))
    return builder.shl(builder.and_(builder.lshr(a, right), mask), left)


@_operation(I32x16, I32x16, I32x16)
def either_word(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@_operation(F32x16, I32x16)
def words_to_f32(builder: Any, words: Any) -> Any:
    """float(word)."""
    return builder.sitofp(words, F32x16.llvm)


@_operation(F32x16, I32x16, types.int64, types.int64)
def byte_to_f32(builder: Any, words: Any, k: Any, offset: Any) -> Any:
    """float(byte k of each word + offset)."""
    shift = _splat(builder, builder.trunc(builder.mul(k, _I64(8)), _I32))
    byte = builder.and_(builder.lshr(words, shift), _constant(I32x16.llvm, 255))
    return builder.sitofp(builder.add(byte, _splat(builder, builder.trunc(offset, _I32))), F32x16.llvm)


@_operation(F32x16, I32x16, types.int64)
def signed_byte_to_f32(builder: Any, words: Any, k: Any) -> Any:
    """float(byte k of each word, as int8)."""
    left = _splat(builder, builder.trunc(builder.sub(_I64(24), builder.mul(k, _I64(8))), _I32))
    byte = builder.ashr(builder.shl(words, left), _constant(I32x16.llvm, 24))
    return builder.sitofp(byte, F32x16.llvm)


@_operation(I32x16, types.int64)
def load_u16x16(builder: Any, address: Any) -> Any:
    """16 uint16, widened to int32."""
    bits = builder.load(_pointer(builder, address, ir.VectorType(_I16, 16)), align=1)
    return builder.zext(bits, I32x16.llvm)


def look_up(table: Sequence[int]) -> Any:
    """An operation: for each byte (0 to 15) its entry in a table of 16 signed bytes."""

    @_operation(U8x64, U8x64)
    def look_up_bytes(builder: Any, indices: Any) -> Any:
        """The table's entries for 64 indices."""
        lowering = cpu_target().lowering
        if lowering == "generic":
            result = _constant(U8x64.llvm, 0)
            for i, entry in enumerate(table):
                is_entry = builder.icmp_unsigned("==", indices, _constant(U8x64.llvm, i))
                result = builder.select(is_entry, _constant(U8x64.llvm, entry), result)
            return result
        if lowering == "avx512vnni":
            tables = ir.Constant(U8x64.llvm, [*table] * 4)
            return _call(builder, "llvm.x86.avx512.pshuf.b.512", U8x64.llvm, tables, indices)
        half = ir.Constant(ir.VectorType(_I8, 32), [*table] * 2)
        halves = _split(builder, indices)
        return _join(builder, *(_call(builder, "llvm.x86.avx2.pshuf.b", half.type, half, i) for i in halves))

    return look_up_bytes


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):

    def _make(name: str) -> Any:
        @_operation(F32x16, F32x16, F32x16)
        def arithmetic(builder: Any, a: Any, b: Any) -> Any:
            return getattr(builder, name)(a, b)

        return arithmetic

    def _bind(symbol: Any, operation: Any) -> None:
        @overload(symbol)
        def resolve(a, b):
            if isinstance(a, Vec) and isinstance(b, Vec):
                return lambda a, b: operation(a, b)
            return None

    _bind(_symbol, _make(_name))


@device
def exponential(x):
    """e^x of 16 lanes, within 2 ulp; 0 below -87.3, and exactly 1 at 0."""
    limited = minimum(maximum(x, splat(-87.3)), splat(88.0))
    n = round_even(limited * splat(1.44269504))
    r = fma(n, splat(-0.693359375), limited)
    r = fma(n, splat(2.12194440e-4), r)
    p = fma(splat(1.9875691500e-4), r, splat(1.3981999507e-3))
    p = fma(p, r, splat(8.3334519073e-3))
    p = fma(p, r, splat(4.1665795894e-2))
    p = fma(p, r, splat(1.6666665459e-1))
    p = fma(p, r, splat(5.0000001201e-1))
    p = fma(p, r * r, r) + splat(1.0)
    return zero_below(x, -87.3, p * power_of_two(to_i32(n)))


# --- the int8 dot product -----------------------------------------------------------------------------
# dot4(acc, u, s): acc[i] += sum over k < 4 of u[4i + k] * s[4i + k], u unsigned, s signed bytes.
# Unsigned operands above 127 would saturate the 16-bit sums of AVX2, so there are two forms: nibbles
# (u at most 31) and signed bytes. The second leaves a bias of 128 * sum(s) on instruction sets that have
# only unsigned times signed; `signed_dot_shift()` tells kernels how to start their accumulators.


def signed_dot_shift() -> int:
    """7 where dot4 of signed weights computes (w + 128) · s, so that accumulators start at -sum(s) << 7."""
    return 7 if cpu_target().lowering in ("avx512vnni", "avxvnni") else -1


def _split(builder: Any, a: Any) -> list[Any]:
    half = a.type.count // 2
    lanes = ir.VectorType(_I32, half)
    return [
        builder.shuffle_vector(a, a, ir.Constant(lanes, list(range(start, start + half))))
        for start in (0, half)
    ]


def _join(builder: Any, low: Any, high: Any) -> Any:
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, count), list(range(count))))


def _dot4_unsigned(builder: Any, acc: Any, u: Any, s: Any) -> Any:
    lowering = cpu_target().lowering
    if lowering == "avx512vnni":
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", I32x16.llvm, acc, u, s)
    if lowering == "generic":
        return _dot4_generic(builder, acc, u, s, builder.zext)
    pairs = zip(_split(builder, acc), _split(builder, u), _split(builder, s), strict=True)
    emit = _vnni_256 if lowering == "avxvnni" else _maddubs_256
    return _join(builder, *(emit(builder, *pair) for pair in pairs))


def _vnni_256(builder: Any, acc: Any, u: Any, s: Any) -> Any:
    return _call(builder, "llvm.x86.avx512.vpdpbusd.256", acc.type, acc, u, s)


def _maddubs_256(builder: Any, acc: Any, u: Any, s: Any) -> Any:
    shorts = ir.VectorType(_I16, 16)
    pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, u, s)
    quads = _call(builder, "llvm.x86.avx2.pmadd.wd", acc.type, pairs, _constant(shorts, 1))
    return builder.add(acc, quads)


def _dot4_generic(builder: Any, acc: Any, u: Any, s: Any, widen_u: Any) -> Any:
    for k in range(4):
        lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(k, 64, 4)))
        a = widen_u(builder.shuffle_vector(u, u, lanes), I32x16.llvm)
        b = builder.sext(builder.shuffle_vector(s, s, lanes), I32x16.llvm)
        acc = builder.add(acc, builder.mul(a, b))
    return acc


def _dot4_signed(builder: Any, acc: Any, w: Any, s: Any) -> Any:
    lowering = cpu_target().lowering
    if lowering in ("avx512vnni", "avxvnni"):
        return _dot4_unsigned(builder, acc, builder.xor(w, _constant(U8x64.llvm, 0x80)), s)
    if lowering == "generic":
        return _dot4_generic(builder, acc, w, s, builder.sext)
    # |w| times s with the sign of w: products stay below the 16-bit saturation
    halves = []
    for a, x, y in zip(_split(builder, acc), _split(builder, w), _split(builder, s), strict=True):
        size = _call(builder, "llvm.abs.v32i8", x.type, x, _I1(0))
        signed = _call(builder, "llvm.x86.avx2.psign.b", x.type, y, x)
        halves.append(_maddubs_256(builder, a, size, signed))
    return _join(builder, *halves)


# --- tiles --------------------------------------------------------------------------------------------


_FEW_TOKENS = 8  # as many as a panel has: with two or three panels, too, weights are waited for
_AHEAD_BYTES = 4096


def fetch_ahead(n_lines: int) -> Any:
    """An operation: asks for `n_lines` cache lines some way after an address, if `tile` is of few tokens."""

    @_tile_operation(lambda tile: types.void, types.int64)
    def fetch_lines_ahead(builder: Any, n: int, tile: Any, address: Any) -> None:
        """Prefetches the weights that are multiplied soon."""
        if n <= _FEW_TOKENS:
            for line in range(n_lines):
                _prefetch(builder, _at(builder, address, _AHEAD_BYTES + 64 * line))

    return fetch_lines_ahead


@intrinsic(prefer_literal=True)
def tile_zeros_f32(context: Any, n: Any) -> Any:
    """A tile of `n` (a literal) zero vectors."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(ir.ArrayType(F32x16.llvm, n.literal_value), None)

    return Tile(F32x16, n.literal_value)(n), generate


def _same(tile: Tile) -> Tile:
    return tile


def _as_i32(tile: Tile) -> Tile:
    return Tile(I32x16, tile.n)


@_tile_operation(_as_i32)
def tile_zeros_like(builder: Any, n: int, tile: Any) -> Any:
    """A tile of int32 zeros, as long as `tile`."""
    return ir.Constant(ir.ArrayType(I32x16.llvm, n), None)


@_tile_operation(_as_i32, types.int64, types.int64)
def tile_offset_start(builder: Any, n: int, tile: Any, address: Any, shift: Any) -> Any:
    """A tile of int32 whose entry i holds (int32 at address + 4i) << shift; zeros for shift -1."""

    def start(i: int) -> Any:
        value = builder.load(_pointer(builder, _at(builder, address, 4 * i), _I32), align=4)
        shifted = builder.shl(value, builder.trunc(shift, _I32))
        kept = builder.select(builder.icmp_signed("<", shift, _I64(0)), _I32(0), shifted)
        return _splat(builder, kept)

    return _each(builder, n, I32x16.llvm, start)


@_tile_operation(_same, types.int64, types.int64)
def tile_offset_add(builder: Any, n: int, acc: Any, address: Any, shift: Any) -> Any:
    """acc[i] += (int32 at address + 4i) << shift; nothing for shift -1."""

    def step(i: int) -> Any:
        value = builder.load(_pointer(builder, _at(builder, address, 4 * i), _I32), align=4)
        shifted = builder.shl(value, builder.trunc(shift, _I32))
        kept = builder.select(builder.icmp_signed("<", shift, _I64(0)), _I32(0), shifted)
        return builder.add(builder.extract_value(acc, i), _splat(builder, kept))

    return _each(builder, n, I32x16.llvm, step)


def _tile_dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    def emit(builder: Any, n: int, acc: Any, w: Any, address: Any, stride: Any) -> Any:
        def step(i: int) -> Any:
            where = _at(builder, address, builder.mul(stride, _I64(i)))
            word = builder.load(_pointer(builder, where, _I32), align=4)
            s = builder.bitcast(_splat(builder, word), U8x64.llvm)
            return dot(builder, builder.extract_value(acc, i), w, s)

        return _each(builder, n, I32x16.llvm, step)

    return emit


tile_dot4 = _tile_operation(_same, U8x64, types.int64, types.int64)(
    _renamed("tile_dot4", _tile_dot(_dot4_unsigned))
)
tile_dot4_signed = _tile_operation(_same, U8x64, types.int64, types.int64)(
    _renamed("tile_dot4_signed", _tile_dot(_dot4_signed))
)


def _broadcast_f32(builder: Any, address: Any) -> Any:
    return _splat(builder, builder.load(_pointer(builder, address, _F32), align=4))


@_tile_operation(_same, F32x16, types.int64, types.int64)
def tile_fma(builder: Any, n: int, acc: Any, v: Any, address: Any, stride: Any) -> Any:
    """acc[i] += v * (float32 at address + i * stride)."""

    def step(i: int) -> Any:
        x = _broadcast_f32(builder, _at(builder, address, builder.mul(stride, _I64(i))))
        return _call(builder, "llvm.fma.v16f32", F32x16.llvm, v, x, builder.extract_value(acc, i))

    return _each(builder, n, F32x16.llvm, step)


@_tile_operation(_same, None, F32x16, types.int64)
def tile_fold(builder: Any, n: int, out: Any, acc: Any, scale: Any, address: Any) -> Any:
    """out[i] += float(acc[i]) * scale * (float32 at address + 4i): one block's integer sums."""

    def step(i: int) -> Any:
        x = _broadcast_f32(builder, _at(builder, address, 4 * i))
        scaled = builder.fmul(builder.sitofp(builder.extract_value(acc, i), F32x16.llvm), scale)
        return _call(builder, "llvm.fma.v16f32", F32x16.llvm, scaled, x, builder.extract_value(out, i))

    return _each(builder, n, F32x16.llvm, step)


@_tile_operation(_same, F32x16, types.int64, types.int64)
def tile_take_min(builder: Any, n: int, out: Any, low: Any, sums: Any, scales: Any) -> Any:
    """out[i] += low * (float32 at scales + 4i) * float(int32 at sums + 4i): the mins of half a block."""

    def step(i: int) -> Any:
        total = builder.load(_pointer(builder, _at(builder, sums, 4 * i), _I32), align=4)
        scale = builder.load(_pointer(builder, _at(builder, scales, 4 * i), _F32), align=4)
        x = _splat(builder, builder.fmul(builder.sitofp(total, _F32), scale))
        return _call(builder, "llvm.fma.v16f32", F32x16.llvm, low, x, builder.extract_value(out, i))

    return _each(builder, n, F32x16.llvm, step)


@_tile_operation(lambda tile: types.void, types.int64, types.int64, types.int64)
def tile_store(builder: Any, n: int, tile: Any, address: Any, stride: Any, count: Any) -> None:
    """Stores the first `count` entries, 16 float32 each, at address + i * stride."""
    for i in range(n):
        with builder.if_then(builder.icmp_signed(">", count, _I64(i)), likely=True):
            where = _at(builder, address, builder.mul(stride, _I64(i)))
            builder.store(builder.extract_value(tile, i), _pointer(builder, where, F32x16.llvm), align=1)


@_tile_operation(_same, types.int64, types.int64, types.int64)
def tile_add(builder: Any, n: int, tile: Any, address: Any, stride: Any, count: Any) -> Any:
    """tile[i] += the 16 float32 at address + i * stride, for i < count; other entries are undefined."""

    def step(i: int) -> Any:
        # rows past the end read row 0 instead, which exists
        offset = builder.select(
            builder.icmp_signed(">", count, _I64(i)), builder.mul(stride, _I64(i)), _I64(0)
        )
        row = builder.load(_pointer(builder, _at(builder, address, offset), F32x16.llvm), align=1)
        return builder.fadd(builder.extract_value(tile, i), row)

    return _each(builder, n, F32x16.llvm, step)


# --- atomics ------------------------------------------------------------------------------------------


@_operation(types.int64, types.int64, types.int64)
def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 that other threads use, and returns what it was."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), value, "seq_cst")


@_operation(types.int64, types.int64)
def atomic_load(builder: Any, address: Any) -> Any:
    """An int64 that other threads write; what they wrote before it is visible after."""
    return builder.load_atomic(_pointer(builder, address, _I64), "acquire", 8)


@_operation(types.void, types.int64, types.int64)
def atomic_store(builder: Any, address: Any, value: Any) -> None:
    """Publishes an int64, and everything written before it."""
    builder.store_atomic(value, _pointer(builder, address, _I64), "release", 8)


@_operation(types.void)
def spin_pause(builder: Any) -> None:
    """Tells the CPU that this is a waiting loop."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    else:
        _call(builder, "llvm.aarch64.hint", ir.VoidType(), _I32(1))


@_operation(types.void)
def yield_cpu(builder: Any) -> None:
    """Lets another runnable thread have this CPU."""
    _call(builder, "sched_yield", _I32)


@_operation(types.int64)
def monotonic_ns(builder: Any) -> Any:
    """Nanoseconds of a clock that only goes forward."""
    with builder.goto_entry_block():
        spec = builder.alloca(ir.ArrayType(_I64, 2))
    address = builder.ptrtoint(spec, _I64)
    _call(builder, "clock_gettime", _I32, _I32(6 if sys.platform == "darwin" else 1), spec)
    seconds = builder.load(_pointer(builder, address, _I64))
    nanoseconds = builder.load(_pointer(builder, _at(builder, address, 8), _I64))
    return builder.add(builder.mul(seconds, _I64(1_000_000_000)), nanoseconds)


@_operation(types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder: Any, address: Any, record: Any, tile: Any) -> Any:
    """Calls a kernel by address: kernel(record, tile) -> int64."""
    function = ir.FunctionType(_I32, [_I64.as_pointer(), _I8.as_pointer().as_pointer(), _I64, _I64])
    with builder.goto_entry_block():
        result = builder.alloca(_I64)
        error = builder.alloca(_I8.as_pointer())
    pointer = builder.inttoptr(address, function.as_pointer())
    builder.call(pointer, [result, error, record, tile])
    return builder.load(result)
