"""The threads that run plans: Python threads inside the executor (threads.py), parked when idle."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import numpy as np

from kukri.kernels.cpu.jit import KernelLibrary, call, entry_point, pack_record
from kukri.kernels.cpu.memory import address_of, aligned_zeros
from kukri.kernels.cpu.state import BIAS, IDLE, MAX_THREADS, N_ACTIVE, N_OPS, OPS, STATE_BYTES, STOP, WORDS


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ThreadPool:
    """`n_threads` threads, the caller's among them, that run plans together.

    One plan at a time: a pool belongs to one engine. Workers start with the first plan and spin through a
    generation; after some milliseconds without work they sleep until the next plan.
    """

    def __init__(self, kernels: KernelLibrary, n_threads: int | None = None) -> None:
        self.kernels = kernels
        self.n_threads = min(n_threads or usable_cores(), MAX_THREADS)
        self._memory = aligned_zeros(STATE_BYTES)
        self._state = self._memory.view(np.int64)
        self._state[WORDS // 8] = (IDLE << 32) | BIAS
        self._state[N_ACTIVE // 8] = self.n_threads
        self._run: Any = None
        self._wake = threading.Condition()
        self._parked = 0
        self._generation = 0
        self._workers: list[threading.Thread] = []

    def run(self, ops_address: int, n_ops: int) -> None:
        """Runs ops once: int64 [n_ops, 4] of kernel address, record address and room for the tile count."""
        if self._run is None:
            self._start()
        self._state[OPS // 8] = ops_address
        self._state[N_OPS // 8] = n_ops
        if self._parked:
            with self._wake:
                self._generation += 1
                self._wake.notify_all()
        self._run(0)

    def run_kernel(self, name: str, **arguments: int) -> None:
        """Runs one kernel over all its tiles."""
        kernel = self.kernels[name]
        record = pack_record(kernel, arguments)
        op = np.array([kernel.address, ctypes.addressof(record), 0, 0], np.int64)
        self.run(address_of(op), 1)

    def close(self) -> None:
        """Ends the workers. The pool can't be used afterwards."""
        self._state[STOP // 8] = 1
        with self._wake:
            self._generation += 1
            self._wake.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    def _start(self) -> None:
        kernel = self.kernels["run_plan"]
        record = pack_record(kernel, {"state": address_of(self._memory)})
        entry = entry_point(kernel.address)
        result = ctypes.c_int64()
        out, where = ctypes.byref(result), ctypes.addressof(record)
        keep = (record, result)
        self._run = lambda tile, _keep=keep: entry(out, None, where, tile)
        owner = weakref.ref(self)
        for index in range(1, self.n_threads):
            worker = threading.Thread(
                target=_work,
                args=(owner, index, kernel.address, record, self._memory, self._wake),
                daemon=True,
            )
            worker.name = f"kukri-{index}"
            worker.start()
            self._workers.append(worker)


def _work(owner: Any, index: int, address: int, record: Any, memory: Any, wake: threading.Condition) -> None:
    """A worker's life: serve plans until idle, then sleep. Holds no reference to the pool while it sleeps."""
    state = memory.view(np.int64)
    while not state[STOP // 8]:
        call(address, ctypes.addressof(record), index)
        pool = owner()
        if pool is None:
            return
        with wake:
            if state[STOP // 8]:
                return
            generation = pool._generation
            pool._parked += 1
            del pool
            while not state[STOP // 8]:
                woken = wake.wait(timeout=5.0)
                pool = owner()
                if pool is None:
                    return
                if woken and pool._generation != generation:
                    break
                del pool
            else:
                return
            pool._parked -= 1
            del pool
