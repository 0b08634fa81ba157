"""A simulation of replicas by discrete events: the real router, an engine's measured step costs.

Between two events of a replica (a prompt is read, an answer ends) all its answers grow at one rate, that of a
step: so a request costs three events, whatever its length. A replica's cache holds the pages used last.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Literal

from kukri.engine.pages import PageKey
from kukri.scale.routing import PrefixRouter

Routing = Literal["prefix", "round-robin"]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step: `base_s`, and more for each sequence that decodes and each prompt token."""

    base_s: float
    sequence_s: float
    token_s: float

    def step_s(self, n_sequences: int, n_prompt_tokens: int) -> float:
        """Seconds of one step."""
        return self.base_s + n_sequences * self.sequence_s + n_prompt_tokens * self.token_s


@dataclass(frozen=True)
class Engine:
    """A replica's limits, as in EngineConfig."""

    costs: StepCosts
    max_requests: int = 16
    max_step_tokens: int = 512
    max_prompt_tokens: int = 64  # in a step in which others decode
    n_pages: int = 8192
    page_tokens: int = 16


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random (Poisson), `rate` a second, for `n_requests` of them.

    A prompt begins with one of `n_prefixes` texts of `prefix_tokens` tokens, the k-th with a weight of
    k ** -skew, and ends with `own_tokens` of its own. Lengths vary by half, evenly.
    """

    rate: float
    n_requests: int = 2000
    n_prefixes: int = 8
    prefix_tokens: int = 512
    own_tokens: int = 64
    answer_tokens: int = 128
    skew: float = 0.0


@dataclass(frozen=True)
class Report:
    """The results of a simulation. Times in seconds, as clients see them, at the median and 99th percent."""

    n_replicas: int
    hit_rate: float  # the share of prompt tokens that are found in a cache
    first_token_p50_s: float
    first_token_p99_s: float
    token_p50_s: float  # mean time of an answer's tokens after the first
    token_p99_s: float
    imbalance: float  # busy time of the busiest replica by that of the mean
    busy: float  # mean share of the time in which a replica computes
    tokens_per_s: float


@dataclass(eq=False)
class _Request:
    arrived_s: float
    keys: list[PageKey]
    n_prompt: int
    n_answer: int
    first_s: float = 0.0
    end_s: float = 0.0
    left: float = 0.0  # tokens left of the prompt, then of the answer


@dataclass(eq=False)
class _Replica:
    name: str
    cache: OrderedDict[PageKey, None] = field(default_factory=OrderedDict)
    waiting: deque[_Request] = field(default_factory=deque)
    reading: _Request | None = None
    decoding: list[_Request] = field(default_factory=list)
    now_s: float = 0.0
    busy_s: float = 0.0
    version: int = 0  # which event is its next; older ones are void

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.decoding) + (self.reading is not None)


def simulate(
    engine: Engine, load: Load, n_replicas: int, routing: Routing = "prefix", seed: int = 0
) -> Report:
    """Runs the requests of a load on replicas of an engine. The same seed gives the same requests."""
    return _Simulation(engine, n_replicas, routing).run(_requests(load, engine.page_tokens, seed))


def _requests(load: Load, page_tokens: int, seed: int) -> list[_Request]:
    draw = random.Random(seed)
    weights = [(k + 1) ** -load.skew for k in range(load.n_prefixes)]
    shared = [
        [b"%d/%d" % (k, i) for i in range(load.prefix_tokens // page_tokens)] for k in range(load.n_prefixes)
    ]
    requests: list[_Request] = []
    now_s = 0.0
    for number in range(load.n_requests):
        now_s += draw.expovariate(load.rate)
        prefix = draw.choices(range(load.n_prefixes), weights)[0]
        n_own = max(round(load.own_tokens * draw.uniform(0.5, 1.5)), 1)
        n_answer = max(round(load.answer_tokens * draw.uniform(0.5, 1.5)), 1)
        own = [b"own %d/%d" % (number, i) for i in range(n_own // page_tokens)]
        requests.append(_Request(now_s, shared[prefix] + own, load.prefix_tokens + n_own, n_answer))
    return requests


class _Simulation:
    def __init__(self, engine: Engine, n_replicas: int, routing: Routing) -> None:
        self._engine, self._routing = engine, routing
        self._replicas = {f"r{i}": _Replica(f"r{i}") for i in range(n_replicas)}
        self._router = PrefixRouter()
        for name in self._replicas:
            self._router.add(name, engine.n_pages)
        self._loads = dict.fromkeys(self._replicas, 0)
        self._turns = count()
        self._events: list[tuple[float, int, str, int]] = []  # time, tie, replica, version
        self._n_hit = 0

    def run(self, requests: Sequence[_Request]) -> Report:
        for request in requests:
            self._pass_events(request.arrived_s)
            self._arrive(request)
        self._pass_events(float("inf"))
        return self._report(requests)

    def _pass_events(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            time_s, _, name, version = heapq.heappop(self._events)
            replica = self._replicas[name]
            if replica.version == version:
                self._advance(replica, time_s)
                self._plan(replica)

    def _arrive(self, request: _Request) -> None:
        if self._routing == "round-robin":
            name = list(self._replicas)[next(self._turns) % len(self._replicas)]
        else:
            name = self._router.choose(request.keys, self._loads, self._replicas)
            self._router.note(name, request.keys)
        replica = self._replicas[name]
        self._advance(replica, request.arrived_s)
        replica.waiting.append(request)
        self._loads[name] = replica.load
        self._plan(replica)

    def _rates(self, replica: _Replica) -> tuple[float, float]:
        """Prompt tokens a second, and tokens a second of each answer."""
        engine, n = self._engine, len(replica.decoding)
        chunk = 0
        if replica.reading is not None:
            chunk = engine.max_prompt_tokens if n else engine.max_step_tokens
            chunk = min(chunk, ceil(replica.reading.left))
        step_s = engine.costs.step_s(n, chunk)
        return chunk / step_s, 1 / step_s

    def _advance(self, replica: _Replica, now_s: float) -> None:
        """Lets a replica compute until a moment, which is that of its next event at the latest."""
        elapsed_s = now_s - replica.now_s
        replica.now_s = now_s
        if replica.reading is None and not replica.decoding:
            return
        prompt_rate, answer_rate = self._rates(replica)
        replica.busy_s += elapsed_s
        for request in replica.decoding:
            request.left -= elapsed_s * answer_rate
        ended = [request for request in replica.decoding if request.left <= 1e-6]
        for request in ended:
            request.end_s = now_s
            replica.decoding.remove(request)
        read = replica.reading
        if read is not None:
            read.left -= elapsed_s * prompt_rate
            if read.left <= 1e-6:
                replica.reading, read.first_s, read.left = None, now_s, float(read.n_answer - 1)
                self._keep(replica, read)
                if read.left:
                    replica.decoding.append(read)
                else:
                    read.end_s = now_s

    def _plan(self, replica: _Replica) -> None:
        """Begins the next prompt if there is room, and notes the next event."""
        if replica.reading is None and replica.waiting and len(replica.decoding) < self._engine.max_requests:
            replica.reading = request = replica.waiting.popleft()
            request.left = float(request.n_prompt - self._hit(replica, request))
        self._loads[replica.name] = replica.load
        replica.version += 1
        if replica.reading is None and not replica.decoding:
            return
        prompt_rate, answer_rate = self._rates(replica)
        next_s = min((request.left / answer_rate for request in replica.decoding), default=float("inf"))
        if replica.reading is not None:
            next_s = min(next_s, replica.reading.left / prompt_rate)
        event = (replica.now_s + max(next_s, 1e-9), next(self._turns), replica.name, replica.version)
        heapq.heappush(self._events, event)

    def _hit(self, replica: _Replica, request: _Request) -> int:
        """The prompt tokens that are in a replica's cache; the last is always computed."""
        n = 0
        while n < len(request.keys) and request.keys[n] in replica.cache:
            n += 1
        n_tokens = min(n * self._engine.page_tokens, request.n_prompt - 1)
        self._n_hit += n_tokens
        return n_tokens

    def _keep(self, replica: _Replica, request: _Request) -> None:
        for key in reversed(request.keys):
            replica.cache[key] = None
            replica.cache.move_to_end(key)
        while len(replica.cache) > self._engine.n_pages:
            replica.cache.popitem(last=False)

    def _report(self, requests: Sequence[_Request]) -> Report:
        first = sorted(one.first_s - one.arrived_s for one in requests)
        tokens = sorted((one.end_s - one.first_s) / max(one.n_answer - 1, 1) for one in requests)
        busy = [replica.busy_s for replica in self._replicas.values()]
        span_s = max(one.end_s for one in requests) - requests[0].arrived_s
        mean = sum(busy) / len(busy)
        return Report(
            n_replicas=len(busy),
            hit_rate=self._n_hit / sum(one.n_prompt for one in requests),
            first_token_p50_s=_percentile(first, 0.5),
            first_token_p99_s=_percentile(first, 0.99),
            token_p50_s=_percentile(tokens, 0.5),
            token_p99_s=_percentile(tokens, 0.99),
            imbalance=max(busy) / mean,
            busy=mean / span_s,
            tokens_per_s=sum(one.n_answer for one in requests) / span_s,
        )


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(int(len(values) * share), len(values) - 1)]


def replicas_needed(
    engine: Engine, load: Load, *, first_token_s: float, token_s: float, most: int = 1000
) -> Report | None:
    """The report of the fewest replicas that keep both times, of which 99 percent of requests have the
    first and the median request the second; None if `most` do not.
    """

    def report_of(n: int) -> Report:
        return simulate(engine, load, n)

    def is_enough(report: Report) -> bool:
        return report.first_token_p99_s <= first_token_s and report.token_p50_s <= token_s

    high = 1
    while not is_enough(report_of(high)):
        if high == most:
            return None
        high = min(2 * high, most)
    low = high // 2  # too few
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(report_of(middle)):
            high = middle
        else:
            low = middle
    return report_of(high)
