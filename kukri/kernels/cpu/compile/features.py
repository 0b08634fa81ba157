"""Which CPU the kernels are compiled for, and which lowering of the int8 dot product it gets.

`KUKRI_CPU` (a level of `levels.py` such as avx2) or `NUMBA_CPU_NAME` (an LLVM CPU name such as haswell)
stands for another CPU than the host's; a host that has the instructions can run the result, which is how
every lowering is tested on one machine.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Literal

from kukri.dataclass import dataclass, replace
from kukri.errors import ConfigError
from kukri.host.hardware import cpu_quota
from kukri.host.os_calls import allowed_cores
from kukri.kernels.cpu.compile.levels import LEVELS, Level, best_level, level_named

Lowering = Literal["avx512vnni", "avxvnni", "avx2", "dotprod", "generic"]

# LLVM CPU names whose features decide the lowering; a prefix stands for the family.
_WITHOUT_VBMI = ("cascadelake", "cooperlake")  # among those with AVX-512 VNNI
_BY_NAME: tuple[tuple[Lowering, tuple[str, ...]], ...] = (
    ("avx512vnni", ("cascadelake", "cooperlake", "icelake", "tigerlake", "rocketlake", "sapphirerapids",
                    "emeraldrapids", "graniterapids", "znver4", "znver5")),
    ("avxvnni", ("alderlake", "raptorlake", "meteorlake", "arrowlake", "lunarlake", "pantherlake",
                 "sierraforest", "grandridge", "clearwaterforest", "gracemont")),
    ("avx2", ("haswell", "broadwell", "skylake", "cannonlake", "znver1", "znver2", "znver3", "core-avx2",
              "x86-64-v3", "x86-64-v4")),
    ("dotprod", ("apple-a13", "apple-a14", "apple-a15", "apple-a16", "apple-a17", "apple-a18", "apple-m",
                 "neoverse", "ampere1", "cortex-a55", "cortex-a65", "cortex-a75", "cortex-a76", "cortex-a77",
                 "cortex-a78", "cortex-a510", "cortex-a520", "cortex-a710", "cortex-a715", "cortex-a720",
                 "cortex-a725", "cortex-x")),
)  # fmt: skip
_WITH_I8MM = ("apple-a15", "apple-a16", "apple-a17", "apple-a18", "apple-m2", "apple-m3", "apple-m4",
              "neoverse-n2", "neoverse-n3", "neoverse-v", "ampere1", "cortex-a510", "cortex-a520",
              "cortex-a710", "cortex-a715", "cortex-a720", "cortex-a725", "cortex-x2", "cortex-x3",
              "cortex-x4", "cortex-x925")  # fmt: skip


@dataclass(frozen=True)
class CpuTarget:
    """The CPU that kernels are compiled for.

    `identity` names it as the system does, and `features` are a list with + and - signs: kernels compiled for
    others are not loaded. Compiled kernels that come with kukri fit if they are `level`'s.
    """

    identity: str
    features: str
    lowering: Lowering
    has_half: bool  # the CPU converts float16 in hardware
    has_byte_permute: bool  # AVX-512 VBMI: an instruction looks bytes up in a table of 64
    level: str | None = None
    has_int8_matrix: bool = False  # ARM's i8mm: an instruction multiplies 2 x 8 by 8 x 2 int8

    @property
    def name(self) -> str:
        """LLVM's name of the CPU, which takes loading LLVM; the level's without."""
        if os.environ.get("KUKRI_CPU") or not has_compiler():
            return self.identity
        return os.environ.get("NUMBA_CPU_NAME") or _llvm_host()[0]

    @property
    def has_int8_dot(self) -> bool:
        """True if one instruction multiplies int8, adds four products up and adds them to an int32."""
        return self.lowering in ("avx512vnni", "avxvnni", "dotprod")

    @property
    def has_signed_bias(self) -> bool:
        """True if tiles hold signed weights as w + 128: the dot product takes unsigned and signed bytes."""
        return self.lowering in ("avx512vnni", "avxvnni")

    @property
    def column_bytes(self) -> int:
        """Bytes of a token that lie side by side in an int8 panel, and of a row in a tile (layouts.py)."""
        return 8 if self.has_int8_matrix else 4

    @property
    def has_wide_registers(self) -> bool:
        """True if 32 registers hold sums of 16 lanes, as with AVX-512; others have 16 of 8, or 32 of 4."""
        return self.lowering == "avx512vnni"


def _lowering_of_features(features: dict[str, bool]) -> Lowering:
    if features.get("avx512vnni") and features.get("avx512bw") and features.get("avx512vl"):
        return "avx512vnni"
    if features.get("avxvnni") and features.get("avx2"):
        return "avxvnni"
    if features.get("dotprod"):
        return "dotprod"
    return "avx2" if features.get("avx2") and features.get("fma") else "generic"


def _lowering_of_name(name: str) -> Lowering:
    for lowering, names in _BY_NAME:
        if name.startswith(names):
            return lowering
    return "generic"


def has_compiler() -> bool:
    """True if Numba is installed, which compiles kernels."""
    return find_spec("numba") is not None


def has_levels() -> bool:
    """True on the systems for which compiled kernels come with kukri: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@cache
