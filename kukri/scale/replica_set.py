"""The replicas that are connected to a front: what each runs, and which of them may get a request.

A request may itself be what kills a replica. So one whose replica died counts as a suspect until its next
token comes, and a replica runs one suspect at a time. If that replica dies too, the request ends with an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from time import monotonic
from typing import Any

from kukri.dataclass import dataclass, field
from kukri.engine import EngineStatus, Request
from kukri.engine.traces import Span
from kukri.scale.channel import Channel
from kukri.scale.facts import ReplicaFacts
from kukri.scale.routing import PrefixRouter

log = logging.getLogger("kukri.scale")
_SPARE = 1.25  # requests sent to a replica for each that it runs, so that the next are there at once


@dataclass(eq=False)
class LiveRequest:
    """A request that has not ended."""

    request: Request
    keys: list[bytes]  # keys of its prompt's pages
    replica: Replica | None = None
    ticket: int = 0
    sent_s: float = 0.0
    n_at_start: int = 0  # tokens generated when it was sent
    n_deaths: int = 0  # replicas that died running it, since its last token
    n_runs: int = 0
    numerics: str | None = None  # the numerics of the replica that made its tokens
    mirostat_mu: float | None = None
    queued_s: float = 0.0  # since when it waits
    span: Span | None = None  # its time on the replica

    @property
    def is_suspect(self) -> bool:
        """True if its last replica died and no token has come since."""
        return self.n_deaths > 0


@dataclass(eq=False)
class Replica:
    """A replica that is connected."""

    facts: ReplicaFacts
    channel: Channel
    live: dict[int, LiveRequest] = field(default_factory=dict)  # by ticket
    status: EngineStatus | None = None
    is_draining: bool = False

    @property
    def has_room(self) -> bool:
        """True if it may get another request."""
        return not self.is_draining and len(self.live) < int(self.facts.max_requests * _SPARE) + 1

    @property
    def has_suspect(self) -> bool:
        """True if it runs a request that may have killed another."""
        return any(live.is_suspect for live in self.live.values())


class ReplicaSet:
    """The connected replicas by name, and when replicas of each kind of numerics were there last."""

    def __init__(self, model_identity: str) -> None:
        self._identity = model_identity
        self._router = PrefixRouter()
        self._by_name: dict[str, Replica] = {}
        self._seen_s = {"": monotonic()}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_name.values())

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def accepted(self, hello: Mapping[str, Any] | None) -> ReplicaFacts | None:
        """Return the facts of a replica that may join; None for any other."""
        if hello is None:
            return None
        facts = ReplicaFacts(**hello["facts"])
        if facts.model != self._identity:
            log.warning("replica %s on %s has a different model and is not used", facts.name, facts.host)
            return None
        if facts.name in self._by_name:
            return None
        numerics = {replica.facts.numerics for replica in self}
        if numerics and facts.numerics not in numerics:
            log.warning(
                "replica %s computes different bits (%s) from the others (%s) and cannot continue their "
"answers", facts.name, facts.numerics, ", ".join(numerics),
            )  # fmt: skip
        return facts

    def add(self, replica: Replica) -> None:
        """Takes in a replica that was accepted."""
        self._by_name[replica.facts.name] = replica
        self._router.add(replica.facts.name, replica.facts.n_pages)

    def remove(self, replica: Replica) -> bool:
        """Drop a replica that has gone; return False if it was not there."""
        name = replica.facts.name
        if self._by_name.get(name) is not replica:
            return False
        del self._by_name[name]
        self._router.remove(name)
        self._seen_s[replica.facts.numerics] = monotonic()
        return True

    @property
    def has_room(self) -> bool:
        """True if one may get another request."""
        return any(replica.has_room for replica in self)

    def candidates(self, live: LiveRequest) -> Collection[str]:
        """The names of the replicas that a request may go to now."""
        return [
            name
            for name, replica in self._by_name.items()
            if replica.has_room
            and not (live.is_suspect and replica.has_suspect)
            and (not live.request.n_generated or live.numerics == replica.facts.numerics)
        ]

    def choose(self, live: LiveRequest) -> Replica:
        """The candidate with the longest cached prefix of the request, then with the least load."""
        loads = {name: len(replica.live) for name, replica in self._by_name.items()}
        name = self._router.choose(live.keys, loads, self.candidates(live))
        self._router.note(name, live.keys)
        return self._by_name[name]

    def note_present(self) -> None:
        """Notes that the connected replicas are there now."""
        self._seen_s |= {replica.facts.numerics: monotonic() for replica in self}

    def absent_s(self, numerics: str | None = None) -> float:
        """Seconds since any replica was there, or one with these numerics if there ever was one."""
        last_s = max(self._seen_s.values())
        return monotonic() - (last_s if numerics is None else self._seen_s.get(numerics, last_s))
