"""The cache of compiled kernels: sources, object code, and the files that keep it.

`jit.py` loads kernels from here without Numba, `compiling.py` fills the cache. Object code lies in a
directory named by a hash of the kernel sources, the versions and the CPU: a stale file is never found. It is
run as it is found, so directory and file must be this user's, and nobody else's to write.
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
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_dir

from kukri.errors import ConfigError
from kukri.host.private_files import check_private, make_private, open_private
from kukri.kernels import kv_types, paged_kv, sampling_record
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.quant import types

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
    return int.from_bytes(ctypes.c_double(x), sys.byteorder, signed=True)


def cache_root() -> Path:
    """The directory of compiled kernels: $KUKRI_CACHE_DIR/jit or the user's cache directory."""
    return Path(os.environ.get("KUKRI_CACHE_DIR") or user_cache_dir("kukri")) / "jit"


@cache
def cache_dir() -> Path:
    """The directory for exactly these sources, versions and this CPU."""
    digest = hashlib.sha256()
    target = cpu_target()
    for fact in (sys.version, sys.platform, target.identity, target.features, sources_hash()):
        digest.update(fact.encode() + b"\0")
    for package in ("numba", "llvmlite"):
        digest.update(_version(package))
    return cache_root() / digest.hexdigest()[:24]


@cache
def sources_hash() -> str:
    """A hash of the sources of all kernels: code compiled of others is not loaded."""
    digest = hashlib.sha256()
    others = sampling_record.__file__, paged_kv.__file__, kv_types.__file__
    folders = Path(__file__).parents[1], Path(types.__file__).parent  # kernels, and the facts of weight types
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for source in [*found, *map(Path, others)]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> bytes:
    """A package's version file, empty if it is not installed. Its metadata would cost 10 ms to read."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return b""
    return Path(found.origin).with_name("_version.py").read_bytes()


def read_cached(name: str) -> KernelCode | None:
    """(symbol, parameters, object code) from the cache, or None if it is not there or cut short.

    Raises ConfigError if another user could have written it.
    """
    try:
        check_private(cache_dir())
        with open_private(cache_dir() / f"{name}.kernel") as file:
            data = file.read()
        header, _, code = data.partition(b"\n")
        facts = json.loads(header)
        if hashlib.sha256(code).hexdigest() != facts["sha256"]:
            return None
        return facts["symbol"], tuple(facts["parameters"]), code
    except ConfigError as error:
        raise ConfigError(f"compiled kernels are not loaded: {error} ($KUKRI_CACHE_DIR)") from None
    except (OSError, ValueError, KeyError):
        return None


def store(name: str, symbol: str, parameters: tuple[str, ...], code: bytes) -> None:
    """Writes a kernel to the cache atomically. A cache that cannot be written costs time, not correctness."""
    facts = {"symbol": symbol, "parameters": parameters, "sha256": hashlib.sha256(code).hexdigest()}
    try:
        make_private(cache_dir())
        handle, temporary = tempfile.mkstemp(dir=cache_dir())
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(facts).encode() + b"\n" + code)
        os.replace(temporary, cache_dir() / f"{name}.kernel")
    except OSError:
        return
