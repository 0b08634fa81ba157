"""Numba intrinsics of kernels: how functions and operations are defined, scalars, and the compiler.

An operation is a Numba intrinsic whose LLVM code a Python function emits. Addresses are int64 byte addresses,
as kernels find them in their records; nothing here checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba._dynfunc import make_function
from numba.core import cgutils
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from kukri.kernels.cpu.compile.kernel_source import KernelSource

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32 = ir.FloatType()


class _LinkedCode(CPUCodeLibrary):  # type: ignore[misc]
    """The code of a function and of those that it calls, linked but not yet optimized.

    Numba would optimize each function, make machine code of it, and do so again for each that inlines it.
    Here a kernel is optimized as a whole, once; loops that call other functions are not unrolled by then.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def object_code(self) -> bytes:
        """The machine code of a kernel, optimized."""
        super()._optimize_final_module()
        return self._codegen._tm.emit_object(self._final_module)  # type: ignore[no-any-return]


class _Compiler(Compiler):  # type: ignore[misc]
    """Numba's compiler up to linked code, which Python cannot call."""

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, *others: Any) -> None:
        super().__init__(typing, target, _LinkedCode(target.codegen(), "function"), args, *others)
        self.state.targetctx.get_executable = _no_function


def _no_function(code: Any, described: Any, environment: Any) -> Any:
    """An object for Numba to know a compiled function by, instead of one that Python can call."""
    code._ensure_finalized()
    return make_function(described.lookup_module(), described.qualname, "", 0, environment, (code,))


# The options of every kernel and of the functions that kernels are made of.
_OPTIONS: dict[str, Any] = {
    "pipeline_class": _Compiler,
    "error_model": "numpy",
    "nogil": True,
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,  # nothing is allocated: object code has no need of Numba's runtime
    "fastmath": False,  # else a function has the flags of whichever caller is compiled first in a process
}


def device(function: Callable[..., Any]) -> Any:
    """Marks a function that kernels call; it is always inlined."""
    return njit(forceinline=True, **_OPTIONS)(function)


def routine(function: Callable[..., Any]) -> Any:
    """Marks a function that kernels call and that is compiled once for all its callers."""
    return njit(**_OPTIONS)(function)


def reordered(function: Callable[..., Any]) -> Any:
    """Marks a routine whose sums may be reordered, so that they use vectors; it promises no bits.

    It is optimized on its own too: some loops use vectors only before it is inlined.
    """
    options = _OPTIONS | {"pipeline_class": Compiler, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
    return njit(**options)(function)


def part(function: Callable[..., Any]) -> Any:
    """Marks a function with one caller, which is compiled as a part of it: sooner than on its own."""
    return njit(inline="always", **_OPTIONS)(function)


def compile_kernel(source: KernelSource) -> tuple[str, bytes]:
    """(symbol, object code) of a kernel, compiled for `cpu_target()`."""
    loads = ", ".join(f"load_i64(record + {8 * i})" for i in range(len(source.parameters)))
    namespace: dict[str, Any] = {"body": part(source.function), "load_i64": load_i64}
    exec(f"def entry(record, tile):\n    return body(tile, {loads})", namespace)
    function: Any = njit("int64(int64, int64)", **_OPTIONS)(namespace["entry"])
    (compiled,) = function.overloads.values()
    linked, described = attrgetter("library", "fndesc")(compiled)  # its code, all parts linked, and its names
    return described.llvm_func_name, linked.object_code()


# --- how operations are defined -----------------------------------------------------------------------


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Defines an operation on values of fixed types; the decorated function emits its LLVM code."""

    def define(emit: Callable[..., Any]) -> Any:
        names = [f"a{i}" for i in range(len(parameters))]

        def typing(context: Any, *_: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*parameters), generate

        return named_intrinsic(emit.__name__, names, typing, emit.__doc__)

    return define


def named_intrinsic(name: str, parameters: list[str], typing: Callable[..., Any], doc: str | None) -> Any:
    """An intrinsic of this name, with parameters of these names, typed and emitted by `typing`."""
    # Numba reads an intrinsic's parameter names from its code, so a function with those names is made
    arguments = ", ".join(parameters)
    namespace = {"typing": typing}
    head = f"def {name}(context, {arguments}):" if arguments else f"def {name}(context):"
    exec(f"{head}\n    return typing(context, {arguments})", namespace)
    made: Any = namespace[name]
    made.__doc__ = doc
    return intrinsic(made)


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """An int64 address as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def broadcast(builder: Any, value: Any, count: int = 16) -> Any:
    """A vector of `count` times the value."""
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def constant(vector: Any, value: Any) -> Any:
    """A vector of this type with one constant in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call_llvm(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Calls a function of LLVM's or of the C library by its name."""
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def at(builder: Any, address: Any, offset: Any) -> Any:
    """An address and an offset in bytes, a value or a number, added."""
    return builder.add(address, offset if isinstance(offset, ir.Value) else _I64(offset))


def split(builder: Any, a: Any) -> list[Any]:
    """The two halves of a vector."""
    half = a.type.count // 2
    lanes = ir.VectorType(_I32, half)
    return [
        builder.shuffle_vector(a, a, ir.Constant(lanes, list(range(start, start + half))))
        for start in (0, half)
    ]


def quarters(builder: Any, a: Any) -> list[Any]:
    """The four quarters of a vector."""
    return [quarter for half in split(builder, a) for quarter in split(builder, half)]


def join(builder: Any, low: Any, high: Any) -> Any:
    """The vector of these halves."""
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, count), list(range(count))))


