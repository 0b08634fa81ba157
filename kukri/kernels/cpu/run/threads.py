"""The executor: threads that run a plan's ops together, each taking tiles from its own range first.

All threads run the same loop inside one call that holds no GIL. An op's tiles are cut into one range per
thread, so that each streams its own stretch of weights; a thread that is done early steals tiles from others.
A range is a *ticket word*, and taking a tile is one atomic decrement of it:

    word = op << 32 | BIAS + tiles left        (BIAS keeps failed claims from borrowing into the op)

The thread that finishes an op's last tile opens the next op. A thread that the system put to sleep
holds up the others only if it had taken a tile, because they wait for tiles, never for threads. So a thread
yields its core between two tiles before the system would take it away in the middle of one.

Memory is ordered by two chains. Opening an op stores its words (release) after all that belongs to it, which
a claim of a tile (acquire) therefore sees. A thread adds tiles to DONE (release) after writing their results,
so the thread that adds the last (acquire) sees them, and so does a thread that takes a tile of the next op.
Words that are not atomic are read only by a thread that has a tile, or that opens an op.

Between steps word 0 names the op IDLE. Workers keep looking for a while and then return, to be parked by
Python (pool.py): waking a sleeping thread costs more than most ops. A long wait in the middle of a plan is
timed as a stall: some thread lost its core to another process. If stalls take too much of a plan, the pool
will do with fewer threads.
"""

from __future__ import annotations

from kukri.kernels.cpu.compile.intrinsics import device, load_i64, prefetch, store_i64
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.run.abi import (
    BIAS,
    DONE,
    IDLE,
    N_ACTIVE,
    N_OPS,
    N_SHARES,
    NEXT_WEIGHT_BYTES,
    NEXT_WEIGHTS,
    OP_BYTES,
    OP_KERNEL,
    OP_N_TILES,
    OP_RECORD,
    OP_WEIGHT_BYTES,
    OP_WEIGHTS,
    OPS,
    PARK_NS,
    PAUSES_BEFORE_YIELD,
    STALL_NS,
    STALLED_NS,
    STOP,
    WORDS,
    YIELD_NS,
)
from kukri.kernels.cpu.run.atomics import (
    atomic_claim,
    atomic_count,
    atomic_finish,
    atomic_load,
    atomic_store,
    call_kernel,
    monotonic_ns,
    spin_pause,
    yield_cpu,
)

_LOW = (1 << 32) - 1
_PREFETCH_BYTES = 512  # a look; no more, so that new tiles are seen soon
_PREFETCHES = 128
_TILES_PER_LOOK = 8  # at the clock: tiles of one token's products take some microseconds each


@device
def range_start(n_tiles, thread, n_threads):
    """The first tile of a thread's range. Range 0 is never empty."""
    return (n_tiles * thread + n_threads - 1) // n_threads


@device
def open_op(state, op):
    """Publishes the first op from `op` on that has tiles, or IDLE after the last."""
    ops = load_i64(state + OPS)
    n_ops = load_i64(state + N_OPS)
    n_threads = load_i64(state + N_ACTIVE)
    while op < n_ops:
        entry = ops + op * OP_BYTES
        n_tiles = call_kernel(load_i64(entry + OP_KERNEL), load_i64(entry + OP_RECORD), -1)
        if n_tiles > 0:
            store_i64(entry + OP_N_TILES, n_tiles)
            store_i64(state + N_SHARES, n_threads)
            store_i64(state + NEXT_WEIGHTS, load_i64(entry + OP_WEIGHTS))
            store_i64(state + NEXT_WEIGHT_BYTES, load_i64(entry + OP_WEIGHT_BYTES))
            store_i64(state + DONE, 0)
            # range 0 last: until it is out the op cannot end, so no later op's words are overwritten
            for thread in range(n_threads - 1, -1, -1):
                stop = range_start(n_tiles, thread + 1, n_threads)
                left = stop - range_start(n_tiles, thread, n_threads)
                atomic_store(state + WORDS + 64 * thread, (op << 32) | (BIAS + left))
            return
        op += 1
    atomic_store(state + WORDS, (IDLE << 32) | BIAS)


