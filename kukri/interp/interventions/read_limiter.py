"""How often requests are read out while they generate, so that readers leave the processor to the engine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

_TIMES = 25  # a reading waits this many times its duration for each request, so readings take 4% of the time
_FREE_S = 0.0005  # a shorter reading never waits
_MOST_S = 1.0


class ReadLimiter:
    """Decides when the requests of one model may be read; any thread may ask.

    A product with all features of a dictionary takes about as long for sixteen tokens as for one, so tokens
    wait for each other: readings of all requests together take about a 25th of the time.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._next: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # when a request may be read again

    def allows(self, request: Any) -> bool:
        """Return True if the request, or its stand-in, may be read now."""
        return self._clock() >= self._next.get(request, 0)

    def took(self, request: Any, since: float) -> None:
        """Notes that a reading of the request began then and has just ended."""
        now = self._clock()
        if now - since >= _FREE_S:
            self._next[request] = now
            self._next[request] += min(_TIMES * len(self._next) * (now - since), _MOST_S)

    def now(self) -> float:
        """Return the seconds of its clock."""
        return self._clock()

    def forget(self, request: Any) -> None:
        """The request has ended."""
        self._next.pop(request, None)
