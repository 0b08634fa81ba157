"""Processor time of a test's own work, whatever else the process does, and a unit to state it in.

Limits in plain seconds fail on a slow or busy machine: these hold for one that does the unit in a
millisecond.
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
def within(limit_s: float, what: str = "") -> Iterator[None]:
    """Fails if the block takes `limit_s` seconds or more by `stopwatch`, unless it raises.

    The limit holds for a machine whose yardstick takes a millisecond; a slower or busier one has more.
    """
    with stopwatch() as took:
        yield
    assert keeps(took.seconds, limit_s), what


def keeps(seconds: float, limit_s: float) -> bool:
    """True if that is less than a limit for a machine whose yardstick takes a millisecond."""
    return seconds < limit_s or seconds < limit_s * slowness()


def waited_less(seconds: float, limit_s: float) -> bool:
    """True if a wait is shorter than a limit for a machine that is not slow and does nothing else.

    Other processes make a wait longer by what they make of the yardstick's own time on the wall.
    """
    started_s = time.perf_counter()
    slow = slowness()
    wall_s = time.perf_counter() - started_s
    return seconds < limit_s or seconds < limit_s * max(slow, wall_s / 20e-3)


def slowness() -> float:
    """How many times a millisecond the yardstick takes now, on average; at least 1."""
    return max(1.0, sum(yardstick_s() for _ in range(20)) / 20 / 1e-3)


def yardstick_s() -> float:
    """Processor time of some plain Python, about a millisecond; the least of a few is the unit."""
    counts: dict[int, int] = {}
    with stopwatch() as took:
        for i in range(11_000):
            counts[i % 97] = counts.get(i % 97, 0) + i
    return took.seconds
