"""Machine code of kernels, loaded without Numba from kukri's shipped kernels, then from the cache.

`compiling.py` compiles missing ones.

A kernel is `def name(tile, a, b, …)` over int64 values: buffer addresses, sizes, and floats as bits.
The executor calls it with the address of a record that holds a, b, … and a tile number; for tile -1 it
returns how many tiles the current step has. Loading needs neither Numba nor, on x86-64 Linux, LLVM, whose
imports would cost each process 0.2 s and 0.05 s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.kernels.cpu.compile import object_code
from kukri.kernels.cpu.compile.compile_notice import CompileNotice
from kukri.kernels.cpu.compile.features import has_compiler
from kukri.kernels.cpu.compile.kernel_cache import read_cached
from kukri.kernels.cpu.compile.object_code import ObjectCode, UnsupportedObjectError
from kukri.kernels.cpu.compile.shipped_kernels import read_shipped


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in memory: `address` is called with (record address, tile); records list `parameters`.

    The code stays mapped as long as its `library` lives: a holder of the address keeps the kernel.
    """

    name: str
    address: int
    parameters: tuple[str, ...]
    library: KernelLibrary

    def __call__(self, tile: int, **arguments: int) -> int:
        """Runs one tile on this thread without the GIL; for direct calls and tests."""
        record = pack_record(self, arguments)
        return call(self.address, ctypes.addressof(record), tile)


_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def entry_point(address: int) -> Callable[..., int]:
    """A callable for a kernel's address: (address of int64 result, None, record, tile); drops the GIL."""
    return _ENTRY(address)


def call(address: int, record: int, tile: int) -> int:
    """Calls a kernel once and returns its int64 result."""
    result = ctypes.c_int64()
    entry_point(address)(ctypes.byref(result), None, record, tile)
    return result.value


def pack_record(kernel: LoadedKernel, arguments: dict[str, int]) -> ctypes.Array[ctypes.c_int64]:
    """The int64 record of a kernel's arguments, in its parameter order. Raises TypeError on other names."""
    if set(arguments) != set(kernel.parameters):
        raise TypeError(f"{kernel.name} requires {kernel.parameters}, not {tuple(arguments)}")
    return (ctypes.c_int64 * max(len(arguments), 1))(*(arguments[p] for p in kernel.parameters))


class KernelLibrary:
    """Loads kernels by name, as they came with kukri, from the cache, or by compiling them."""

    def __init__(self) -> None:
        self._kernels: dict[str, LoadedKernel] = {}
        self._objects: list[ObjectCode] = []
        self._llvm: _LlvmLoader | None = None  # made if an object needs it

    def load(self, names: Iterable[str]) -> None:
        """Make the kernels available. Missing kernels are compiled on all cores, with a notice.

        Raises MissingKernelError if some are missing and nothing is installed to compile with.
        """
        missing = []
        for name in dict.fromkeys(names):
            if name in self._kernels:
                continue
            compiled = read_shipped(name) or read_cached(name)
            if compiled is None:
                missing.append(name)
            else:
                self._link(name, *compiled)
        if missing:
            from kukri.kernels.cpu.compile.compiling import compile_with_helpers

            with CompileNotice(len(missing)) as notice:
                for name, code in compile_with_helpers(missing):
                    self._link(name, *code)
                    notice.advance()

    def __getitem__(self, name: str) -> LoadedKernel:
        """The kernel of that name, loaded on first use."""
        if name not in self._kernels:
            self.load([name])
        return self._kernels[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kernels loaded so far."""
        return tuple(self._kernels)

    def _link(self, name: str, symbol: str, parameters: tuple[str, ...], code: bytes) -> None:
        self._kernels[name] = LoadedKernel(name, self._address(symbol, code), parameters, self)

    def _address(self, symbol: str, code: bytes) -> int:
        if self._llvm is None and object_code.is_supported():
            try:
                loaded = ObjectCode(code)
                address = loaded.address(symbol)
                self._objects.append(loaded)
                return address
            except (UnsupportedObjectError, OSError) as error:
                if not has_compiler():
                    raise UnsupportedError(f"compiled kernels cannot be loaded here: {error}") from None
        if self._llvm is None:
            self._llvm = _LlvmLoader()
        return self._llvm.address(symbol, code)


class _LlvmLoader:
    """Loads objects by LLVM, on every system that it knows."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._objects: list[bytes] = []  # LLVM reads them as long as its engine lives

    def address(self, symbol: str, code: bytes) -> int:
        """Loads an object and gives the address of one of its functions."""
        from llvmlite.binding import ObjectFileRef

        self._objects.append(code)
        self._engine.add_object_file(ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(symbol))
