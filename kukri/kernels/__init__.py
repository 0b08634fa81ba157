"""Backends: `make_backend(name)` gives an object that runs a model's program.

Every op has a definition in `reference` (NumPy, fp32); `cpu` has the fast kernels.
"""

from __future__ import annotations

from kukri.errors import UnsupportedError
from kukri.kernels.types import Backend

BACKENDS = ("cpu", "reference")


def make_backend(name: str, n_threads: int | None = None) -> Backend:
    """A backend by name. Raises UnsupportedError listing the known ones."""
    if name == "reference":
        from kukri.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        from kukri.kernels.cpu import CpuBackend

        return CpuBackend(n_threads=n_threads)
    raise UnsupportedError(f"no backend {name!r}: choose one of {', '.join(BACKENDS)}")
