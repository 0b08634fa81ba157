"""Work beside the requests, which needs the engine's thread: done in short pieces between its steps."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Job:
    """Work in pieces: `pieces` yields after each, which should not outlast a step, and returns a result.

    `on_end` is called on the engine's thread, with the result and None or with None and the error that ended
    the work; not where the job was cancelled. It must be quick and must not raise.
    """

    pieces: Generator[None, None, Any]
    on_end: Callable[[Any, Exception | None], None]
    client: str = ""  # whose work it is: clients take turns
    is_cancelled: bool = False  # set by whoever waits no more; the next piece is not done

    def advance(self) -> bool:
        """Does a piece; True where it was the last, and `on_end` has been called."""
        if self.is_cancelled:
            self.pieces.close()
            return True
        try:
            next(self.pieces)
        except StopIteration as end:
            self.on_end(end.value, None)
        except Exception as error:
            self.on_end(None, error)
        else:
            return False
        return True


class JobQueue:
    """Jobs that wait, by client: a job is done whole, then it is another client's turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def first(self) -> Job:
        """The job under way, or to be done next."""
        return next(iter(self._waiting.values()))[0]

    def add(self, job: Job) -> None:
        """Puts a job behind its client's others."""
        self._waiting.setdefault(job.client, deque()).append(job)
        self._n += 1

    def pop(self) -> Job:
        """Takes `first` off; its client is the last to have another turn."""
        client, jobs = next(iter(self._waiting.items()))
        job = jobs.popleft()
        self._n -= 1
        self._waiting.move_to_end(client)
        if not jobs:
            del self._waiting[client]
        return job
