"""Compiled kernels that come with kukri: a file of object code for each level of processors.

`packaging/wheel_kernels.py` makes the files when a wheel is built. A kernel is used only if its sources are
equal to the installed sources, so an edited kernel is compiled. Format: the SHA-256 of the header in
hexadecimal and the header (JSON), a line each, then every kernel's object code, compressed by zlib.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.kernel_cache import KernelCode, module_hashes

SHIPPED_DIR = Path(__file__).with_name("shipped")


class ShippedKernels:
    """The kernels of a file. The file is read at once; a kernel is decompressed and verified on request."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError if the file is damaged."""
        digest, _, rest = path.read_bytes().partition(b"\n")
        header, _, self._blobs = rest.partition(b"\n")
        if hashlib.sha256(header).hexdigest().encode() != digest:
            raise ValueError(f"{path} is damaged")
        self.digest = digest.decode()[:24]  # everything's digest, as the header has each kernel's
        self._facts: dict[str, Any] = json.loads(header)

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(self._facts["kernels"])

    def read(self, name: str) -> KernelCode | None:
        """Return a kernel; None if it is missing, damaged or made of other sources."""
        if name not in self._facts["kernels"]:
            return None
        symbol, parameters, start, stop, digest, sources = self._facts["kernels"][name]
        if sources not in module_hashes().values():
            return None
        try:
            code = zlib.decompress(self._blobs[start:stop])
        except zlib.error:
            code = b""
        if hashlib.sha256(code).hexdigest() != digest:
            return None
        return symbol, tuple(parameters), code


def write_shipped(path: Path, kernels: Mapping[str, tuple[str, KernelCode]]) -> None:
    """Writes kernels by name, each with its module, compiled of the present sources. Raises OSError."""
    listed, blobs, start = {}, [], 0
    for name, (module, (symbol, parameters, code)) in sorted(kernels.items()):
        blobs.append(zlib.compress(code, 9))
        stop = start + len(blobs[-1])
        digest, sources = hashlib.sha256(code).hexdigest(), module_hashes()[module]
        listed[name] = symbol, parameters, start, stop, digest, sources
        start = stop
    header = json.dumps({"kernels": listed}, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join([hashlib.sha256(header).hexdigest().encode(), header, b"".join(blobs)]))


@cache
def shipped_for_cpu() -> ShippedKernels | None:
    """The kernels that came for this processor; None if there are none, or the file is damaged."""
    level = cpu_target().level
    if level is None:
        return None
    try:
        return ShippedKernels(SHIPPED_DIR / f"{level}.kernels")
    except (OSError, ValueError):
        return None


def read_shipped(name: str) -> KernelCode | None:
    """A kernel that came with kukri; None if it has to be compiled."""
    found = shipped_for_cpu()
    return None if found is None else found.read(name)


def reason_for_compiling() -> str:
    """The reason why a kernel did not come with kukri, for an error."""
    level = cpu_target().level
    path = SHIPPED_DIR / f"{level}.kernels"
    if level is None or not path.exists():
        return f"none came compiled for this processor ({level or cpu_target().identity})"
    if shipped_for_cpu() is None:
        return "the kernels that came compiled are damaged"
    return "it is not among the kernels that came compiled, or is of other sources or damaged there"
