"""A server under random load: `python -m benchmarks.soak --minutes 10`.

Clients request answers that are known beforehand, leave in the middle, send broken and oversized requests,
and request more than the KV cache and the queue hold. Lost, extra or crossed tokens show as a text that
differs. At the end nothing may be left in the server, its memory may not have grown, and SIGTERM has to let
the running answers finish.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Experiment, Table, model_path, positive, run, served
from kukri.errors import KukriError, UnsupportedError
from kukri.llm import LLM

if TYPE_CHECKING:
    import httpx

MAX_CONTEXT = 512  # tokens
_OPTIONS = (
    "--alias", "soak", "--max-context", str(MAX_CONTEXT), "--max-requests", "8",
    "--max-waiting", "12", "--kv-memory", "16MiB", "--max-body", "64KiB", "--log-level", "warning",
)  # fmt: skip
_PROMPTS = (
    *(f"{n}, {n + 1}, {n + 2}," for n in range(1, 13)),
    "Once upon a time",
    "The capital of France is",
    "A long list of colors: red, green, blue, " * 12,  # a prefix that requests share
    "A long list of colors: red, green, blue, " * 12 + "and then",
    "Write about the sea. " * 40,
)
_ANSWER_TOKENS = 160
_LENGTHS = (1, 8, 32, _ANSWER_TOKENS)
_BROKEN = (
    b"",
    b"{",
    b"[]",
    b'{"model":"soak"}',
    b'{"model":"soak","prompt":"a","temperature":-9}',
    b"\xff" * 100,
)
_START_S, _IDLE_S, _CALL_S = 90.0, 20.0, 120.0
_LEAST_WARM_UP_S = 5.0


@dataclass
class SoakReport:
    """The report of `python -m benchmarks.soak`; `failures` is empty if all is well."""

    model: str
    seconds: float
    n_clients: int
    actions: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    n_preemptions: int = 0
    n_prefix_hit: int = 0
    warm_rss_bytes: int = 0  # the most while warming up
    peak_rss_bytes: int = 0  # the most after that
    failures: list[str] = field(default_factory=list)

    @property
    def rss_growth(self) -> float:
        """The share by which memory grew after the warm-up; below 0 if it did not."""
        return self.peak_rss_bytes / self.warm_rss_bytes - 1 if self.warm_rss_bytes else 0.0


class Server:
    """A running `kukri serve` process. Attributes: process, url, log (its lines on stderr so far)."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.log: list[str] = []
        assert process.stderr is not None
        asyncio.get_running_loop().run_in_executor(None, self.log.extend, process.stderr)

    @property
    def rss_bytes(self) -> int:
        """Memory of the process now."""
        done = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, text=True
        )
        return int(done.stdout or 0) * 1024

    async def wait_ready(self, http: httpx.AsyncClient) -> None:
        """Waits until it answers. Raises KukriError if it ends instead."""
        import httpx

        deadline_s = time.monotonic() + _START_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        raise KukriError(f"the server did not start: {' '.join(self.log)}")


