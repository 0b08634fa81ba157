"""Processor time of the server for each streamed token: `python -m benchmarks.streams`.

As many clients as `--streams` read chat completions of `kukri serve` as they come. Counted is the processor
time of the event loop's thread, which does all of HTTP, JSON and text, while all of them stream: waiting for
a core of a busy machine is not in it. Its share is that of a step which gives each stream a token: the
fastest measured here, or --step-ms, for a time that was measured on a quiet machine.
Linux alone counts a thread's time (/proc/PID/task/TID/schedstat).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import Experiment, Say, Table, model_path, run, served, silent
from benchmarks.turns import in_turns
from kukri.bench.offline import Kukri
from kukri.errors import KukriError

_PROMPT, _CONTEXT = "Write a long story about a lighthouse.", 1024


@dataclass(frozen=True)
class StreamsReport:
    """The report of `python -m benchmarks.streams`; a median of the rounds."""

    model: str
    n_streams: int
    n_generate: int
    token_us: tuple[float, ...]  # processor time of the event loop's thread for a token, each round
    median_us: float
    step_ms: float  # a step that gives each stream a token
    share: float  # what the server takes of such a step


def measure(
    model: str | None,
    n_threads: int,
    *,
    n_streams: int,
    n_generate: int,
    rounds: int,
    step_ms: float | None = None,
    say: Say = silent,
) -> StreamsReport:
    """Serves all streams `rounds` times. Raises KukriError if the server does not start."""
    path = model_path(model, _CONTEXT)
    options = ["--threads", str(n_threads), "--max-requests", str(n_streams), "--speculation", "off"]
    options += ["--max-context", str(_CONTEXT)]
    with served(path, *options) as (process, url):
        place = place_of(url)

        def one_round() -> float:
            return asyncio.run(_token_us(process.pid, place, n_streams, n_generate))

        token_us = tuple(found for (found,) in in_turns([one_round], rounds, say))
    if step_ms is None:
        say("a step")
        kukri = Kukri(path, n_threads, _CONTEXT, max_requests=n_streams)
        step_ms = min(kukri.batch_decode_s(n_streams, 32, 33) / 32 for _ in range(rounds)) * 1e3
        kukri.close()
    share = n_streams * median(token_us) / 1e3 / step_ms
    return StreamsReport(str(path), n_streams, n_generate, token_us, median(token_us), step_ms, share)


async def _token_us(pid: int, place: tuple[str, int], n_streams: int, n_tokens: int) -> float:
    """Microseconds of the event loop's thread for a token, from all streams' beginning to the first's end."""
    streams = [_Stream() for _ in range(n_streams)]
    reading = [asyncio.create_task(stream.read(place, n_tokens)) for stream in streams]
    while not all(stream.n_events for stream in streams):
        ended, _ = await asyncio.wait(reading, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # raises the error of a stream that was refused
    n_before, before = sum(stream.n_events for stream in streams), _thread_ns(pid)
    await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    n_after, after = sum(stream.n_events for stream in streams), _thread_ns(pid)
    await asyncio.gather(*reading)
    return (after - before) / 1e3 / (n_after - n_before)


class _Stream:
    """A client that counts tokens and looks at nothing else."""

    def __init__(self) -> None:
        self.n_events = 0

    async def read(self, place: tuple[str, int], n_tokens: int) -> None:
        """Reads an answer to its end. Raises KukriError if it has no token."""
        body = {
            "messages": [{"role": "user", "content": _PROMPT}],
            "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        data = b""
        async for data in answer_bytes(place, "/v1/chat/completions", body):
            self.n_events += data.count(b'"delta":{"content"')
        if not self.n_events:
            raise KukriError(f"the server streams nothing: {data.decode(errors='replace')}")


def place_of(url: str) -> tuple[str, int]:
    """Host and port of a server's URL."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


async def answer_bytes(place: tuple[str, int], path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The bytes of a server's answer as they come, headers too, by a client that does nothing else.

    An HTTP library takes as long for a chunk as the server, on the same cores.
    """
    reader, writer = await asyncio.open_connection(*place)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        writer.write(head.encode() + content)
        while data := await reader.read(1 << 16):
            yield data
    finally:
        writer.close()


def _thread_ns(pid: int) -> int:
    """Nanoseconds that a process's first thread, which has the event loop, has run."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8").split()[0])


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("streams", "Measure the server's processor time for each streamed token.")
    experiment.count("-s", "--streams", 16, "streams side by side")
    experiment.count("-n", "--n-generate", 128, "tokens of each")
    experiment.count("-r", "--rounds", 5, "rounds")
    experiment.options.add_argument("--step-ms", type=float, help="time of a step (default: measured)")
    given = experiment.parse()
    report = measure(
        given.model,
        given.threads,
        n_streams=given.streams,
        n_generate=given.n_generate,
        rounds=given.rounds,
        step_ms=given.step_ms,
        say=experiment.say,
    )
    rows = [[str(i), f"{us:.1f}"] for i, us in enumerate(report.token_us, 1)]
    rows.append(["median", f"{report.median_us:.1f}"])
    title = f"{Path(report.model).name}, {report.n_streams} streams: us of the event loop a token"
    step = f"{report.share:.1%} of a step of {report.step_ms:.1f} ms"
    experiment.show(report, Table(title, ["round", "us"], rows), step)


if __name__ == "__main__":
    run(main)
