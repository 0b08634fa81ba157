"""Compiles kernels for ARM on a processor of any kind, ten times as fast as under an emulator.

Run as a program with a directory and names of kernels, and the processor in NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES: writes the kernels there as the kernel cache keeps them.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import llvmlite.binding as llvm


def aim_at_arm() -> None:
    """Lets Numba, and kukri, take this process for one on ARM. Nothing that they compile can be run here."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: "aarch64-unknown-linux-gnu"
    platform.machine = lambda: "aarch64"


def assembly(name: str) -> str:
    """The assembly of a kernel."""
    from kukri.kernels.cpu.compile.compiling import find_source
    from kukri.kernels.cpu.compile.intrinsics import compile_kernel

    llvm.TargetMachine.emit_object = lambda machine, module: machine.emit_assembly(module).encode()
    return compile_kernel(find_source(name)[1])[1].decode()


if __name__ == "__main__":
    aim_at_arm()
    from kukri.kernels.cpu.compile import kernel_cache
    from kukri.kernels.cpu.compile.compiling import find_source
    from kukri.kernels.cpu.compile.intrinsics import compile_kernel

    kernel_cache.cache_dir = lambda: Path(sys.argv[1])
    for name in sys.argv[2:]:
        module, source = find_source(name)
        symbol, code = compile_kernel(source)
        kernel_cache.store(name, module, (symbol, source.parameters, code))
