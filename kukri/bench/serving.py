"""What serving many requests from one engine gives: `python -m kukri.bench.serving`.

- **batch**: streams of 128 tokens in and 64 out, all of them generating, against one stream and against
  llama.cpp decoding as many streams a step; in turns, each engine in a process of its own.
- **lateness**: the times between tokens of all streams but one, while prompts of 1,000 tokens keep arriving.
- **prefix**: the first token of a second request whose prompt begins with the same 1,000 tokens.
- **http**: one stream of 256 tokens from `kukri serve`, client included, against `LLM.generate`, in turns.

Prompts are random ids and sampling is greedy; what is timed includes scheduling and sampling, not text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

from kukri.bench.command import model_path, parser, positive, print_table, run, say, served_url
from kukri.bench.llama_cpp import import_llama_cpp
from kukri.bench.offline import Kukri
from kukri.bench.peers import SETTLE_S
from kukri.bench.worker import ENGINES, Worker
from kukri.engine import Engine, Request
from kukri.errors import KukriError, UnsupportedError
from kukri.kernels.cpu.features import usable_cores
from kukri.sampling import SamplingParams

_PROMPT, _NEW = 128, 64  # tokens of each stream
_LONG_PROMPT = 1000
_STORY, _N_STREAMED = "Once upon a time", 256
_BUDGETS = (32, 64, 128, 256)  # tokens of prompts in a step beside the streams
_N_LATE_TOKENS = 100  # of each stream whose lateness is measured


@dataclass(frozen=True)
class Batch:
    """Tokens per second of all streams, round by round, and medians of the ratios of each round."""

    n_streams: int
    kukri: tuple[float, ...]
    kukri_one: tuple[float, ...]
    llama_cpp: tuple[float, ...]  # empty without llama-cpp-python
    to_one: float
    to_llama_cpp: float | None


@dataclass(frozen=True)
class Lateness:
    """Times between tokens of streams beside which long prompts arrive, in milliseconds."""

    n_streams: int
    max_prompt_tokens: int
    median_ms: float
    p99_ms: float
    ratio: float
    prompts_per_s: float


@dataclass(frozen=True)
class Prefix:
    """Times to the first token, in milliseconds, round by round."""

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]
    median_ratio: float


@dataclass(frozen=True)
class Http:
    """Tokens per second of one stream, round by round, and the median of 1 - http / offline."""

    offline: tuple[float, ...]
    http: tuple[float, ...]
    overhead: float


@dataclass(frozen=True)
class ServingReport:
    """What `python -m kukri.bench.serving` found."""

    model: str
    n_threads: int
    batch: Batch
    lateness: tuple[Lateness, ...]  # with prompt budgets of _BUDGETS, the engine's own among them
    prefix: Prefix
    http: Http | None  # None where the `serve` extra is not installed


def measure(
    model: str | None, n_threads: int, n_streams: int, rounds: int, *, silent: bool = False
) -> ServingReport:
    """Measures all three; the comparison with llama.cpp only where it is installed."""
    path = model_path(model, _LONG_PROMPT + 64)
    say("streams side by side", silent=silent)
    batch = _batch(path, n_threads, n_streams, rounds)
    kukri = Kukri(path, n_threads, _LONG_PROMPT + 4 * _N_LATE_TOKENS, max_requests=n_streams)
    say("times between tokens", silent=silent)
    lateness = tuple(_lateness(kukri.llm.engine, n_streams, budget) for budget in _BUDGETS)
    say("a shared prefix", silent=silent)
    prefix = _prefix(kukri.llm.engine, rounds)
    say("one stream over HTTP", silent=silent)
    http = _http(kukri, path, n_threads, rounds) if find_spec("uvicorn") else None
    kukri.close()
    return ServingReport(str(path), n_threads, batch, lateness, prefix, http)


def _batch(path: Path, n_threads: int, n_streams: int, rounds: int) -> Batch:
    speeds: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(engine, path, n_threads, _PROMPT + _NEW + 1, n_streams))
            for engine in _installed()
        ]
        for worker in workers:
            worker.ready()
        tests = [(worker, n) for worker in workers for n in (n_streams, 1)]
        for _ in range(rounds + 1):
            for worker, n in tests:
                time.sleep(SETTLE_S)
                speed = worker.batch_decode_tokens_per_s(n, _PROMPT, _NEW)
                speeds.setdefault((worker.engine, n), []).append(speed)
    ours, one = (tuple(speeds["kukri", n][1:]) for n in (n_streams, 1))
    theirs = tuple(speeds.get(("llama-cpp-python", n_streams), [])[1:])
    return Batch(
        n_streams,
        ours,
        one,
        theirs,
        to_one=median(a / b for a, b in zip(ours, one, strict=True)),
        to_llama_cpp=median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None,
    )


def _installed() -> tuple[str, ...]:
    try:
        import_llama_cpp()
    except UnsupportedError:
        return ENGINES[:1]
    return ENGINES


def _lateness(engine: Engine, n_streams: int, max_prompt_tokens: int) -> Lateness:
    """All streams but one generate; in its place a prompt arrives when the last one has its token."""
    engine.scheduler.max_prompt_tokens = max_prompt_tokens
    random = np.random.default_rng(1)
    streams = [_request(engine, random, _PROMPT, 3 * _N_LATE_TOKENS) for _ in range(n_streams - 1)]
    for stream in streams:
        engine.add_request(stream)
    while not all(stream.n_generated for stream in streams):
        engine.step()
    n_prompts = 0
    last_s = [time.perf_counter()] * len(streams)
    late: list[float] = []
    started = time.perf_counter()
    n_before = [stream.n_generated for stream in streams]
    while streams[0].n_generated - n_before[0] < _N_LATE_TOKENS:
        if len(engine.scheduler.running) < n_streams:
            engine.add_request(_request(engine, random, _LONG_PROMPT, 1))
            n_prompts += 1
        given = {output.request.id for output in engine.step() if output.token is not None}
        now = time.perf_counter()
        for i, stream in enumerate(streams):
            if stream.id in given:
                late.append(1e3 * (now - last_s[i]))
                last_s[i] = now
    spent_s = time.perf_counter() - started
    for request in list(engine.scheduler.running):
        engine.abort(request)
    p50, p99 = (float(x) for x in np.percentile(late, (50, 99)))
    return Lateness(len(streams), max_prompt_tokens, p50, p99, p99 / p50, max(n_prompts - 1, 0) / spent_s)


def _prefix(engine: Engine, rounds: int) -> Prefix:
    random = np.random.default_rng(2)
    firsts: list[float] = []
    seconds: list[float] = []
    for _ in range(rounds + 1):
        system = random.integers(0, engine.model.config.n_vocab, _LONG_PROMPT)
        for times in (firsts, seconds):
            own = random.integers(0, engine.model.config.n_vocab, 20)
            time.sleep(SETTLE_S)
            request = engine.make_request(np.concatenate([system, own]), _greedy(1))
            engine.add_request(request)
            while engine.has_work:
                engine.step()
            times.append(1e3 * request.timings.first_token_s)
    ratio = median(b / a for a, b in zip(firsts[1:], seconds[1:], strict=True))
    return Prefix(tuple(firsts[1:]), tuple(seconds[1:]), ratio)


def _http(kukri: Kukri, path: Path, n_threads: int, rounds: int) -> Http:
    options = ["--port", "0", "--alias", "model", "--max-context", "512", "--log-level", "warning"]
    options += ["--speculation", "off"]
    command = [sys.executable, "-m", "kukri", "serve", str(path), "--threads", str(n_threads), *options]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        port = int(served_url(server.stderr).rpartition(":")[2])
        offline, http = [], []
        for _ in range(rounds + 1):
            time.sleep(SETTLE_S)
            done = kukri.llm.generate(_STORY, _greedy(_N_STREAMED))
            offline.append(done.timings.decode_tokens_per_s)
            time.sleep(SETTLE_S)
            http.append(_stream(port))
    finally:
        server.terminate()
        server.wait()
    overhead = median(1 - b / a for a, b in zip(offline[1:], http[1:], strict=True))
    return Http(tuple(offline[1:]), tuple(http[1:]), overhead)


def _stream(port: int) -> float:
    """Tokens a second, from the first piece of the answer to the last, as a client sees them."""
    body = {"model": "model", "prompt": _STORY, "max_tokens": _N_STREAMED, "temperature": 0}
    client = HTTPConnection("127.0.0.1", port)
    client.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "ignore_eos": True, "stream": True}),
        {"Content-Type": "application/json"},
    )
    response = client.getresponse()
    first_s = last_s = 0.0
    n_pieces = 0
    while line := response.readline():
        if line.startswith(b"data: {"):
            last_s = time.perf_counter()
            first_s = first_s or last_s
            n_pieces += 1
    client.close()
    if n_pieces < _N_STREAMED // 2:
        raise KukriError(f"the server answered with status {response.status} and {n_pieces} pieces")
    return (_N_STREAMED - 1) / (last_s - first_s)


def _request(engine: Engine, random: np.random.Generator, n_prompt: int, n_new: int) -> Request:
    prompt = random.integers(0, engine.model.config.n_vocab, n_prompt)
    return engine.make_request(prompt, _greedy(n_new))


def _greedy(n_new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)


def _print(report: ServingReport) -> None:
    batch, prefix = report.batch, report.prefix
    rows = [
        [f"kukri, {batch.n_streams} streams", f"{median(batch.kukri):.0f}", ""],
        ["kukri, one stream", f"{median(batch.kukri_one):.0f}", f"{batch.to_one:.2f}"],
    ]
    if batch.to_llama_cpp is not None:
        name = f"llama.cpp, {batch.n_streams} streams"
        rows.append([name, f"{median(batch.llama_cpp):.0f}", f"{batch.to_llama_cpp:.2f}"])
    if report.http is not None:
        print(
            f"one stream: {median(report.http.offline):.0f} tokens/s offline, "
            f"{median(report.http.http):.0f} over HTTP ({report.http.overhead:.1%} less)\n"
        )
    print_table("generated tokens/s in all", ["", "tokens/s", f"{batch.n_streams} streams / this"], rows)
    print()
    rows = []
    for late in report.lateness:
        times = [f"{late.median_ms:.1f}", f"{late.p99_ms:.1f}", f"{late.ratio:.2f}"]
        rows.append([str(late.max_prompt_tokens), *times, f"{late.prompts_per_s:.2f}"])
    title = f"ms between tokens of {batch.n_streams - 1} streams while prompts of {_LONG_PROMPT} arrive"
    print_table(title, ["prompt tokens a step", "median", "p99", "ratio", "prompts/s"], rows)
    print()
    print(
        f"first token of a {_LONG_PROMPT}-token prompt: {median(prefix.first_ms):.0f} ms, with a known "
        f"prefix {median(prefix.second_ms):.0f} ms ({prefix.median_ratio:.1%})\n"
    )


def main() -> None:
    """The program."""
    options = parser("serving", "many streams from one engine: batch, lateness, shared prefixes")
    options.add_argument("-s", "--streams", type=positive, default=16, help="streams side by side (16)")
    options.add_argument("-r", "--rounds", type=positive, default=5, help="rounds of each (5)")
    given = options.parse_args()
    if given.streams < 2:
        options.error("argument -s/--streams: at least 2, for one is compared with them")
    threads = given.threads or usable_cores()
    report = measure(given.model, threads, given.streams, given.rounds, silent=given.json)
    if not given.json:
        _print(report)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