def join_quarters(builder: Any, parts: Sequence[Any]) -> Any:
    """The vector of these quarters."""
    return join(builder, join(builder, *parts[:2]), join(builder, *parts[2:]))


# --- scalars and addresses ----------------------------------------------------------------------------


def _scalar_load(element: Any, widen: str | None = None) -> Callable[..., Any]:
    def emit(builder: Any, address: Any) -> Any:
        value = builder.load(pointer(builder, address, element), align=1)
        return getattr(builder, widen)(value, _I64) if widen else value

    return emit


def _scalar_store(element: Any, narrow: bool = False) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, value: Any) -> None:
        value = builder.trunc(value, element) if narrow else value
        builder.store(value, pointer(builder, address, element), align=1)

    return emit


def renamed(name: str, emit: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function another name, from which an operation's is made."""
    emit.__name__ = name
    return emit


load_i64 = operation(types.int64, types.int64)(renamed("load_i64", _scalar_load(_I64)))
load_i32 = operation(types.int64, types.int64)(renamed("load_i32", _scalar_load(_I32, "sext")))
load_u16 = operation(types.int64, types.int64)(renamed("load_u16", _scalar_load(_I16, "zext")))
load_u8 = operation(types.int64, types.int64)(renamed("load_u8", _scalar_load(_I8, "zext")))
load_i8 = operation(types.int64, types.int64)(renamed("load_i8", _scalar_load(_I8, "sext")))
load_f32 = operation(types.float32, types.int64)(renamed("load_f32", _scalar_load(_F32)))
store_i64 = operation(types.void, types.int64, types.int64)(renamed("store_i64", _scalar_store(_I64)))
store_i32 = operation(types.void, types.int64, types.int64)(renamed("store_i32", _scalar_store(_I32, True)))
load_f64 = operation(types.float64, types.int64)(renamed("load_f64", _scalar_load(ir.DoubleType())))
store_f64 = operation(types.void, types.int64, types.float64)(
    renamed("store_f64", _scalar_store(ir.DoubleType()))
)
store_u8 = operation(types.void, types.int64, types.int64)(renamed("store_u8", _scalar_store(_I8, True)))
store_u16 = operation(types.void, types.int64, types.int64)(renamed("store_u16", _scalar_store(_I16, True)))
store_f32 = operation(types.void, types.int64, types.float32)(renamed("store_f32", _scalar_store(_F32)))


@operation(types.float32, types.int64)
def f32_of_bits(builder: Any, bits: Any) -> Any:
    """The float that `float_bits` packed into an int64."""
    return builder.fptrunc(builder.bitcast(bits, ir.DoubleType()), _F32)


def prefetch_line(builder: Any, address: Any, nearness: int = 3) -> None:
    """Emits a prefetch of one cache line, to L1, or with less nearness to a cache further off."""
    where = pointer(builder, address, _I8)
    kind = ir.FunctionType(ir.VoidType(), [where.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [where, _I32(0), _I32(nearness), _I32(1)])


@operation(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetches a cache line."""
    prefetch_line(builder, address)


def array_at(element: Any, n_dimensions: int) -> Any:
    """An operation: the array, of Numba's type, at an address, by (address, *shape); C order."""

    @intrinsic
    def array(context: Any, address: Any, shape: Any) -> Any:
        """A view of memory that its maker keeps."""
        kind = types.Array(element, n_dimensions, "C")

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            lengths = [builder.extract_value(values[1], i) for i in range(n_dimensions)]
            size = element.bitwidth // 8
            strides = [_I64(size)]
            for length in lengths[:0:-1]:
                strides.insert(0, builder.mul(strides[0], length))
            made = make_array(kind)(context, builder)
            data = builder.inttoptr(values[0], context.get_value_type(element).as_pointer())
            populate_array(made, data, lengths, strides, _I64(size), None)
            return made._getvalue()

        return kind(address, shape), generate

    return array


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
