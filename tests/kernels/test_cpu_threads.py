"""The executor and its pool: every tile runs exactly once, whoever comes late or sleeps."""

from __future__ import annotations

import dis
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kukri.kernels.cpu.compile.jit import KernelLibrary, pack_record
from kukri.kernels.cpu.run import pool as pool_module
from kukri.kernels.cpu.run.abi import STALLED_NS
from kukri.kernels.cpu.run.memory import address_of
from kukri.kernels.cpu.run.pool import ThreadPool
from kukri.kernels.paged_kv import PagedKV

N = 64  # float32 of one row


@pytest.fixture(scope="module")
def kernels():
    return KernelLibrary()


def copy_chain(kernels, counts):
    """Ops that copy buffer i to buffer i + 1, `counts[i]` rows in tiles of up to 8, and the buffers."""
    kernel = kernels["gather_rows"]
    n_rows = max(counts)
    buffers = [np.zeros((n_rows, N), np.float32) for _ in range(len(counts) + 1)]
    indices = np.arange(n_rows, dtype=np.int32)
    pointer = np.array([address_of(indices)], np.int64)
    rows = np.array(counts, np.int64)
    records = [
        pack_record(
            kernel,
            {
                "rows": address_of(rows) + 8 * i,
                "indices": address_of(pointer),
                "x": address_of(buffers[i]),
                "x_stride": 4 * N,
                "n": N,
                "y": address_of(buffers[i + 1]),
                "y_stride": 4 * N,
            },
        )
        for i in range(len(counts))
    ]
    ops = np.array(
        [[kernel.address, address_of(np.frombuffer(r, np.int64)), 0, 0, 0] for r in records], np.int64
    )
    return ops, buffers, (indices, pointer, rows, records)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_ops_run_in_order_and_whole(kernels, n_threads):
    """Would catch a lost or doubled tile, and an op that starts before the one it reads from has ended."""
    pool = ThreadPool(kernels, n_threads)
    rng = np.random.default_rng(n_threads)
    counts = [int(n) for n in rng.integers(1, 200, 50)]
    counts = [min(counts[: i + 1]) for i in range(50)]  # every op copies rows that the one before wrote
    ops, buffers, keep = copy_chain(kernels, counts)
    for _step in range(30):
        buffers[0][:] = rng.standard_normal(buffers[0].shape)
        for buffer in buffers[1:]:
            buffer[:] = np.nan
        pool.run(address_of(ops), len(ops))
        np.testing.assert_array_equal(buffers[-1][: counts[-1]], buffers[0][: counts[-1]])
    del keep
    pool.close()


