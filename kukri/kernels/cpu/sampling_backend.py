"""Sampling on the CPU backend: one compiled kernel over all rows of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kukri.errors import UnsupportedError
from kukri.kernels.cpu.jit import KernelLibrary, entry_point, pack_record
from kukri.kernels.cpu.memory import address_of, aligned_zeros
from kukri.kernels.cpu.pool import ThreadPool
from kukri.kernels.cpu.state import scratch_bytes
from kukri.kernels.sampling_record import MAX_VOCAB, SamplingRecord
from kukri.kernels.types import FloatArray

_SCRATCH_STEP = 4096


class CpuSampling:
    """See `types.SamplingBackend`. A single row runs on the calling thread, several on the pool's.

    Not for several threads at a time.
    """

    def __init__(self, kernels: KernelLibrary, pool: ThreadPool) -> None:
        self._kernel, self._pool = kernels["choose_tokens"], pool
        self._counter = aligned_zeros(64).view(np.int64)
        self._records = np.zeros(0, np.int64)
        self._scratch = aligned_zeros(0)
        self._n_vocab = 0
        self._record = pack_record(self._kernel, dict.fromkeys(self._kernel.parameters, 0))
        self._op = np.zeros((1, 5), np.int64)
        self._enter = entry_point(self._kernel.address)
        self._result = ctypes.c_int64()

    def choose(self, records: Sequence[SamplingRecord], logits: FloatArray) -> None:
        """See SamplingBackend.choose. Raises UnsupportedError on a vocabulary that is too large."""
        n_rows, n_vocab = logits.shape
        if n_rows > len(self._records) or n_vocab != self._n_vocab:
            self._make_room(n_rows, n_vocab)
        row, stride = address_of(logits), logits.strides[0]
        for record in records:
            record.row = row if record.own_row is None else address_of(record.own_row)
            row += stride
        self._records[:n_rows] = [record.address for record in records]
        self._record[1] = n_rows
        self._counter[0] = 0
        if n_rows == 1:
            self._enter(ctypes.byref(self._result), None, ctypes.addressof(self._record), 0)
        elif n_rows:
            self._pool.run(address_of(self._op), 1)

    def _make_room(self, n_rows: int, n_vocab: int) -> None:
        if n_vocab > MAX_VOCAB:
            raise UnsupportedError(f"sampling takes vocabularies of up to {MAX_VOCAB} tokens, not {n_vocab}")
        self._n_vocab = n_vocab
        self._records = np.zeros(2 * n_rows, np.int64)
        # two arrays at a distance of a power of two would fight for the same cache lines
        stride = -(-scratch_bytes(n_vocab) // _SCRATCH_STEP) * _SCRATCH_STEP + 64
        self._scratch = aligned_zeros(stride * self._pool.n_threads)
        self._record = pack_record(
            self._kernel,
            {
                "records": address_of(self._records),
                "n_rows": 0,
                "n": n_vocab,
                "counter": address_of(self._counter),
                "scratch": address_of(self._scratch),
                "scratch_stride": stride,
                "n_workers": self._pool.n_threads,
            },
        )
        self._op[0] = self._kernel.address, ctypes.addressof(self._record), 0, 0, 0
