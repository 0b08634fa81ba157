"""Processor time of a test's own work, whatever else the process does, and a unit to state it in.

Limits in seconds fail on a slow or busy machine; as multiples of the unit they do so less.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """What `stopwatch` measured: `seconds`, set at the end of the block."""

    seconds: float


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measures the seconds of processor time that the block takes on this thread.

    Time on other threads is not counted: kernels compile there, and servers of other tests end. Garbage is
    not collected meanwhile: a collection walks all that the process holds, seconds where torch is loaded.
    """
    took = Stopwatch()
    was_enabled = gc.isenabled()
    gc.disable()
    started_s = time.thread_time()
    try:
        yield took
    finally:
        took.seconds = time.thread_time() - started_s
        if was_enabled:
            gc.enable()


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fails if the block takes `limit_s` seconds or more by `stopwatch`, unless it raises."""
    with stopwatch() as took:
        yield
    assert took.seconds < limit_s


def yardstick_s() -> float:
    """Processor time of some plain Python, about a millisecond; the least of a few is the unit."""
    counts: dict[int, int] = {}
    with stopwatch() as took:
        for i in range(11_000):
            counts[i % 97] = counts.get(i % 97, 0) + i
    return took.seconds
