"""Facts about this machine and process: the processor, memory, installed versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# LLVM's names of the CPU features that kernels care about
_FEATURES = (
    *("sse4.2", "avx", "avx2", "fma", "f16c", "avxvnni", "avxvnniint8", "avx512f", "avx512bw", "avx512vnni"),
    *("avx512bf16", "amx-int8", "neon", "fullfp16", "dotprod", "i8mm", "sve", "sve2"),
)


def cpu_model() -> str:
    """The processor's name, as the system reports it."""
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return asked.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_features() -> tuple[str, ...]:
    """LLVM's names of the features that kernels care about and the CPU has."""
    from llvmlite.binding import get_host_cpu_features

    host = get_host_cpu_features()
    return tuple(name for name in _FEATURES if host.get(name))


def memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far, mapped files included."""
    try:
        status = Path("/proc/self/status").read_text()
        # getrusage would also count what the parent held when it started this process
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed, by name."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
