"""The waiting queue: requests that wait to run, and the order in which they are admitted.

Lower `priority` numbers go first. Among equals a preempted request goes before those that never ran, and then
the client that got the fewest tokens so far (virtual token counters: Sheng et al. 2024, "Fairness in Serving
Large Language Models"), so that one who sends a thousand requests does not keep the others waiting. Within a
client it is first come, first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kukri.engine.request import Request


class WaitingQueue:
    """The waiting requests, and a virtual token counter for each client with a live request."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}  # by id
        self._n_live: Counter[str] = Counter()  # requests of each client, waiting or running
        self._n_served: dict[str, int] = {}  # tokens of each client with live requests

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting

    def arrive(self, request: Request) -> None:
        """Queues a request that is new."""
        if not self._n_live[request.client]:
            # no credit for the time away: else a client that comes seldom could flood
            self._n_served[request.client] = min(self._n_served.values(), default=0)
        self._n_live[request.client] += 1
        self.put(request)

    def put(self, request: Request) -> None:
        """Queues a request, new or preempted."""
        self._waiting[request.id] = request

    def remove(self, request: Request) -> None:
        """Takes a request out, as it runs from now on."""
        del self._waiting[request.id]

    def leave(self, request: Request) -> None:
        """Forgets a request that has ended, wherever it was."""
        self._waiting.pop(request.id, None)
        self._n_live[request.client] -= 1
        if not self._n_live[request.client]:
            del self._n_live[request.client], self._n_served[request.client]

    def count_served(self, request: Request, n_tokens: int) -> None:
        """Adds tokens computed to the counter of a request's client."""
        self._n_served[request.client] += n_tokens

    def first(self, may_run: Callable[[Request], bool]) -> Request | None:
        """The next request in turn, of those that may run."""
        return min(filter(may_run, self), key=self._rank, default=None)

    def _rank(self, request: Request) -> tuple[int, bool, int, int]:
        was_preempted = request.n_preemptions > 0
        n_served = 0 if was_preempted else self._n_served[request.client]
        return request.priority, not was_preempted, n_served, request.id
