"""The waiting queue: requests that wait to run, and the order in which they are admitted.

Lower `priority` numbers go first. Among equals a preempted request goes before requests that never ran, and
then the client that got the fewest tokens so far (virtual token counters: Sheng et al. 2024, "Fairness in
Serving Large Language Models"), so that one who sends a thousand requests does not keep the others waiting.
Within a client it is first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice

from kukri.engine.request import ProgramKind, Request

_Line = tuple[int, bool, str, ProgramKind]  # priority, never preempted, client, program


class WaitingQueue:
    """The waiting requests, and a virtual token counter for each client with a live request.

    Requests that differ only by their id stand in one line, so that finding the next of a thousand looks at
    the first of each line.
    """

    def __init__(self) -> None:
        self._lines: dict[_Line, list[Request]] = {}  # each in order of ids; none is empty
        self._n_live: Counter[str] = Counter()  # requests of each client, waiting or running
        self._n_served: dict[str, int] = {}  # tokens of each client with live requests
        self.n_changes = 0  # requests that came or went so far

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._lines.values())

    def __contains__(self, request: Request) -> bool:
        return request in self._lines.get(_line(request), ())

    def arrive(self, request: Request) -> None:
        """Queues a request that is new."""
        if not self._n_live[request.client]:
            # no credit for the time away: else a client that comes seldom could flood
            self._n_served[request.client] = min(self._n_served.values(), default=0)
        self._n_live[request.client] += 1
        self.put(request)

    def put(self, request: Request) -> None:
        """Queues a request, new or preempted."""
        self.n_changes += 1
        insort(self._lines.setdefault(_line(request), []), request, key=_id)

    def remove(self, request: Request) -> None:
        """Removes a request that is about to run."""
        self.n_changes += 1
        line = self._lines[_line(request)]
        del line[bisect_left(line, request.id, key=_id)]
        if not line:
            del self._lines[_line(request)]

    def leave(self, request: Request) -> None:
        """Forgets a request that has ended, wherever it was."""
        if request in self:
            self.remove(request)
        self._n_live[request.client] -= 1
        if not self._n_live[request.client]:
            del self._n_live[request.client], self._n_served[request.client]

    def count_served(self, request: Request, n_tokens: int) -> None:
        """Adds tokens computed to the counter of a request's client."""
        self._n_served[request.client] += n_tokens

    def has(self, program: ProgramKind) -> bool:
        """True if a request of that program waits."""
        return any(key[3] == program for key in self._lines)

    def heads(self, may_run: Callable[[Request], bool], program: ProgramKind, n: int) -> Iterator[Request]:
        """Return up to `n` requests of each line, in its order, that may run and have the same program."""
        for key, line in self._lines.items():
            if key[3] == program:
                yield from islice(filter(may_run, line), n)

    def first(self, may_run: Callable[[Request], bool], program: ProgramKind | None = None) -> Request | None:
        """Return the next request in turn that may run and, if a program is given, has that program."""
        lines = [line for key, line in self._lines.items() if program in (None, key[3])]
        firsts = (next(filter(may_run, line), None) for line in lines)
        return min((request for request in firsts if request is not None), key=self.rank, default=None)

    def rank(self, request: Request) -> tuple[int, bool, int, int]:
        """The place of a request that waits, or whose prompt is computed, among all those: see the module."""
        was_preempted = request.sequence.n_preemptions > 0
        n_served = 0 if was_preempted else self._n_served[request.client]
        return request.priority, not was_preempted, n_served, request.id


def _line(request: Request) -> _Line:
    return request.priority, request.sequence.n_preemptions == 0, request.client, request.program


def _id(request: Request) -> int:
    return request.id
