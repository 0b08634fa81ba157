"""A unit of time for tests that catch waste: what plain Python takes here and now.

Limits in seconds fail on a slow or busy machine; as multiples of this they do so less.
"""

from __future__ import annotations

import time


def yardstick_s() -> float:
    """Processor time of some plain Python, about a millisecond; the least of a few is the unit."""
    started = time.thread_time()
    counts: dict[int, int] = {}
    for i in range(11_000):
        counts[i % 97] = counts.get(i % 97, 0) + i
    return time.thread_time() - started
