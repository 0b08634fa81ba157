"""Which CPU the kernels are compiled for, and which lowering of the int8 dot product it gets.

`NUMBA_CPU_NAME` (an LLVM CPU name such as haswell) compiles for another CPU than the host's; a host that
has the instructions can run the result, which is how every lowering is tested on one machine.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kukri.machine import cpu_quota

Lowering = Literal["avx512vnni", "avxvnni", "avx2", "generic"]

# LLVM CPU names whose features decide the lowering; a prefix stands for the family.
_BY_NAME: tuple[tuple[Lowering, tuple[str, ...]], ...] = (
    ("avx512vnni", ("cascadelake", "cooperlake", "icelake", "tigerlake", "rocketlake", "sapphirerapids",
                    "emeraldrapids", "graniterapids", "znver4", "znver5")),
    ("avxvnni", ("alderlake", "raptorlake", "meteorlake", "arrowlake", "lunarlake", "pantherlake",
                 "sierraforest", "grandridge", "clearwaterforest", "gracemont")),
    ("avx2", ("haswell", "broadwell", "skylake", "cannonlake", "znver1", "znver2", "znver3", "core-avx2",
              "x86-64-v3", "x86-64-v4")),
)  # fmt: skip


@dataclass(frozen=True)
class CpuTarget:
    """The CPU that kernels are compiled for. `features` is LLVM's list, with + and - signs."""

    name: str
    features: str
    lowering: Lowering
    has_half: bool  # the CPU converts float16 in hardware

    @property
    def has_int8_dot(self) -> bool:
        """True if one instruction multiplies int8, adds four products up and adds them to an int32."""
        return self.lowering in ("avx512vnni", "avxvnni")

    @property
    def has_wide_registers(self) -> bool:
        """True if 32 registers hold sums of 16 lanes, as with AVX-512; others have 16 of 8 or fewer."""
        return self.lowering == "avx512vnni"


def _lowering_of_features(features: dict[str, bool]) -> Lowering:
    if features.get("avx512vnni") and features.get("avx512bw") and features.get("avx512vl"):
        return "avx512vnni"
    if features.get("avxvnni") and features.get("avx2"):
        return "avxvnni"
    return "avx2" if features.get("avx2") and features.get("fma") else "generic"


def _lowering_of_name(name: str) -> Lowering:
    for lowering, names in _BY_NAME:
        if name.startswith(names):
            return lowering
    return "generic"


@cache
def cpu_target() -> CpuTarget:
    """The CPU to compile for: the host's, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say otherwise."""
    import llvmlite.binding as llvm

    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    name = os.environ.get("NUMBA_CPU_NAME")
    flags = os.environ.get("NUMBA_CPU_FEATURES")
    if name and not flags:  # the name alone implies its features
        lowering = _lowering_of_name(name)
        return CpuTarget(name, "", lowering, has_half=lowering != "generic" or not is_x86)
    features = dict(llvm.get_host_cpu_features())
    if flags:
        features = {flag[1:]: flag[0] == "+" for flag in flags.split(",")}
    text = flags or ",".join(("+" if on else "-") + flag for flag, on in sorted(features.items()))
    has_half = bool(features.get("f16c")) or not is_x86
    return CpuTarget(name or llvm.get_host_cpu_name(), text, _lowering_of_features(features), has_half)


def allowed_cores() -> int:
    """Cores that the process' affinity mask allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Cores this process may keep busy: those it may run on, within the quota of its control group.

    Of a quota of 1.5 cores one is used: with two threads both would stand still for a quarter of each period.
    """
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(min(allowed_cores(), int(quota)), 1)