class Load:
    """Random clients of one server. `actions` and `statuses` count theirs."""

    def __init__(self, http: httpx.AsyncClient, answers: dict[str, str], report: SoakReport) -> None:
        self.http, self.answers = http, answers
        self.actions: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.failures = report.failures

    async def client(self, seed: int, until_s: float) -> None:
        """Does one random thing after another until a moment of the monotonic clock."""
        import httpx

        rng = random.Random(seed)
        actions = [
            (self.ask, 8), (self.stream, 8), (self.sample, 3), (self.leave, 4), (self.give_up, 2),
            (self.send_broken, 2), (self.send_oversized, 1), (self.look, 1),
        ]  # fmt: skip
        while time.monotonic() < until_s:
            (action,) = rng.choices([a for a, _ in actions], [weight for _, weight in actions])
            self.actions[action.__name__] += 1
            try:
                await action(rng)
            except httpx.TransportError as error:
                self.fail(f"{action.__name__}: {type(error).__name__} {error}")

    async def ask(self, rng: random.Random) -> None:
        """Requests a whole answer, which has to be the known one."""
        body = self._known(rng)
        response = await self._post(body)
        if response.status_code == 200:
            self._compare(body, response.json()["choices"][0]["text"], "an answer")

    async def stream(self, rng: random.Random) -> None:
        """Requests the same as a stream."""
        body = self._known(rng)
        async with self._stream(body) as (status, chunks):
            if status == 200:
                text = "".join([chunk["choices"][0]["text"] async for chunk in chunks])
                self._compare(body, text, "a stream")

    async def sample(self, rng: random.Random) -> None:
        """Requests several sampled answers with other parameters."""
        body = self._known(rng) | {"temperature": 1.3, "top_p": 0.9, "n": 2, "presence_penalty": 0.5}
        response = await self._post(body | {"max_tokens": 20})
        if response.status_code == 200 and len(response.json()["choices"]) != 2:
            self.fail("two answers asked for, another number came")

    async def leave(self, rng: random.Random) -> None:
        """Closes the connection within a stream."""
        n_chunks = rng.randrange(20)
        async with self._stream(self._known(rng)) as (status, chunks):
            if status == 200:
                async for _ in chunks:
                    n_chunks -= 1
                    if n_chunks < 0:
                        break

    async def give_up(self, rng: random.Random) -> None:
        """Closes the connection before anything has come."""
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await self._post(self._known(rng))
        except TimeoutError:
            pass

    async def send_broken(self, rng: random.Random) -> None:
        """Sends an invalid body: 400."""
        headers = {"content-type": "application/json"}
        response = await self.http.post("/v1/completions", content=rng.choice(_BROKEN), headers=headers)
        self._count(response.status_code)
        if response.status_code != 400:
            self.fail(f"a broken body got {response.status_code}")

    async def send_oversized(self, rng: random.Random) -> None:
        """Sends a prompt or a body that is too long: 400 or 413."""
        n, expected = rng.choice([(MAX_CONTEXT + 1, 400), (100_000, 413)])
        response = await self.http.post("/v1/completions", json={"model": "soak", "prompt": [5] * n})
        self._count(response.status_code)
        if response.status_code != expected:
            self.fail(f"a prompt of {n} tokens got {response.status_code}, not {expected}")

    async def look(self, rng: random.Random) -> None:
        """Requests metrics and health."""
        for path in ("/metrics", "/health"):
            response = await self.http.get(path)
            self._count(response.status_code)
            if response.status_code != 200:
                self.fail(f"{path} got {response.status_code}")

    def fail(self, what: str) -> None:
        """Notes a failure; many of one kind are one."""
        if what not in self.failures and len(self.failures) < 100:
            self.failures.append(what)

    def _known(self, rng: random.Random) -> dict[str, Any]:
        n = rng.choice(_LENGTHS)
        prompt = rng.choice(_PROMPTS)
        return {
            "model": "soak", "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True
        }  # fmt: skip

    def _compare(self, body: dict[str, Any], text: str, what: str) -> None:
        known = self.answers[f"{body['max_tokens']} {body['prompt']}"]
        if text != known:
            self.fail(f"{what} to {body['prompt'][:30]!r} is {text!r}, not {known!r}")

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        response = await self.http.post("/v1/completions", json=body)
        await self._took(response.status_code, response.headers.get("retry-after"))
        return response

    @asynccontextmanager
    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[tuple[int, AsyncIterator[Any]]]:
        async with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            await self._took(response.status_code, response.headers.get("retry-after"))
            yield response.status_code, _chunks(response)

    async def _took(self, status: int, retry_after: str | None) -> None:
        """Counts an answer; 503 with Retry-After is a pause, any other status than 200 a failure."""
        self._count(status)
        if status == 503 and retry_after is not None:
            await asyncio.sleep(random.random() * int(retry_after))
        elif status != 200:
            self.fail(f"a good request got {status}")

    def _count(self, status: int) -> None:
        self.statuses[str(status)] += 1
        if status >= 500 and status != 503:
            self.fail(f"status {status}")


