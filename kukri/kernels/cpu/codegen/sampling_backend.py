"""Sampling on the CPU backend: one compiled kernel over all rows of a step."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kukri.errors import ShapeError, UnsupportedError
from kukri.kernels.backend import Logits
from kukri.kernels.cpu.codegen.sampling_scratch import scratch_bytes
from kukri.kernels.cpu.compile.jit import KernelLibrary, entry_point, pack_record
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.cpu.run.pool import ThreadPool
from kukri.kernels.sampling_record import MAX_VOCAB, SamplingRecords

_SCRATCH_STEP = 4096


class CpuSampling:
    """See `backend.SamplingBackend`. A single row runs on the calling thread, several on the pool's.

    Not for several threads at a time.
    """

    def __init__(self, kernels: KernelLibrary, pool: ThreadPool) -> None:
        self._kernel, self._pool = kernels["choose_tokens"], pool
        counter = aligned_zeros(64).view(np.int64)
        self._counter = counter.data  # a memoryview: NumPy takes longer for one number
        self._counter_address = address_of(counter)
        self._scratch = aligned_zeros(0)
        self._memory: np.ndarray[Any, Any] = self._scratch  # memory of the last records
        self._words: np.ndarray[Any, Any] = self._scratch
        self._logits: Logits | None = None  # those of the last call
        self._n_vocab = self._n_rows = 0
        self._record = pack_record(self._kernel, dict.fromkeys(self._kernel.parameters, 0))
        self._op = np.array([[self._kernel.address, ctypes.addressof(self._record), 0, 0, 0]], np.int64)
        self._enter = entry_point(self._kernel.address)
        self._result = ctypes.c_int64()
        self._arguments = self._kernel_arguments()

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        """See SamplingBackend.choose. Raises UnsupportedError on a vocabulary that is too large."""
        # a step's rows and records mostly lie where the last one's did
        if logits is not self._logits:
            self._take(logits)
        if records.memory is not self._memory or records.pool is not self._words:
            self._memory, self._words = records.memory, records.pool
            self._record[0], self._record[2] = address_of(self._memory), address_of(self._words)
        n_rows = len(records.fields)
        if n_rows != self._n_rows:
            self._n_rows = self._record[1] = n_rows
        self._counter[0] = 0
        if n_rows == 1:
            self._enter(*self._arguments)
        elif n_rows:
            self._pool.run(address_of(self._op), 1)

    def _take(self, logits: Logits) -> None:
        """Sets the rows to choose from, and the scratch for their vocabulary."""
        rows = logits.numpy()
        if rows.dtype != np.float32:
            raise ShapeError(f"logits must be float32, not {rows.dtype}")
        if rows.shape[1] != self._n_vocab:
            self._make_scratch(rows.shape[1])
        # in the order of the kernel's parameters; `_make_scratch` has set the others
        self._record[3] = address_of(rows)
        self._record[4] = rows.strides[0]
        self._logits = logits

    def _make_scratch(self, n_vocab: int) -> None:
        if n_vocab > MAX_VOCAB:
            raise UnsupportedError(f"sampling from more than {MAX_VOCAB} tokens is not supported: {n_vocab}")
        self._n_vocab = n_vocab
        # two arrays at a distance of a power of two would fight for the same cache lines
        stride = -(-scratch_bytes(n_vocab) // _SCRATCH_STEP) * _SCRATCH_STEP + 64
        self._scratch = aligned_zeros(stride * self._pool.n_threads)
        self._record = pack_record(
            self._kernel,
            {
                **dict.fromkeys(("records", "n_rows", "pool", "logits", "stride"), 0),
                "n": n_vocab,
                "counter": self._counter_address,
                "scratch": address_of(self._scratch),
                "scratch_stride": stride,
                "n_workers": self._pool.n_threads,
            },
        )
        self._memory = self._words = self._scratch  # no record's: addresses are to be set again
        self._n_rows = 0
        self._arguments = self._kernel_arguments()
        self._op[0, 1] = ctypes.addressof(self._record)

    def _kernel_arguments(self) -> tuple[Any, ...]:
        return ctypes.byref(self._result), None, ctypes.addressof(self._record), 0
