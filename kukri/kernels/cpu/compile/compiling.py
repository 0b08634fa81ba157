"""Compiles kernels into the cache on all cores: Numba compiles on one, so helper processes do the rest.

The process that compiles a kernel holds a lock of its name, so that no two do the same work: neither helpers
nor two programs that were started together.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kukri.errors import MissingKernelError
from kukri.host.garbage import without_collections
from kukri.host.installed import install_command
from kukri.host.os_calls import locked
from kukri.host.private_files import make_private
from kukri.kernels.cpu.compile.features import cpu_target, has_compiler, usable_cores
from kukri.kernels.cpu.compile.kernel_cache import (
    KERNEL_MODULES,
    KERNEL_PACKAGE,
    KernelCode,
    cache_dir,
    read_cached,
    store,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.levels import level_named
from kukri.kernels.cpu.compile.shipped_kernels import read_shipped, reason_for_compiling

_SOON = ("choose_tokens",)  # what every answer needs and what takes longest; helpers begin with it
_MOST_HELPERS = 3  # each takes some 230 MB; more would not be done sooner than the longest kernel
_helpers: list[subprocess.Popen[bytes]] = []


def compile_with_helpers(names: Sequence[str]) -> Iterator[tuple[str, KernelCode]]:
    """Each kernel once it is compiled, by this process or another.

    Raises MissingKernelError if nothing is installed to compile with.
    """
    if not has_compiler():
        raise MissingKernelError(
            f"the kernel {names[0]} must be compiled, for {reason_for_compiling()}: run "
            f"`{install_command('compile')}`, which adds Numba"
        )
    _start_helpers(names)
    return compile_kernels(names)


def compile_kernels(names: Iterable[str]) -> Iterator[tuple[str, KernelCode]]:
    """Yield each kernel, from the cache or compiled; kernels that another process is compiling come last."""
    left = deque(names)
    n_busy = 0  # how many of those left were looked at since the last that was not
    while left:
        name = left.popleft()
        with _claim(name, wait=n_busy > len(left)) as is_ours:
            if is_ours:
                yield name, read_cached(name) or _compile_and_store(name)
                n_busy = 0
            else:
                left.append(name)
                n_busy += 1


def help_compiling() -> None:
    """Compiles the kernels that the process's arguments name; a helper's entry point. Ends with its stdin."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)  # the process that waited for the kernels is gone

    threading.Thread(target=watch, daemon=True).start()
    for _ in compile_kernels(sys.argv[1:]):
        pass


def _start_helpers(missing: Sequence[str]) -> None:
    """Starts processes that compile into the cache alongside this one, which compiles the rest."""
    _helpers[:] = [helper for helper in _helpers if helper.poll() is None]
    soon = [
        name for name in _SOON if name not in missing and (read_shipped(name) or read_cached(name)) is None
    ]
    n_more = min(len(missing) + len(soon) - 1, usable_cores(), _MOST_HELPERS) - len(_helpers)
    if getattr(sys, "frozen", False) or "python" not in Path(sys.executable or "").name:
        return  # another program that has Python in it, which would not know what to do
    # -P: nothing that lies in the working directory is imported
    command = [sys.executable, "-P", "-c", f"from {__name__} import help_compiling; help_compiling()"]
    for _ in range(n_more):
        with suppress(OSError):
            _helpers.append(
                subprocess.Popen(
                    [*command, *soon, *reversed(missing)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )


@contextmanager
def _claim(name: str, *, wait: bool) -> Iterator[bool]:
    """Yields True if this process may compile a kernel: no other does, or there is no cache to share.

    The lock is the system's, so that it ends with the process.
    """
    with ExitStack() as stack:
        is_ours: bool | None = None
        with suppress(OSError):
            make_private(cache_dir())
            is_ours = stack.enter_context(locked(cache_dir() / f"{name}.lock", wait=wait, create=True))
        yield is_ours is not False


def find_source(name: str) -> tuple[str, KernelSource]:
    """The module of `KERNEL_MODULES` and the Python source of a kernel.

    Names are such as `linear_Q4_1` or, in a family, `attend_f16[3,64]`. Raises KeyError.
    """
    family, _, arguments = name.partition("[")
    for module_name in KERNEL_MODULES:
        module = importlib.import_module(f"{KERNEL_PACKAGE}.{module_name}")
        found = module.KERNELS.get(family)
        if found is not None:
            if not arguments:
                return module_name, found
            values = [int(value) for value in arguments.rstrip("]").split(",")]
            return module_name, found(*values)
    raise KeyError(f"a kernel source for {name} was not found")


def _compile_and_store(name: str) -> KernelCode:
    if chosen := level_named(os.environ.get("KUKRI_CPU", "")):
        os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = chosen.cpu, chosen.features
    if "NUMBA_CPU_FEATURES" not in os.environ:
        if os.environ.get("NUMBA_CPU_NAME"):
            os.environ["NUMBA_CPU_FEATURES"] = ""  # else Numba adds the host's features to the named CPU
        elif cpu_target().lowering == "dotprod":
            os.environ["NUMBA_CPU_FEATURES"] = (
                cpu_target().features
            )  # features that LLVM does not find itself
    from kukri.kernels.cpu.compile.intrinsics import compile_kernel

    module, source = find_source(name)
    with without_collections():
        symbol, code = compile_kernel(source)
    kernel = symbol, source.parameters, code
    store(name, module, kernel)
    return kernel
