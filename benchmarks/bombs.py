"""Requests made to be expensive, beside streams: `python -m benchmarks.bombs`.

Streams run for a while alone, and for a while beside a client that sends one bomb after another: schemas
that take a minute to compile, a prompt of a megabyte, two megabytes of wrong items, and as many biases, stop
strings and breakers as may be. Reported are the times between tokens of both phases, and the longest time
until a bomb was answered; then those of ten bombs sent at once.
"""

from __future__ import annotations

import asyncio
import json
import string
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import httpx

from benchmarks.harness import Experiment, Table, model_path, run, served
from benchmarks.streams import answer_bytes, place_of
from kukri.errors import KukriError

SCHEMAS: dict[str, Any] = {
    "20 patterns": {
        "allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in string.ascii_lowercase[:20]]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]},
    "4,200 properties": {
        "type": "object",
        "properties": {f"property_{i}": {"type": "integer"} for i in range(4200)},
    },
}
_MODEL = "bombed"
_TEXTS: dict[str, dict[str, Any]] = {
    "a prompt of a megabyte": {"prompt": "1" * (1 << 20)},
    "wrong prompts": {"prompt": [1.5] * 400_000},
    "many prompts": {"prompt": ["a"] * 300_000},
    "wrong biases": {"prompt": "a", "logit_bias": {str(i): "a" for i in range(100_000)}},
    "biases": {"prompt": "a", "logit_bias": {str(i): 1 for i in range(32_768)}},
    "stop strings": {"prompt": "a", "stop": [f"{i}" * 300 for i in range(64)]},
    "breakers": {
        "prompt": "a b " * 1500,
        "dry_multiplier": 1,
        "dry_base": 1.00001,
        "dry_sequence_breakers": [f"{i}x" * 100 for i in range(10, 50)],
    },
}
_AT_ONCE = 10
_OPTIONS = ("--alias", _MODEL, "--max-context", "4096", "--log-level", "error")


@dataclass(frozen=True)
class BombReport:
    """The report. Milliseconds between tokens of all streams, and until bombs were refused."""

    n_streams: int
    quiet_median_ms: float
    quiet_p99_ms: float
    bombed_median_ms: float
    bombed_p99_ms: float
    n_bombs: int
    statuses: dict[str, int]
    longest_refusal_ms: float
    at_once: dict[str, int]
    longest_at_once_ms: float


class _Streams:
    """Streams that go on until they are stopped; `gaps_ms` is refilled by whoever measures."""

    def __init__(self, place: tuple[str, int], n: int) -> None:
        self._place = place
        self.gaps_ms: list[float] = []
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(n)]

    async def _run(self, i: int) -> None:
        body = {"model": _MODEL, "prompt": f"Story {i}:", "max_tokens": 4000, "temperature": 1.0}
        body |= {"ignore_eos": True, "stream": True}
        while True:
            last = None
            async for data in answer_bytes(self._place, "/v1/completions", body):
                if b"data: {" in data:
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps_ms.append((now - last) * 1000)
                    last = now

    async def gaps(self, seconds: float) -> tuple[float, float]:
        """(median, p99) of the milliseconds between tokens within the time to come."""
        self.gaps_ms.clear()
        await asyncio.sleep(seconds)
        for task in self._tasks:
            if task.done():
                raise KukriError(f"a stream ended: {task.exception()}")
        if len(self.gaps_ms) < 100:
            raise KukriError("the streams gave too few tokens to measure")
        return median(self.gaps_ms), quantiles(self.gaps_ms, n=100)[-1]

    def stop(self) -> None:
        """Ends them."""
        for task in self._tasks:
            task.cancel()


def bombs() -> list[tuple[str, bytes]]:
    """(path, body as JSON) of each."""
    chats = [("/v1/chat/completions", chat_of(schema)) for schema in SCHEMAS.values()]
    chats.append(("/v1/chat/completions", {"model": _MODEL, "messages": [0] * 500_000}))
    texts = [("/v1/completions", {"model": _MODEL, "max_tokens": 1, **text}) for text in _TEXTS.values()]
    return [(path, json.dumps(body).encode()) for path, body in (*chats, *texts)]


def chat_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat whose answer is to follow a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": _MODEL, "messages": messages, "max_tokens": 5, "response_format": form}


async def measure(url: str, n_streams: int, seconds: float) -> BombReport:
    """Runs both phases. Raises KukriError if a stream ends."""
    statuses: dict[str, int] = {}
    refusals: list[float] = []
    made = bombs()

    async def throw(http: httpx.AsyncClient) -> None:
        while True:
            for path, body in made:
                started = time.perf_counter()
                response = await http.post(path, content=body, headers={"content-type": "application/json"})
                refusals.append((time.perf_counter() - started) * 1000)
                statuses[str(response.status_code)] = statuses.get(str(response.status_code), 0) + 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        streams = _Streams(place_of(url), n_streams)
        try:
            await asyncio.sleep(3)
            quiet = await streams.gaps(seconds)
            thrower = asyncio.create_task(throw(http))
            await asyncio.sleep(1)
            bombed = await streams.gaps(seconds)
            thrower.cancel()
            together = await asyncio.gather(*(throw_one(http, i) for i in range(_AT_ONCE)))
        finally:
            streams.stop()
    at_once = Counter(str(status) for status, _ in together)
    longest_ms = max(ms for _, ms in together)
    return BombReport(
        n_streams, *quiet, *bombed, len(refusals), statuses, max(refusals), dict(at_once), longest_ms
    )


async def throw_one(http: httpx.AsyncClient, number: int) -> tuple[int, float]:
    """(status, milliseconds) of a bomb that no other is like."""
    body = chat_of({**SCHEMAS["20 patterns"], "title": str(number)})
    started = time.perf_counter()
    response = await http.post("/v1/chat/completions", json=body)
    return response.status_code, (time.perf_counter() - started) * 1000


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("bombs", "Measure streams beside requests that are made to be expensive.")
    experiment.count("-n", "--streams", 8, "streams")
    experiment.count("-s", "--seconds", 15, "seconds of each phase")
    given = experiment.parse()
    with served(model_path(given.model, 4096), *_OPTIONS, "--threads", str(given.threads)) as (_, url):
        report = asyncio.run(measure(url, given.streams, given.seconds))
    rows = [
        ["alone", f"{report.quiet_median_ms:.1f}", f"{report.quiet_p99_ms:.1f}"],
        ["beside bombs", f"{report.bombed_median_ms:.1f}", f"{report.bombed_p99_ms:.1f}"],
    ]
    title = f"{report.n_streams} streams, milliseconds between tokens"
    refused = f"{report.n_bombs} bombs, answered within {report.longest_refusal_ms:.0f} ms: {report.statuses}"
    refused += f"; {_AT_ONCE} at once within {report.longest_at_once_ms:.0f} ms: {report.at_once}"
    experiment.show(report, Table(title, ["", "median", "p99"], rows), refused)


if __name__ == "__main__":
    run(main)
