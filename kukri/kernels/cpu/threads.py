"""The executor: threads that run a plan's ops together, claiming tiles from a shared counter.

All threads run the same loop inside one call that holds no GIL. The *ticket word* holds the current op and
how many of its tiles are left; taking a tile is one atomic decrement. Whoever finishes an op's last tile
opens the next op, so a thread that the system put to sleep holds up the others only if it took a tile
with it: there is no barrier that waits for threads, only one that waits for tiles.

    word = op << 32 | BIAS + tiles left        (BIAS keeps failed claims from borrowing into the op)

Between steps the word names the op IDLE. Workers keep looking for a while and then return, to be parked
by Python (`ThreadPool` in plan.py): waking a sleeping thread costs more than most ops.
"""

from __future__ import annotations

from kukri.kernels.cpu.jit import KernelSource
from kukri.kernels.cpu.simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    device,
    load_i64,
    spin_pause,
    store_i64,
    yield_cpu,
)
from kukri.kernels.cpu.state import (
    BIAS,
    DONE,
    IDLE,
    N_ACTIVE,
    N_OPS,
    OP_BYTES,
    OPS,
    PAUSES_BEFORE_YIELD,
    STOP,
    WORD,
    YIELDS_BEFORE_PARK,
)

_LOW = (1 << 32) - 1


@device
def open_op(state, op):  # type: ignore[no-untyped-def]
    """Publishes the first op from `op` on that has tiles, or IDLE after the last."""
    ops = load_i64(state + OPS)
    n_ops = load_i64(state + N_OPS)
    while op < n_ops:
        entry = ops + op * OP_BYTES
        n_tiles = call_kernel(load_i64(entry), load_i64(entry + 8), -1)
        if n_tiles > 0:
            store_i64(entry + 16, n_tiles)
            store_i64(state + DONE, 0)
            atomic_store(state + WORD, (op << 32) | (BIAS + n_tiles))
            return
        op += 1
    atomic_store(state + WORD, (IDLE << 32) | BIAS)


def run_plan(tile: int, state: int) -> int:
    """As thread 0 (`tile`): runs the plan in `state` once. As another: serves plans until idle for long."""
    if tile == 0:
        open_op(state, 0)
    waits = 0
    while True:
        word = atomic_load(state + WORD)
        if (word & _LOW) <= BIAS or tile >= load_i64(state + N_ACTIVE):
            if tile == 0 and (word >> 32) == IDLE:
                return 0
            waits += 1
            if waits < PAUSES_BEFORE_YIELD:
                spin_pause()
                continue
            yield_cpu()
            if tile > 0 and (waits > PAUSES_BEFORE_YIELD + YIELDS_BEFORE_PARK or load_i64(state + STOP) != 0):
                return 1
            continue
        ticket = atomic_add(state + WORD, -1)
        left = (ticket & _LOW) - BIAS
        if left <= 0:
            continue
        waits = 0
        op = ticket >> 32
        entry = load_i64(state + OPS) + op * OP_BYTES
        n_tiles = load_i64(entry + 16)
        call_kernel(load_i64(entry), load_i64(entry + 8), n_tiles - left)
        if atomic_add(state + DONE, 1) + 1 == n_tiles:
            open_op(state, op + 1)


KERNELS = {"run_plan": KernelSource("run_plan", run_plan, ("state",))}
