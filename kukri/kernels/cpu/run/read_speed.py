"""Memory read bandwidth of threads, which bounds decoding."""

from __future__ import annotations

import time

from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.cpu.run.pool import ThreadPool


def measure_read_speed(n_threads: int | None, n_bytes: int, n_passes: int) -> float:
    """Bytes a second that `n_threads` threads (None: the usable cores) read together, the best of the passes.

    The threads run models too, and share the work in the same way. `n_bytes` should be many
    times what caches hold.
    """
    pool = ThreadPool(KernelLibrary(), n_threads)
    buffer, maxima = aligned_zeros(n_bytes), aligned_zeros(n_bytes >> 14)
    buffer[:] = 1  # untouched pages would all be read from one page of zeros
    seconds = []
    for _ in range(n_passes):
        started = time.perf_counter()
        pool.run_kernel("read_memory", data=address_of(buffer), n_bytes=len(buffer), out=address_of(maxima))
        seconds.append(time.perf_counter() - started)
    pool.close()
    return n_bytes / min(seconds)
