"""The threads that run plans: Python threads inside the executor (threads.py), parked when idle."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kukri.kernels.cpu.compile.features import usable_cores
from kukri.kernels.cpu.compile.jit import KernelLibrary, entry_point, pack_record
from kukri.kernels.cpu.run.abi import (
    BIAS,
    IDLE,
    MAX_THREADS,
    N_ACTIVE,
    N_OPS,
    OPS,
    STALLED_NS,
    STATE_BYTES,
    STOP,
    WORDS,
)
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros

_FIRST_PAUSE_S = 0.02  # with a thread fewer after a stall
_LONGEST_PAUSE_S = 0.64
_CALM_S = 0.1  # after this time without a stall, the next one counts as the first


class _Workers:
    """State shared by the pool and its threads. Threads hold no reference to the pool, so that it can go."""

    def __init__(self, kernels: KernelLibrary) -> None:
        self.kernels = kernels  # keeps the code that threads run in memory
        self.memory = aligned_zeros(STATE_BYTES)
        self.state = self.memory.view(np.int64)
        self.lock = threading.Lock()
        self.wake = threading.Condition(self.lock)  # whose own `with` may stay locked after an interrupt
        self.n_parked = 0
        self.generation = 0
        self.threads: list[threading.Thread] = []

    def start(self, n_workers: int) -> None:
        """Starts threads 1 to n_workers; thread 0 is the pool's caller.

        It uses a thread of its own, because only the main thread is interrupted, and a half-started thread
        could be neither joined nor started again.
        """
        is_done = threading.Lock()
        is_done.acquire()
        _thread.start_new_thread(self._start_missing, (n_workers, is_done))
        is_done.acquire()

    def _start_missing(self, n_workers: int, is_done: threading.Lock) -> None:
        try:
            with self.lock:
                n_there = n_workers if self.state[STOP // 8] else len(self.threads)
                for index in range(n_there + 1, n_workers + 1):
                    worker = threading.Thread(
                        target=self._serve, args=(index,), daemon=True, name=f"kukri-{index}"
                    )
                    worker.start()
                    self.threads.append(worker)
        finally:
            is_done.release()

    def wake_all(self) -> None:
        """Ends the sleep of parked threads."""
        with self.lock:
            self.generation += 1
            self.wake.notify_all()

    def stop(self) -> None:
        """Ends the threads and waits until they have left the compiled code."""
        with self.lock:
            self.state[STOP // 8] = 1
        self.wake_all()
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def executor(self) -> Callable[[int], int]:
        """A function that enters the executor as the given thread."""
        kernel = self.kernels["run_plan"]
        record = pack_record(kernel, {"state": address_of(self.memory)})
        result = ctypes.c_int64()
        entry, out, where = entry_point(kernel.address), ctypes.byref(result), ctypes.addressof(record)
        keep = (record, result)

        def enter(thread: int, _keep: Any = keep) -> int:
            return entry(out, None, where, thread)

        return enter

    def _serve(self, index: int) -> None:
        """A thread's life: serve plans until idle for long, then sleep until the next."""
        enter = self.executor()
        while not self.state[STOP // 8]:
            enter(index)
            with self.lock:
                generation = self.generation
                self.n_parked += 1
                while self.generation == generation and not self._is_wanted(index):
                    self.wake.wait()
                self.n_parked -= 1

    def _is_wanted(self, index: int) -> bool:
        """Return True if a thread should not sleep: it takes part in a running plan, or the threads are to
        end.

        The caller of a plan wakes sleeping threads before the plan begins. A thread that was about to sleep
        but waited for the GIL is not woken, so it asks.
        """
        has_plan = bool(self.state[N_OPS // 8]) and index < self.state[N_ACTIVE // 8]
        return has_plan or bool(self.state[STOP // 8])


class ThreadPool:
    """`n_threads` threads, the caller's among them, that run plans together.

    Plans run one at a time: other threads that call `run` wait, and no thread runs two plans while another
    waits. Workers start with the first plan and spin through a generation; after some milliseconds without
    work they sleep until the next plan. They end with the pool. An interrupt (an exception that a signal's
    handler raises) leaves the pool in order; a process that is forked starts workers of its own.
    """

    def __init__(self, kernels: KernelLibrary, n_threads: int | None = None) -> None:
        self.kernels = kernels
        self.n_threads = min(n_threads or usable_cores(), MAX_THREADS)
        self._prepare()
        _pools.add(self)

    def _prepare(self) -> None:
        self._workers = _Workers(self.kernels)
        self._state = self._workers.state.data  # a memoryview: NumPy takes longer for one number
        self._state[WORDS // 8] = (IDLE << 32) | BIAS
        self._set_active(self.n_threads)
        self._stalled_ns = 0
        self._retry_at = 0.0  # when to try with one thread more
        self._pause_s = _FIRST_PAUSE_S
        self._enter: Callable[[int], int] | None = None
        self._is_next, self._is_running = threading.Lock(), threading.RLock()
        # also runs before the interpreter ends, when compiled code is about to be unmapped
        self._finalizer = weakref.finalize(self, self._workers.stop)

    @property
    def n_parked(self) -> int:
        """Worker threads that sleep."""
        return self._workers.n_parked

    def run(self, ops_address: int, n_ops: int) -> None:
        """Runs ops once: int64 [n_ops, OP_BYTES / 8] as drawn in abi.py."""
        try:
            with self._is_next:  # a lock alone is often taken again by the thread that has just released it
                self._is_running.acquire()
            self._run(ops_address, n_ops)
        finally:
            try:  # noqa: SIM105 - a call of suppress() could be interrupted
                self._is_running.release()
            except RuntimeError:  # the interrupt came before it was taken
                pass

    def _run(self, ops_address: int, n_ops: int) -> None:
        if self._enter is None:
            enter = self._workers.executor()
            self._workers.start(self.n_threads - 1)
            self._enter = enter
        self._state[OPS // 8] = ops_address
        try:
            self._state[N_OPS // 8] = n_ops  # from here on no thread of the plan falls asleep
            if self._n_active < self.n_threads and time.monotonic() >= self._retry_at:
                self._set_active(self._n_active + 1)
            if self._workers.n_parked > self.n_threads - self._n_active:
                self._workers.wake_all()
            started_ns = time.monotonic_ns()
            self._enter(0)
        finally:
            self._state[N_OPS // 8] = 0
        if self._state[STALLED_NS // 8] != self._stalled_ns:
            self._give_way(time.monotonic_ns() - started_ns)

    def _give_way(self, plan_ns: int) -> None:
        """After stalls: one thread fewer for a while, longer each time that it happens soon again.

        A thread whose core is shared holds up all the others for a scheduler's slice, again and again;
        without it they lose only its share of the work. If that share, of a plan that took `plan_ns`, is more
        than the stalls have cost, all threads stay.
        """
        stalled_ns = self._state[STALLED_NS // 8] - self._stalled_ns  # all waiting threads' time, added up
        self._stalled_ns += stalled_ns
        if stalled_ns * self._n_active < plan_ns * (self._n_active - 1):
            return
        now = time.monotonic()
        is_soon = now < self._retry_at + _CALM_S
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if is_soon else _FIRST_PAUSE_S
        self._retry_at = now + self._pause_s
        self._set_active(max(1, self._n_active - 1))

    @property
    def _n_active(self) -> int:
        return self._state[N_ACTIVE // 8]

    def _set_active(self, n_active: int) -> None:
        self._state[N_ACTIVE // 8] = n_active

    def _after_fork(self) -> None:
        """In a process that was forked, which has none of the threads, and may have been forked in a plan."""
        self._finalizer.detach()
        self._prepare()

    def run_kernel(self, name: str, **arguments: int) -> None:
        """Runs one kernel over all its tiles."""
        kernel = self.kernels[name]
        record = pack_record(kernel, arguments)
        op = np.array([kernel.address, ctypes.addressof(record), 0, 0, 0], np.int64)
        self.run(address_of(op), 1)

    def close(self) -> None:
        """Ends the workers. The pool can't be used afterwards."""
        self._finalizer()


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[int, ThreadPool] = weakref.WeakValueDictionary()  # by n_threads
_sharing = threading.Lock()


def shared_pool(n_threads: int | None = None) -> ThreadPool:
    """This process's pool of `n_threads`, which ends with the last reference to it.

    Models that step at the same time take turns at one pool, plan by plan: threads of two pools on the same
    cores would spin against each other, each waiting for tiles that the other keeps from being computed.
    """
    n = min(n_threads or usable_cores(), MAX_THREADS)
    with _sharing:
        pool = _shared.get(n)
        if pool is None:
            pool = _shared[n] = ThreadPool(KernelLibrary(), n)
    return pool


def _after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()
    for pool in _pools:
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
