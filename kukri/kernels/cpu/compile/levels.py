"""Levels of x86-64 processors: what compiled kernels that come with kukri are compiled for.

A level is a way of multiplying int8 and the instructions that go with it, as LLVM names them to compile and
Linux names them in /proc/cpuinfo. Kernels of a level run on every processor that has its instructions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from kukri.dataclass import dataclass, replace

X86Lowering = Literal["avx512vnni", "avxvnni", "avx2", "generic"]


@dataclass(frozen=True)
class Level:
    """A level: `cpu` and `features` are LLVM's, `needs` Linux' names of its instructions, without `_`.

    `lacks` are instructions of newer processors, which are better off with another level.
    """

    name: str
    cpu: str
    features: str
    lowering: X86Lowering
    needs: frozenset[str]
    lacks: frozenset[str] = frozenset()
    has_half: bool = True
    has_byte_permute: bool = False


_V3 = frozenset(
    {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "popcnt", "ssse3", "sse41", "sse42"}
    | {"cx16", "lahflm", "xsave"}
)
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = "+avx512vnni,-prefer-256-bit"

_VBMI = Level(
    "avx512vbmi",
    "x86-64-v4",
    f"{_WIDE},+avx512vbmi",
    "avx512vnni",
    _V4 | {"avx512vnni", "avx512vbmi"},
    has_byte_permute=True,
)

# The best first; every x86-64 processor has the last. Those like `_VBMI` prefetch weights otherwise
# (tile_products.py): fewer of them on Zen 4, to another cache on Sapphire Rapids.
LEVELS = (
    replace(_VBMI, name="zen4", needs=_VBMI.needs | {"sse4a"}, lacks=frozenset({"avxvnni"})),
    replace(_VBMI, name="sapphirerapids", needs=_VBMI.needs | {"avx512fp16"}, lacks=frozenset({"sse4a"})),
    _VBMI,
    Level("avx512vnni", "x86-64-v4", _WIDE, "avx512vnni", _V4 | {"avx512vnni"}),
    Level("avxvnni", "x86-64-v3", "+avxvnni", "avxvnni", _V3 | {"avxvnni"}),
    Level("avx2", "x86-64-v3", "", "avx2", _V3),
    Level("generic", "x86-64", "", "generic", frozenset(), has_half=False),
)


def best_level(instructions: Collection[str]) -> Level:
    """The best level whose kernels a processor with these instructions runs."""
    has = set(instructions)
    return next(level for level in LEVELS if level.needs <= has and not level.lacks & has)


def level_named(name: str) -> Level | None:
    """The level of that name; None if there is none."""
    return next((level for level in LEVELS if level.name == name), None)
