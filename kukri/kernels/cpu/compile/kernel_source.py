"""A kernel before it is compiled, and floats as kernels take them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from kukri.dataclass import dataclass


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
