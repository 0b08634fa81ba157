"""Which CPU the kernels are compiled for, and which lowering of the int8 dot product it gets.

`NUMBA_CPU_NAME` (an LLVM CPU name such as haswell) compiles for another CPU than the host's; a host that
has the instructions can run the result, which is how every lowering is tested on one machine.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Literal

from kukri.machine import cpu_quota
from kukri.system import allowed_cores

Lowering = Literal["avx512vnni", "avxvnni", "avx2", "dotprod", "generic"]

# LLVM CPU names whose features decide the lowering; a prefix stands for the family.
_WITHOUT_VBMI = ("cascadelake", "cooperlake")  # of those with AVX-512 VNNI
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


@dataclass(frozen=True)
class CpuTarget:
    """The CPU that kernels are compiled for.

    `identity` names it as the system does, and `features` are a list with + and - signs: kernels compiled for
    others are not loaded.
    """

    identity: str
    features: str
    lowering: Lowering
    has_half: bool  # the CPU converts float16 in hardware
    has_byte_permute: bool  # AVX-512 VBMI: an instruction looks bytes up in a table of 64

    @property
    def name(self) -> str:
        """LLVM's name of the CPU, which takes loading LLVM: for those who compile."""
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


@cache
def cpu_target() -> CpuTarget:
    """The CPU to compile for: the host's, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say otherwise."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
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
        )
    identity, features = (_linux_x86() if is_x86 else _linux_arm()) or _llvm_host()
    if flags:
        features = {flag[1:]: flag[0] == "+" for flag in flags.split(",")}
    text = flags or ",".join(("+" if on else "-") + flag for flag, on in sorted(features.items()))
    lowering = _lowering_of_features(features)
    if lowering == "generic" and not is_x86 and not flags:  # Apple's, of whose features LLVM knows few
        lowering = _lowering_of_name(_llvm_host()[0])
    return CpuTarget(
        name or identity,
        text,
        lowering,
        has_half=bool(features.get("f16c")) or not is_x86,
        has_byte_permute=lowering == "avx512vnni" and bool(features.get("avx512vbmi")),
    )


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
_ARM_FEATURES = {"asimd": "neon", "atomics": "lse", "asimddp": "dotprod"}


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
    """What Linux says of the first CPU; empty elsewhere."""
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
