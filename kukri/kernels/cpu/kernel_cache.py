"""The cache of compiled kernels: sources, object code, and the files that keep it.

`jit.py` loads kernels from here without Numba, `compiling.py` fills the cache. Object code lies in a
directory named by a hash of the kernel sources, the versions and the CPU: a stale file is never found.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_dir

from kukri.kernels import paged_kv, sampling_record
from kukri.kernels.cpu.features import cpu_target

KernelCode = tuple[str, tuple[str, ...], bytes]  # symbol, parameters, object code


@dataclass(frozen=True)
class KernelSource:
    """A kernel before compilation: `function(tile, *parameters)`, all int64, returning int64."""

    name: str
    function: Callable[..., int]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The fields of the kernel's record: the function's parameters after `tile`."""
        code = self.function.__code__
        return code.co_varnames[1 : code.co_argcount]


def float_bits(x: float) -> int:
    """A float as the int64 that kernels read back with `f32_of_bits`."""
    return int.from_bytes(ctypes.c_double(x), sys.byteorder)


def cache_root() -> Path:
    """The directory of compiled kernels: $KUKRI_CACHE_DIR/jit or the user's cache directory."""
    return Path(os.environ.get("KUKRI_CACHE_DIR") or user_cache_dir("kukri")) / "jit"


@cache
def cache_dir() -> Path:
    """The directory for exactly these sources, versions and this CPU."""
    digest = hashlib.sha256()
    target = cpu_target()
    for fact in (
        version("numba"),
        version("llvmlite"),
        sys.version,
        sys.platform,
        target.name,
        target.features,
    ):
        digest.update(fact.encode() + b"\0")
    others = [Path(sampling_record.__file__), Path(paged_kv.__file__)]
    for source in [*sorted(Path(__file__).parent.glob("*.py")), *others]:
        digest.update(source.read_bytes())
    return cache_root() / digest.hexdigest()[:24]


def read_cached(name: str) -> KernelCode | None:
    """(symbol, parameters, object code) from the cache, or None if it is not there or cut short."""
    try:
        data = (cache_dir() / f"{name}.kernel").read_bytes()
        header, _, code = data.partition(b"\n")
        facts = json.loads(header)
        if hashlib.sha256(code).hexdigest() != facts["sha256"]:
            return None
        return facts["symbol"], tuple(facts["parameters"]), code
    except (OSError, ValueError, KeyError):
        return None


def store(name: str, symbol: str, parameters: tuple[str, ...], code: bytes) -> None:
    """Writes a kernel to the cache atomically. A cache that cannot be written costs time, not correctness."""
    facts = {"symbol": symbol, "parameters": parameters, "sha256": hashlib.sha256(code).hexdigest()}
    try:
        cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=cache_dir())
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(facts).encode() + b"\n" + code)
        os.replace(temporary, cache_dir() / f"{name}.kernel")
    except OSError:
        return
