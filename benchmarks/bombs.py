"""Requests made to be expensive, next to streams: `python -m benchmarks.bombs`.

Streams run alone and next to a client that sends one bomb after another, alternating: schemas that take a
minute to compile, a prompt of a megabyte, two megabytes of wrong items, and as many biases, stop strings and
breakers as may be; or, with `--images DIR`, odd and hostile images for the model there. The client is a
process of its own, so that it delays no reader. Reported are the times between tokens of both phases, medians
of the rounds, and the longest time until a bomb was answered; then those of ten bombs sent at once.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import multiprocessing
import string
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import httpx

from benchmarks.harness import Experiment, Table, model_path, run, served
from benchmarks.pictures import HOSTILE, ODD
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
Bombs = list[tuple[str, bytes]]  # (path, body as JSON) of each
_AT_ONCE = 10
_ANSWER = 800  # tokens; the streams end one by one, so that the sum of their contexts stays the same
_OPTIONS = ("--alias", _MODEL, "--max-context", "4096", "--log-level", "error")


class Gaps(NamedTuple):
    """Milliseconds between tokens of all streams within one phase."""

    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class BombReport:
    """The report: of each round the phase alone and that next to bombs, and milliseconds until answers."""

    n_streams: int
    alone: list[Gaps]
    bombed: list[Gaps]
    p99_of_median: float  # next to bombs, the median of the rounds
    p99_of_alone: float  # the same of the median of the phase before
    n_bombs: int
    statuses: dict[str, int]
    longest_answer_ms: float
    at_once: dict[str, int]
    longest_at_once_ms: float


class Streams:
    """Streams that run until they are stopped; `gaps_ms` is refilled by whoever measures."""

    def __init__(self, place: tuple[str, int], n: int) -> None:
        self._place = place
        self.gaps_ms: list[float] = []
        self._tasks = [asyncio.create_task(self._run(i, _ANSWER * (i + 1) // n)) for i in range(n)]

    async def _run(self, i: int, max_tokens: int) -> None:
        body: dict[str, Any] = {"prompt": f"Story {i}:", "temperature": 1.0}
        body |= {"ignore_eos": True, "stream": True}
        while True:
            body["max_tokens"], max_tokens = max_tokens, _ANSWER
            last = None
            async for data in answer_bytes(self._place, "/v1/completions", body):
                if b"data: {" in data:
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps_ms.append((now - last) * 1000)
                    last = now

    async def gaps(self, seconds: float) -> Gaps:
        """The times between tokens within the seconds to come. Raises KukriError if a stream has ended."""
        self.gaps_ms.clear()
        await asyncio.sleep(seconds)
        for task in self._tasks:
            if task.done():
                raise KukriError(f"a stream ended: {task.exception()}")
        if len(self.gaps_ms) < 100:
            raise KukriError("the streams gave too few tokens to measure")
        return Gaps(median(self.gaps_ms), quantiles(self.gaps_ms, n=100)[-1])

    def stop(self) -> None:
        """Ends them."""
        for task in self._tasks:
            task.cancel()


def bombs() -> Bombs:
    """Those of texts."""
    chats = [("/v1/chat/completions", chat_of(schema)) for schema in SCHEMAS.values()]
    chats.append(("/v1/chat/completions", {"model": _MODEL, "messages": [0] * 500_000}))
    texts = [("/v1/completions", {"model": _MODEL, "max_tokens": 1, **text}) for text in _TEXTS.values()]
    return [(path, json.dumps(body).encode()) for path, body in (*chats, *texts)]


def image_bombs() -> Bombs:
    """Chats with an odd or hostile image, and of one with fifty."""

    def chat(*files: bytes) -> bytes:
        parts = [{"type": "image_url", "image_url": {"url": _data_url(file)}} for file in files]
        content = [*parts, {"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": _MODEL, "messages": messages, "max_tokens": 1}).encode()

    files = [(make(),) for make in (*HOSTILE.values(), *ODD.values())]
    return [("/v1/chat/completions", chat(*given)) for given in (*files, (ODD["1 x 1"](),) * 50)]


def _data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def chat_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat whose answer is to follow a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": _MODEL, "messages": messages, "max_tokens": 5, "response_format": form}


async def measure(url: str, n_streams: int, seconds: float, rounds: int, made: Bombs) -> BombReport:
    """Runs both phases alternating. Raises KukriError if a stream ends."""
    alone: list[Gaps] = []
    bombed: list[Gaps] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        streams, thrower = Streams(place_of(url), n_streams), _Thrower(url, made)
        try:
            await asyncio.sleep(3)
            for _ in range(rounds):
                alone.append(await streams.gaps(seconds))
                with thrower:
                    await asyncio.sleep(1)
                    bombed.append(await streams.gaps(seconds))
                await asyncio.sleep(1)
            answers = thrower.end()
            together = await asyncio.gather(*(throw_one(http, i) for i in range(_AT_ONCE)))
        finally:
            streams.stop()
    return BombReport(
        n_streams,
        alone,
        bombed,
        median(one.p99_ms / one.median_ms for one in bombed),
        median(one.p99_ms / before.median_ms for one, before in zip(bombed, alone, strict=True)),
        len(answers),
        dict(Counter(str(status) for status, _ in answers)),
        max(ms for _, ms in answers),
        dict(Counter(str(status) for status, _ in together)),
        max(ms for _, ms in together),
    )


class _Thrower:
    """A process that sends one bomb after another within `with` blocks."""

    def __init__(self, url: str, made: Bombs) -> None:
        context = multiprocessing.get_context("spawn")
        self._may, self._is_over, self._ours = context.Event(), context.Event(), context.SimpleQueue()
        given = (place_of(url), made, self._may, self._is_over, self._ours)
        self._process = context.Process(target=_throw, args=given, daemon=True)
        self._process.start()

    def __enter__(self) -> None:
        self._may.set()

    def __exit__(self, *_: object) -> None:
        self._may.clear()

    def end(self) -> list[tuple[int, float]]:
        """(status, milliseconds) of all bombs."""
        self._is_over.set()
        self._may.set()
        return list(self._ours.get())


def _throw(place: tuple[str, int], made: Bombs, may: Any, is_over: Any, ours: Any) -> None:
    connection = http.client.HTTPConnection(*place, timeout=120)
    answers: list[tuple[int, float]] = []
    while True:
        for path, body in made:
            may.wait()
            if is_over.is_set():
                ours.put(answers)
                return
            started_s = time.perf_counter()
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            answers.append((response.status, (time.perf_counter() - started_s) * 1000))


async def throw_one(http: httpx.AsyncClient, number: int) -> tuple[int, float]:
    """(status, milliseconds) of a bomb that no other is like."""
    body = chat_of({**SCHEMAS["20 patterns"], "title": str(number)})
    started = time.perf_counter()
    response = await http.post("/v1/chat/completions", json=body)
    return response.status_code, (time.perf_counter() - started) * 1000


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("bombs", "Measure streams next to requests that are made to be expensive.")
    experiment.count("-n", "--streams", 8, "streams")
    experiment.count("-s", "--seconds", 5, "seconds of each phase")
    experiment.count("-r", "--rounds", 5, "rounds of both phases")
    experiment.options.add_argument("--images", type=Path, metavar="DIR", help="images, for this model")
    given = experiment.parse()
    path = given.images or model_path(given.model, 4096)
    with served(path, *_OPTIONS, "--threads", str(given.threads)) as (_, url):
        made = image_bombs() if given.images else bombs()
        report = asyncio.run(measure(url, given.streams, given.seconds, given.rounds, made))
    rows = [
        [
            name,
            f"{median(one.median_ms for one in phases):.1f}",
            f"{median(one.p99_ms for one in phases):.1f}",
        ]
        for name, phases in (("alone", report.alone), ("next to bombs", report.bombed))
    ]
    title = f"{report.n_streams} streams, milliseconds between tokens"
    ratios = f"their p99 is {report.p99_of_median:.2f} medians, {report.p99_of_alone:.2f} of those alone"
    refused = f"{report.n_bombs} bombs, answered within {report.longest_answer_ms:.0f} ms: {report.statuses}"
    refused += f"; {_AT_ONCE} at once within {report.longest_at_once_ms:.0f} ms: {report.at_once}"
    experiment.show(report, Table(title, ["", "median", "p99"], rows), ratios, refused)


if __name__ == "__main__":
    run(main)
