"""The passes over a row of logits that sampling is built on, as calls of compiled kernels."""

from __future__ import annotations

import ctypes

import numpy as np

from kukri.kernels.cpu.jit import KernelLibrary, LoadedKernel, entry_point, float_bits
from kukri.kernels.cpu.memory import address_of
from kukri.kernels.types import SUM_BLOCK, FloatArray, IntArray


class CpuRowOps:
    """See `kukri.kernels.types.RowOps`. Runs on the calling thread; not for several threads at a time."""

    def __init__(self, kernels: KernelLibrary) -> None:
        kernels.load(("argmax", "max_and_sum_exp", "above"))
        self._argmax = _Call(kernels["argmax"])
        self._max_and_sum_exp = _Call(kernels["max_and_sum_exp"])
        self._above = _Call(kernels["above"])
        self._ids = np.zeros(0, np.int32)
        self._sums = np.zeros(0, np.float32)

    def argmax(self, row: FloatArray) -> int:
        """See RowOps.argmax."""
        return self._argmax(address_of(row), len(row))

    def max_and_sum_exp(self, row: FloatArray, scale: float) -> tuple[float, FloatArray]:
        """See RowOps.max_and_sum_exp."""
        n_sums = -(-len(row) // SUM_BLOCK)
        if len(self._sums) <= n_sums:
            self._sums = np.zeros(n_sums + 1, np.float32)
        sums = self._sums
        self._max_and_sum_exp(address_of(row), len(row), float_bits(scale), SUM_BLOCK, address_of(sums))
        return float(sums[0]), sums[1 : n_sums + 1].copy()

    def above(self, row: FloatArray, threshold: float) -> IntArray:
        """See RowOps.above."""
        if len(self._ids) <= len(row):
            self._ids = np.zeros(len(row) + 1, np.int32)  # the kernel may write one entry too many
        count = self._above(address_of(row), len(row), float_bits(threshold), address_of(self._ids))
        return self._ids[:count].copy()


class _Call:
    """A kernel with a record of its own, called with its arguments in order."""

    def __init__(self, kernel: LoadedKernel) -> None:
        self._kernel = kernel  # keeps its code in memory
        self._record = (ctypes.c_int64 * len(kernel.parameters))()
        self._result = ctypes.c_int64()
        self._entry = entry_point(kernel.address)
        self._where = ctypes.addressof(self._record)
        self._out = ctypes.byref(self._result)

    def __call__(self, *arguments: int) -> int:
        self._record[:] = list(arguments)
        self._entry(self._out, None, self._where, 0)
        return self._result.value
