"""Limits that a worker program sets for itself; a system without one of them leaves it out."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def lower_priority(niceness: int) -> None:
    """Leave the processor to others: add `niceness` to this process' own."""
    if hasattr(os, "nice"):
        with suppress(OSError):
            os.nice(niceness)


def limit_memory(n_bytes: int) -> None:
    """Allow this process `n_bytes` of address space."""
    _limit("RLIMIT_AS", n_bytes)


def limit_cpu(seconds: int) -> None:
    """Allow this process that much processor time, after which the system ends it."""
    _limit("RLIMIT_CPU", seconds)


def forbid_files() -> None:
    """Let this process open no further file, pipe or socket."""
    _limit("RLIMIT_NOFILE", 0)


def _limit(name: str, value: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(getattr(resource, name), (value, value))
