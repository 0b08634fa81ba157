"""Atomics, spin-wait, a clock and indirect calls for the executor."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kukri.kernels.cpu.compile.intrinsics import call_llvm, operation, pointer, renamed

_I8, _I32, _I64 = (ir.IntType(n) for n in (8, 32, 64))


def _atomic_add(order: str) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, value: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, address, _I64), value, order)

    return emit


# They add to an int64 that other threads use, and return its former value. x86 has one instruction for all;
# on ARM they differ.
atomic_claim = operation(types.int64, types.int64, types.int64)(  # sees what was written before its store
    renamed("atomic_claim", _atomic_add("acquire"))
)
atomic_finish = operation(types.int64, types.int64, types.int64)(  # that, and publishes every write before it
    renamed("atomic_finish", _atomic_add("acq_rel"))
)
atomic_count = operation(types.int64, types.int64, types.int64)(  # nothing but the number
    renamed("atomic_count", _atomic_add("monotonic"))
)


@operation(types.int64, types.int64)
def atomic_load(builder: Any, address: Any) -> Any:
    """Acquire load of an int64: writes before its store are visible after."""
    return builder.load_atomic(pointer(builder, address, _I64), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def atomic_store(builder: Any, address: Any, value: Any) -> None:
    """Release store of an int64: publishes it and every write before it."""
    builder.store_atomic(value, pointer(builder, address, _I64), "release", 8)


@operation(types.void)
def spin_pause(builder: Any) -> None:
    """Tells the CPU that this is a waiting loop."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in ("aarch64", "arm64"):  # `isb`: its `yield` does nothing on most
        call_llvm(builder, "llvm.aarch64.isb", ir.VoidType(), _I32(15))


@operation(types.void)
def yield_cpu(builder: Any) -> None:
    """Yields this CPU to another runnable thread."""
    call_llvm(builder, "sched_yield", _I32)


@operation(types.int64)
def monotonic_ns(builder: Any) -> Any:
    """Nanoseconds of a clock that only goes forward."""
    with builder.goto_entry_block():
        spec = builder.alloca(ir.ArrayType(_I64, 2))
    address = builder.ptrtoint(spec, _I64)
    call_llvm(builder, "clock_gettime", _I32, _I32(6 if sys.platform == "darwin" else 1), spec)
    seconds = builder.load(pointer(builder, address, _I64))
    nanoseconds = builder.load(pointer(builder, builder.add(address, _I64(8)), _I64))
    return builder.add(builder.mul(seconds, _I64(1_000_000_000)), nanoseconds)


@operation(types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder: Any, address: Any, record: Any, tile: Any) -> Any:
    """Calls a kernel by address: kernel(record, tile) -> int64."""
    function = ir.FunctionType(_I32, [_I64.as_pointer(), _I8.as_pointer().as_pointer(), _I64, _I64])
    with builder.goto_entry_block():
        result = builder.alloca(_I64)
        error = builder.alloca(_I8.as_pointer())
    kernel = builder.inttoptr(address, function.as_pointer())
    builder.call(kernel, [result, error, record, tile])
    return builder.load(result)