@device
def take_tile(state, thread, n_threads):
    """Takes a tile, from the thread's own range or the next that has one, and runs it -> its op, or -1.

    `n_threads` may belong to an earlier plan, since it only says where to look.
    """
    for i in range(n_threads):
        owner = thread + i
        if owner >= n_threads:
            owner -= n_threads
        word = state + WORDS + 64 * owner
        if (atomic_load(word) & _LOW) <= BIAS:
            continue
        ticket = atomic_claim(word, -1)
        left = (ticket & _LOW) - BIAS
        if left <= 0:
            continue
        # the op cannot end before this tile does, so its words do not change
        op = ticket >> 32
        entry = load_i64(state + OPS) + op * OP_BYTES
        stop = range_start(load_i64(entry + OP_N_TILES), owner + 1, load_i64(state + N_SHARES))
        tile = stop - left
        call_kernel(load_i64(entry + OP_KERNEL), load_i64(entry + OP_RECORD), tile)
        return op
    return -1


@device
def upcoming_weights(state, thread, n_threads):
    """Address of the weights that this thread reads first in the next op that streams weights, or 0.

    Without a tile in hand nothing of the plan may be read: it may end, and be gone. The two numbers here may
    be of two ops, which costs a useless prefetch.
    """
    weights = atomic_load(state + NEXT_WEIGHTS)
    if weights == 0:
        return 0
    return weights + atomic_load(state + NEXT_WEIGHT_BYTES) * thread // n_threads


def run_plan(tile, state):
    """Thread 0 (`tile`) runs the plan in `state` once; others serve plans until idle for long."""
    thread = tile
    if thread == 0:
        open_op(state, 0)
    n_done = 0  # tiles run here and not yet counted in DONE; always of the current op
    last_op = 0
    waits = 0  # looks in a row that found nothing to do, all between steps or all within one
    was_idle = False
    waiting_since = 0
    ahead = 0
    yield_at = monotonic_ns() + YIELD_NS
    while True:
        n_threads = atomic_load(state + N_ACTIVE)
        op = take_tile(state, thread, n_threads) if thread < n_threads else -1
        if op >= 0:
            n_done += 1
            last_op = op
            waits = 0
            if n_done % _TILES_PER_LOOK != 0 or monotonic_ns() < yield_at:
                continue
        if n_done > 0:
            n_tiles = load_i64(load_i64(state + OPS) + last_op * OP_BYTES + OP_N_TILES)
            if atomic_finish(state + DONE, n_done) + n_done == n_tiles:
                open_op(state, last_op + 1)
            n_done = 0
            if monotonic_ns() >= yield_at:
                yield_cpu()
                yield_at = monotonic_ns() + YIELD_NS
            continue
        is_idle = (atomic_load(state + WORDS) >> 32) == IDLE
        if thread == 0 and is_idle:
            return 0
        if is_idle != was_idle:
            was_idle = is_idle
            waits = 0
        if waits == 0:
            ahead = 0 if is_idle else upcoming_weights(state, thread, n_threads)
        if ahead != 0 and waits < _PREFETCHES:
            for line in range(0, _PREFETCH_BYTES, 64):  # a wait is time that memory would stand idle
                prefetch(ahead + waits * _PREFETCH_BYTES + line)
        waits += 1
        if waits < PAUSES_BEFORE_YIELD:
            spin_pause()
            continue
        if waits == PAUSES_BEFORE_YIELD:
            waiting_since = monotonic_ns()
        yield_cpu()
        waited = monotonic_ns() - waiting_since
        if (
            thread >= n_threads
            or atomic_load(state + STOP) != 0
            or (thread > 0 and is_idle and waited > PARK_NS)
        ):
            return 1
        if not is_idle and waited > STALL_NS:
            atomic_count(state + STALLED_NS, waited)
            waits = 0


KERNELS = {"run_plan": KernelSource("run_plan", run_plan)}
