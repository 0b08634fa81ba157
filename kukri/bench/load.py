"""A server under a measured load, for `kukri bench serve`. This process is the client and nothing else.

Open loop: requests arrive as a Poisson process of a rate, whether or not others are answered. Closed loop: a
number of clients, each of which asks again when it has its answer. One load is measured after the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from math import ceil, inf
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

import numpy as np

from kukri.bench.endpoint import Answer, Endpoint, Kind
from kukri.bench.latency import LoadPoint, load_point
from kukri.bench.prompts import as_body, file_prompts, random_prompts
from kukri.dataclass import dataclass, field
from kukri.errors import ConfigError, KukriError

Progress = Callable[[int, str], None]  # (requests done, the task), as for terminal.progress.progress_bar

_MAX_FITTINGS = 4  # requests that find how many words a prompt needs


@dataclass(frozen=True)
class LoadOptions:
    """The endpoint, the requests and the loads to measure. Raises ConfigError for invalid values.

    `loads` are requests a second (open loop) or requests at a time (closed), each of which ends after
    `n_requests` or after `duration_s`, whichever comes first.
    """

    url: str
    loads: tuple[float, ...]
    loop: Literal["open", "closed"] = "closed"
    kind: Kind = "chat"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None  # the first that is served
    n_requests: int | None = None
    duration_s: float | None = None
    n_prompt: int = 128  # tokens, of random words
    prompts: Path | None = None  # a file of prompts instead
    max_tokens: int = 64
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # None takes a field away
    objective: Mapping[str, float] = field(default_factory=dict)  # limits of good answers, ms
    n_warm_up: int = 2
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_requests is None and self.duration_s is None:
            raise ConfigError("a number of requests or a duration is required")
        for name, least in (
            ("n_requests", 1),
            ("n_prompt", 1),
            ("max_tokens", 1),
            ("n_warm_up", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name!r} must be at least {least}, not {value}")
        for name in ("duration_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{name!r} must be above 0, not {value:g}")
        if not self.loads or not all(0 < load < inf for load in self.loads):
            raise ConfigError("every rate or concurrency must be above 0")
        if self.loop == "closed" and not all(load == int(load) for load in self.loads):
            raise ConfigError("a concurrency must be a whole number of requests")

    @property
    def n_ticks(self) -> int:
        """Units of progress in all: requests, or seconds if their number is not known."""
        each = ceil(self.duration_s or 0) if self.n_requests is None else self.n_requests
        return each * len(self.loads)


@dataclass(frozen=True)
class LoadReport:
    """The results of `kukri bench serve`; it holds no API key."""

    url: str
    model: str
    kind: Kind
    loop: Literal["open", "closed"]
    prompts: str  # the file, or what the random ones are
    max_tokens: int
    ignore_eos: bool
    objective_ms: dict[str, float]
    seed: int
    extra_body: dict[str, Any]
    points: tuple[LoadPoint, ...]


def measure_load(options: LoadOptions, on_progress: Progress) -> LoadReport:
    """Loads the endpoint. Raises KukriError if it cannot be reached; answers that fail are counted."""
    return asyncio.run(_measure(options, on_progress))


async def _measure(options: LoadOptions, on_progress: Progress) -> LoadReport:
    async with Endpoint(options.url, options.api_key, options.kind, options.timeout_s) as endpoint:
        client = _Client(options, endpoint, on_progress)
        await client.prepare()
        points = [await client.measure(load) for load in options.loads]
    return LoadReport(
        url=endpoint.url,
        model=client.model,
        kind=options.kind,
        loop=options.loop,
        prompts=client.prompt_text,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        objective_ms=dict(options.objective),
        seed=options.seed,
        extra_body=dict(options.extra_body),
        points=tuple(points),
    )


class _Client:
    """Sends requests to one endpoint, in a load that is measured or before any."""

    def __init__(self, options: LoadOptions, endpoint: Endpoint, on_progress: Progress) -> None:
        self.options, self._endpoint, self._on_progress = options, endpoint, on_progress
        self.model, self.prompt_text = options.model or "", ""
        self._arrivals = np.random.default_rng(options.seed)
        self._prompts: Iterator[dict[str, Any]] = iter(())
        if options.prompts is not None:
            self._prompts, self.prompt_text = (
                file_prompts(options.prompts, options.kind),
                str(options.prompts),
            )
        self._answers: list[Answer] = []
        self._late_s: list[float] = []
        self._n_in_flight = self._max_in_flight = 0

    async def prepare(self) -> None:
        """Finds the model and prompts of the wanted length, warms up. Raises KukriError for no answer."""
        self._on_progress(0, "warming up")
        self.model = self.model or await self._endpoint.first_model()
        if self.options.prompts is None:
            n_words = await self._fit_words()
            words = random_prompts(n_words, self.options.seed)
            self._prompts = (as_body(text, self.options.kind) for text in words)
        bodies = [self._next_body() for _ in range(self.options.n_warm_up)]
        self._check(*await asyncio.gather(*map(self._endpoint.ask, bodies)))

    async def _fit_words(self) -> int:
        """The words of a prompt that has, by the server's usage, the wanted tokens, template and all."""
        wanted = self.options.n_prompt
        tried: dict[int, int] = {}  # tokens by words
        n_words = wanted
        while len(tried) < _MAX_FITTINGS and n_words not in tried:
            text = next(random_prompts(n_words, self.options.seed + 1 + len(tried)))
            answer = await self._endpoint.ask(self._encoded(as_body(text, self.options.kind), max_tokens=1))
            self._check(answer)
            if answer.n_prompt is None:
                self.prompt_text = f"{wanted} random words; the server does not count tokens"
                return wanted
            tried[n_words] = answer.n_prompt
            n_words = max(1, _words_for(wanted, tried))
        best = min(tried, key=lambda n: abs(tried[n] - wanted))
        if tried[best] > wanted and best == 1:
            raise ConfigError(
                f"a prompt must have at least {tried[best]} tokens here, one word: ask for more, or use "
                "--endpoint completions"
            )
        self.prompt_text = f"{best} random words, {tried[best]} tokens"
        return best

    def _check(self, *answers: Answer) -> None:
        for answer in answers:
            if answer.error is not None:
                raise KukriError(self._endpoint.refusal(answer.error, answer.detail))

    async def measure(self, load: float) -> LoadPoint:
        """One load, until its last answer."""
        self._answers, self._late_s = [], []
        self._n_in_flight = self._max_in_flight = 0
        is_open = self.options.loop == "open"
        name = f"{load:g} requests/s" if is_open else f"{load:g} at a time"
        self._on_progress(0, name)
        begun_s, begun_cpu_s = perf_counter(), process_time()
        async with self._ticking(name):
            await (self._open(load) if is_open else self._closed(int(load), name))
        return load_point(
            load,
            perf_counter() - begun_s,
            self._answers,
            self.options.objective,
            max_in_flight=self._max_in_flight,
            late_s=self._late_s,
            client_cpu_s=process_time() - begun_cpu_s,
        )

    async def _open(self, rate: float) -> None:
        """Requests at the moments of a Poisson process."""
        begun_s, at_s, n_sent = perf_counter(), 0.0, 0
        async with asyncio.TaskGroup() as group:
            while n_sent < (self.options.n_requests or inf):
                at_s += float(self._arrivals.exponential(1 / rate))
                if at_s > (self.options.duration_s or inf):
                    break
                body = self._next_body()
                await asyncio.sleep(begun_s + at_s - perf_counter())
                group.create_task(self._ask(body, f"{rate:g} requests/s", due_s=begun_s + at_s))
                n_sent += 1

    async def _closed(self, n_clients: int, name: str) -> None:
        """Clients that ask again and again."""
        until_s = perf_counter() + (self.options.duration_s or inf)
        n_left = self.options.n_requests or inf

        async def client() -> None:
            nonlocal n_left
            while n_left > 0 and perf_counter() < until_s:
                n_left -= 1
                await self._ask(self._next_body(), name)

        await asyncio.gather(*(client() for _ in range(n_clients)))

    async def _ask(self, body: bytes, name: str, due_s: float | None = None) -> None:
        self._n_in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._n_in_flight)
        try:
            answer = await self._endpoint.ask(body)
        finally:
            self._n_in_flight -= 1
        self._answers.append(answer)
        if due_s is not None:
            self._late_s.append(answer.sent_s - due_s)
        if self.options.n_requests is not None:
            self._on_progress(1, name)

    @asynccontextmanager
    async def _ticking(self, name: str) -> AsyncIterator[None]:
        """Reports each second if the number of requests is not known."""

        async def tick() -> None:
            for _ in range(ceil(self.options.duration_s or 0)):
                await asyncio.sleep(1)
                self._on_progress(1, name)

        ticker = asyncio.create_task(tick()) if self.options.n_requests is None else None
        try:
            yield
        finally:
            if ticker is not None:
                ticker.cancel()

    def _next_body(self) -> bytes:
        return self._encoded(next(self._prompts))

    def _encoded(self, prompt: dict[str, Any], **limits: int) -> bytes:
        """A request in JSON; fields of `extra_body` override all others."""
        options = self.options
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": options.max_tokens,
            "ignore_eos": True if options.ignore_eos else None,
            **prompt,
            **limits,
            **options.extra_body,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def _words_for(wanted: int, tried: Mapping[int, int]) -> int:
    """The words that should have the wanted tokens, by a line through the last two that were tried."""
    *_, (before, n_before), (last, n_last) = (0, 0), *tried.items()
    if not before or n_last == n_before:
        return last + wanted - n_last
    return last + round((wanted - n_last) * (last - before) / (n_last - n_before))