def cpu_target() -> CpuTarget:
    """The CPU to compile for, or of the compiled kernels that came with kukri if nothing can be compiled.

    It is the host's, unless KUKRI_CPU, NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say otherwise. Raises ConfigError
    if KUKRI_CPU is no level.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if chosen := os.environ.get("KUKRI_CPU"):
        level = level_named(chosen)
        if level is None:
            raise ConfigError(
                f"KUKRI_CPU must be one of {', '.join(one.name for one in LEVELS)}, not {chosen}"
            )
        return _of_level(level)
    if has_levels() and not has_compiler():
        return _of_level(host_level())
    name = os.environ.get("NUMBA_CPU_NAME")
    flags = os.environ.get("NUMBA_CPU_FEATURES")
    if name and not flags:  # the name alone implies its features
        lowering = _lowering_of_name(name)
        return CpuTarget(
            name,
            "",
            lowering,
            has_half=lowering != "generic" or not is_x86,
            has_byte_permute=lowering == "avx512vnni" and not name.startswith(_WITHOUT_VBMI),
            has_int8_matrix=lowering == "dotprod" and name.startswith(_WITH_I8MM),
        )
    identity, features = (_linux_x86() if is_x86 else _linux_arm()) or _llvm_host()
    if flags:
        features = {flag[1:]: flag[0] == "+" for flag in flags.split(",")}
    text = flags or ",".join(("+" if on else "-") + flag for flag, on in sorted(features.items()))
    lowering = _lowering_of_features(features)
    has_int8_matrix = lowering == "dotprod" and bool(features.get("i8mm"))
    if lowering == "generic" and not is_x86 and not flags:  # Apple's, of whose features LLVM knows few
        lowering = _lowering_of_name(_llvm_host()[0])
        has_int8_matrix = lowering == "dotprod" and _llvm_host()[0].startswith(_WITH_I8MM)
    target = CpuTarget(
        name or identity,
        text,
        lowering,
        has_half=bool(features.get("f16c")) or not is_x86,
        has_byte_permute=lowering == "avx512vnni" and bool(features.get("avx512vbmi")),
        has_int8_matrix=has_int8_matrix,
    )
    if has_levels() and not name and not flags:
        alike = _of_level(host_level())
        if _lowered(alike) == _lowered(target):
            return replace(target, level=alike.level)
    return target


def host_instructions() -> set[str]:
    """The instructions that an x86 host has, as levels name them."""
    _, features = _linux_x86() or ("", {})
    return {name for name, on in features.items() if on}


def host_level() -> Level:
    """The best level of the processors of x86-64 that the host runs."""
    return best_level(host_instructions())


def _of_level(level: Level) -> CpuTarget:
    identity = f"x86-64 {level.name}"
    facts = level.lowering, level.has_half, level.has_byte_permute
    return CpuTarget(identity, level.features, *facts, level=level.name)


def _lowered(target: CpuTarget) -> tuple[str, bool, bool]:
    """The facts of a CPU that kernels' sources ask for: alike in kernels that may run side by side."""
    return target.lowering, target.has_half, target.has_byte_permute


def _linux_x86() -> tuple[str, dict[str, bool]] | None:
    """(identity, features) of an x86 CPU by Linux's /proc/cpuinfo, without the 50 ms of loading LLVM.

    The system lists the features that it lets programs use; LLVM's names for them have no underscores. None
    if there is no such file, or no such list in it.
    """
    facts = _first_cpu()
    if "flags" not in facts:
        return None
    identity = "-".join(facts.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping"))
    return identity, {flag.replace("_", ""): True for flag in facts["flags"].split()}


# Linux's names of ARM's features that kernels use, and LLVM's
_ARM_FEATURES = {"asimd": "neon", "atomics": "lse", "asimddp": "dotprod", "i8mm": "i8mm"}


def _linux_arm() -> tuple[str, dict[str, bool]] | None:
    """(identity, features) of an ARM CPU, likewise. LLVM itself finds few of a CPU that it does not know."""
    facts = _first_cpu()
    if "Features" not in facts:
        return None
    keys = ("implementer", "architecture", "variant", "part", "revision")
    identity = "-".join(facts.get(f"CPU {key}", "") for key in keys)
    listed = facts["Features"].split()
    return identity, {name: True for linux, name in _ARM_FEATURES.items() if linux in listed}


def _first_cpu() -> dict[str, str]:
    """Linux's /proc/cpuinfo about the first CPU; empty elsewhere."""
    facts: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in islice(file, 64):  # one CPU's are some 30
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return facts


@cache
def _llvm_host() -> tuple[str, dict[str, bool]]:
    """(name, features) of the host's CPU by LLVM."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features())


def usable_cores() -> int:
    """Cores this process may keep busy: those it may run on, within the quota of its control group.

    Of a quota of 1.5 cores one is used: with two threads both would stand still for a quarter of each period.
    """
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(min(allowed_cores(), int(quota)), 1)
