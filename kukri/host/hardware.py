"""Facts about this machine and process: the processor, memory, installed versions."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kukri.host import os_calls as system

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
    found = re.search(r"^model name\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """LLVM's names of the CPU's features that matter to kernels; empty without LLVM where Linux does not list
    features.
    """
    listed = re.search(r"^flags\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    if listed:
        named = set(listed[1].replace("_", "").split())
        return tuple(name for name in _FEATURES if re.sub("[.-]", "", name) in named)
    try:
        from llvmlite.binding import get_host_cpu_features
    except ImportError:
        return ()
    host = get_host_cpu_features()
    return tuple(name for name in _FEATURES if host.get(name))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available to this process: the least left by the machine or its control groups (v1 and v2).

    File caches count as free, since the system drops them. `root` is where /proc and /sys are.
    """
    left = [_machine_bytes_left(root)]
    for folder, is_v2 in _control_groups("memory", root):
        left += _group_bytes_left(folder, *(_CGROUP_V2 if is_v2 else _CGROUP_V1))
    return max(min(left), 0)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores whose time control groups (v1 and v2) grant this process, such as 1.5; None if unlimited.

    Containers are limited this way (docker --cpus, a pod's limits), and the cores they see are all there are.
    `root` is where /proc and /sys are.
    """
    quotas = []
    for folder, is_v2 in _control_groups("cpu", root):
        if is_v2:
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        else:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are not limits
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is version 2) of the process' group and the groups around it, for a controller."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_v2 else controller)
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):  # a container may see its group as the mount itself
            yield folder, is_v2
            if folder == mount:
                break


_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")


def _machine_bytes_left(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return system.memory_bytes() // 2  # no such file on macOS


def _group_bytes_left(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """Return the bytes that a control group has left, in a list, which is empty for a group without a
    limit.
    """
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal():  # "max"
        return []
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return [int(limit) - int(usage) + int(stat.get(cache_name, "0"))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far, mapped files included."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        # the system call would also count memory that the parent held when it started this process
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return system.peak_rss_bytes()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    from importlib.metadata import PackageNotFoundError, version  # 10 ms, which a start does not need

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