async def _chunks(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def known_answers(path: Path, n_threads: int | None) -> dict[str, str]:
    """Answers of the model without a server, by number of tokens and prompt."""
    answers = {}
    with LLM(path, n_threads=n_threads, max_context=MAX_CONTEXT) as llm:
        results = llm.generate([*_PROMPTS], temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
        for prompt, result in zip(_PROMPTS, results, strict=True):
            for n in _LENGTHS:
                ids = result.token_ids[:n]
                answers[f"{n} {prompt}"] = llm.tokenizer.decode(ids, skip_special=True, continues=True)
    return answers


async def soak(path: Path, seconds: float, n_clients: int, seed: int, n_threads: int | None) -> SoakReport:
    """Loads a server for a while, ends it by SIGTERM in the middle of answers, and reports failures."""
    try:
        import httpx
    except ImportError:
        raise UnsupportedError("the soak needs httpx: install it with pip install httpx") from None
    report = SoakReport(str(path), seconds, n_clients)
    answers = known_answers(path, n_threads)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=n_clients)
    with served(path, *_OPTIONS, *([] if n_threads is None else ["--threads", str(n_threads)])) as started:
        server = Server(*started)
        async with httpx.AsyncClient(base_url=server.url, timeout=_CALL_S, limits=limits) as http:
            await server.wait_ready(http)
            load = Load(http, answers, report)
            started_s = time.monotonic()
            until_s = started_s + seconds
            clients = [load.client(seed * 1000 + i, until_s) for i in range(n_clients)]
            watcher = asyncio.create_task(
                _watch(server, report, started_s, max(seconds / 5, _LEAST_WARM_UP_S))
            )
            await asyncio.gather(*clients)
            watcher.cancel()
            await _check_idle(http, load, report)
            await _end_by_signal(server, load)
    report.actions, report.statuses = dict(load.actions), dict(load.statuses)
    first = next((i for i, line in enumerate(server.log) if "Traceback" in line), None)
    if first is not None:
        load.fail("the server's log has a traceback: " + "".join(server.log[first : first + 40]))
    return report


async def _watch(server: Server, report: SoakReport, started_s: float, warm_up_s: float) -> None:
    """Notes the most memory during the warm-up and after it."""
    while True:
        rss = await asyncio.to_thread(lambda: server.rss_bytes)
        if time.monotonic() - started_s < warm_up_s:
            report.warm_rss_bytes = max(report.warm_rss_bytes, rss)
        else:
            report.peak_rss_bytes = max(report.peak_rss_bytes, rss)
        await asyncio.sleep(1)


async def _check_idle(http: httpx.AsyncClient, load: Load, report: SoakReport) -> None:
    """Checks that nothing is held once every client has gone."""
    deadline_s = time.monotonic() + _IDLE_S
    left: dict[str, float] = {}
    while time.monotonic() < deadline_s:
        text = (await http.get("/metrics")).text
        counts = {
            name: float(value)
            for name, value in re.findall(r'^(kukri_\w+)\{model="soak"\} (\S+)$', text, re.MULTILINE)
        }
        held = ("kukri_running_requests", "kukri_waiting_requests", "kukri_kv_pages_held")
        left = {name: counts[name] for name in held if counts[name]}
        report.n_preemptions = int(counts["kukri_preemptions_total"])
        report.n_prefix_hit = int(counts["kukri_prefix_hit_tokens_total"])
        if not left:
            return
        await asyncio.sleep(0.1)
    load.fail(f"left when idle: {left}")


async def _end_by_signal(server: Server, load: Load) -> None:
    """Sends SIGTERM while answers run: they finish, new ones are refused, the status is 0."""
    import httpx

    bodies = [
        {"model": "soak", "prompt": p, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        for p in _PROMPTS[:4]
    ]
    begun = [asyncio.Event() for _ in bodies]

    async def one(body: dict[str, Any], its_beginning: asyncio.Event) -> None:
        text = ""
        try:
            async with load._stream(body) as (_, chunks):
                async for chunk in chunks:
                    its_beginning.set()
                    text += chunk["choices"][0]["text"]
        finally:
            its_beginning.set()  # a refused one too
        load._compare(body, text, "an answer across SIGTERM")

    running = [asyncio.create_task(one(*pair)) for pair in zip(bodies, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=5) as late:
            response = await late.post("/v1/completions", json=bodies[0])
        if response.status_code != 503:
            load.fail(f"a request after SIGTERM got {response.status_code}")
    except httpx.TransportError:
        pass
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, BaseException):
            load.fail(f"an answer across SIGTERM: {type(result).__name__} {result}")
    status = await asyncio.to_thread(server.process.wait, 60)
    if status != 0:
        load.fail(f"exit status {status} after SIGTERM")


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("soak", "Load a server at random for minutes, and check all that is left of it.")
    options = experiment.options
    options.add_argument("--minutes", type=float, default=10.0, help="duration (10)")
    options.add_argument("--clients", type=positive, default=24, help="clients at a time (24)")
    options.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(2)), help="of their actions (random)"
    )
    options.add_argument("--max-growth", type=float, default=0.05, help="of memory after warm-up (0.05)")
    given = experiment.parse()
    path = model_path(given.model, MAX_CONTEXT)
    experiment.say(f"{given.clients} clients for {given.minutes:g} minutes, seed {given.seed}")
    report = asyncio.run(soak(path, given.minutes * 60, given.clients, given.seed, given.threads))
    if report.rss_growth > given.max_growth:
        report.failures.append(f"memory grew by {report.rss_growth:.1%} after the warm-up")
    rows = [(name, str(n)) for counts in (report.actions, report.statuses) for name, n in counts.items()]
    experiment.show(
        report,
        Table("actions of clients, and statuses they got", ("", "times"), rows),
        f"memory {report.warm_rss_bytes / 2**20:.0f} MiB warm, "
        f"{report.peak_rss_bytes / 2**20:.0f} MiB at most ({report.rss_growth:+.1%})",
        f"{report.n_preemptions} preemptions, {report.n_prefix_hit} prompt tokens from the cache",
        *(f"failed: {failure}" for failure in report.failures),
    )
    if report.failures:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