@pytest.mark.parametrize(
    ("n_threads", "stalled_ms", "n_left"), [(2, 140, 2), (2, 160, 1), (4, 215, 4), (4, 235, 3)]
)
def test_a_thread_is_left_out_if_stalls_cost_more_than_its_share(kernels, n_threads, stalled_ms, n_left):
    """Would catch one tail of a long prefill, a millisecond, that costs the next one half of its threads."""
    plan_ns = 300_000_000
    pool = ThreadPool(kernels, n_threads)
    pool._state[STALLED_NS // 8] += stalled_ms * 1_000_000
    pool._give_way(plan_ns)
    assert pool._n_active == n_left


@pytest.mark.full
def test_a_thread_that_slept_through_a_change_takes_the_right_tiles(kernels):
    """Would catch a tile that ran twice and another that never did: a thread back from sleep knows how many
    threads shared the last plan's ops, not this one's. More threads than cores, so that some always sleep."""
    pool = ThreadPool(kernels, 8)
    rng = np.random.default_rng(3)
    ops, buffers, keep = copy_chain(kernels, [190] * 6)
    for step in range(6000):
        buffers[0][:] = step
        pool._set_active(int(rng.integers(1, 9)))
        pool.run(address_of(ops), len(ops))
        assert (buffers[-1] == step).all(), f"a tile of step {step} was not run"
    del keep
    pool.close()


def test_ops_without_tiles_are_passed_over(kernels):
    """Would catch a hang when a step has, say, no logit rows."""
    pool = ThreadPool(kernels, 2)
    ops, buffers, keep = copy_chain(kernels, [4, 4, 4])
    keep[2][1] = 0  # the middle op has no rows
    buffers[0][:] = 1
    pool.run(address_of(ops), 3)
    assert (buffers[1] == 1).all()
    assert not buffers[2].any()
    keep[2][:] = 0
    pool.run(address_of(ops), 3)
    pool.close()


def test_workers_park_and_wake(kernels):
    """Would catch workers that spin forever (a core burnt while idle) or never come back."""
    before = set(threading.enumerate())
    pool = ThreadPool(kernels, 3)
    ops, buffers, keep = copy_chain(kernels, [100] * 20)
    for _ in range(3):
        buffers[0][:] += 1
        pool.run(address_of(ops), len(ops))
        np.testing.assert_array_equal(buffers[-1], buffers[0])
        deadline = time.monotonic() + 10
        while pool.n_parked < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.n_parked == 2
        start = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - start < 0.1
    del keep
    pool.close()
    assert set(threading.enumerate()) <= before


def test_a_worker_that_would_sleep_once_a_plan_has_begun_takes_part(kernels):
    """Would catch half of a prompt's steps on one thread: a worker was idle for long enough to sleep, and had
    to wait for the GIL until the next plan had begun, which had found nobody to wake."""
    pool = ThreadPool(kernels, 2)
    has_begun, is_back = threading.Event(), threading.Event()
    took_part = []

    def enter(thread):
        if thread == 0:
            has_begun.set()
            took_part.append(is_back.wait(10))
        elif has_begun.is_set():
            is_back.set()
        else:  # idle for long, then waiting for the GIL
            has_begun.wait(10)

    pool._workers.executor = lambda: enter
    pool.run(0, 1)
    assert took_part == [True]
    pool.close()


@pytest.mark.full
def test_a_forgotten_pool_ends_its_threads(kernels):
    """Would catch threads, and the memory they point to, that outlive every engine."""
    before = set(threading.enumerate())  # some may be of other pools, and end meanwhile
    pool = ThreadPool(kernels, 2)
    ops, _, keep = copy_chain(kernels, [10])
    pool.run(address_of(ops), 1)
    (worker,) = set(threading.enumerate()) - before
    assert worker.is_alive()
    del pool
    gc.collect()
    assert not worker.is_alive()
    del keep


def places_of_interrupts(code):
    """Offsets of a function's instructions before which Python may run a signal's handler."""
    found, before = set(), "RESUME"
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            found.add(instruction.offset)
        before = instruction.opname
    return found


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th place where a signal's handler could, in two modules and `own`."""

    def __init__(self, n, files):
        self.n, self.files, self.where, self.places = n, files, None, {}

    def __enter__(self):
        sys.settrace(self.begin)

    def __exit__(self, *error):
        sys.settrace(None)

    def begin(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = True
        return self.look

    def look(self, frame, event, arg):
        code = frame.f_code
        if event == "opcode":
            places = self.places.get(code) or self.places.setdefault(code, places_of_interrupts(code))
            self.n -= frame.f_lasti in places
            if self.n < 0 and self.where is None:
                self.where = f"{code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.look


@pytest.mark.parametrize("starts", [True, False], ids=["first", "parked"])
def test_an_interrupt_anywhere_leaves_the_pool_in_order(kernels, starts):
    """Would catch a lock that stays taken, and a worker that is started twice or never, after Ctrl-C between
    any two calls of a run: of the first, and of one that wakes sleeping workers."""
    ops, buffers, keep = copy_chain(kernels, [100] * 3)
    before, files = set(threading.enumerate()), {pool_module.__file__, threading.__file__}
    n = n_interrupts = 0
    pool = ThreadPool(kernels, 3)
    while True:
        if starts:
            pool.close()
            pool = ThreadPool(kernels, 3)
        else:
            pool.run(address_of(ops), len(ops))
            deadline = time.monotonic() + 10
            while pool.n_parked < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        interrupt = InterruptAt(n, files)
        try:
            with interrupt:
                pool.run(address_of(ops), len(ops))
        except KeyboardInterrupt:
            n_interrupts += 1
        buffers[0][:] = n + 1
        after = threading.Thread(target=pool.run, args=(address_of(ops), len(ops)), daemon=True)
        after.start()
        after.join(10)
        assert not after.is_alive(), f"the pool hangs after an interrupt in {interrupt.where}"
        assert (buffers[-1] == n + 1).all(), interrupt.where
        workers = {thread for thread in threading.enumerate() if thread.name in ("kukri-1", "kukri-2")}
        assert len(workers - before) == 2, f"{len(workers)} workers after an interrupt in {interrupt.where}"
        if interrupt.where is None:
            break
        n += 1
    pool.close()
    del keep
    assert n_interrupts > 20  # the premise


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_workers_of_its_own():
    """Would catch a child, as of multiprocessing or a preloaded server, that waits for threads it lacks."""
    code = """
import os, sys, threading, warnings
import numpy as np
from kukri.kernels.cpu.run.pool import shared_pool
warnings.simplefilter("ignore")  # Python's, of a fork with threads
data = np.ones(1 << 20, np.uint8)
out = np.zeros(64 * 4 + 16, np.float32)
where = {"data": data.ctypes.data, "n_bytes": data.nbytes, "out": out.ctypes.data}
pool = shared_pool(3)
pool.run_kernel("read_memory", **where)
pool._is_running.acquire()  # as another thread has it, which runs a plan
child = []
def fork():
    child.append(os.fork())
    if not child[0]:
        for _ in range(50):
            pool.run_kernel("read_memory", **where)
        os._exit(0 if threading.active_count() == 3 else 1)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
pool._is_running.release()
pool.run_kernel("read_memory", **where)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.full
def test_a_process_can_end_while_workers_spin():
    """Would catch a crash at exit: code unmapped under threads that still run in it."""
    code = """
from kukri.kernels.cpu import CpuBackend
import numpy as np
backend = CpuBackend(2)
data = np.zeros(1 << 22, np.uint8)
where = data.__array_interface__["data"][0]
out = np.zeros(64 * 4 + 16, np.float32)
backend.pool.run_kernel("read_memory", data=where, n_bytes=1 << 22, out=out.__array_interface__["data"][0])
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.full
def test_a_program_keeps_what_it_points_into():
    """Would catch packed weights freed under a plan whose backend nobody else holds."""
    from kukri.kernels.cache import KVLayer
    from kukri.kernels.cpu import CpuBackend
    from kukri.kernels.step import ForwardBatch, StepLimits
    from kukri.kernels.weight_handles import Weight
    from kukri.quant.types import QUANT_TYPES

    forgotten_backend = CpuBackend(n_threads=1)
    rows = np.eye(64, dtype=np.float32)
    weight = Weight(rows.view(np.uint8), QUANT_TYPES["F32"], (64, 64))
    program = forgotten_backend.compile(
        lambda ops, batch: ops.linear(ops.logit_rows(ops.embed(weight, batch), batch), (weight,)),
        PagedKV([KVLayer(1, 16)], 1),
        StepLimits(4, 1, 4, 1),
    )
    del forgotten_backend
    gc.collect()
    one = np.zeros(1, np.int32)
    batch = ForwardBatch(one + 7, one, one, np.array([0, 1], np.int32), one + 1, one[None], one)
    assert program(batch).argmax()[0] == 7
