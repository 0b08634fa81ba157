"""Serving many requests from one engine: `python -m benchmarks.serving`.

- **batch**: streams of 128 tokens in and 64 out, all of them generating, against one stream and against
  llama.cpp decoding the same number of streams a step; in turns, each engine in a process of its own.
- **lateness**: the times between tokens of all streams but one, while prompts of 1,000 tokens keep arriving.
- **prefix**: the first token of a second request whose prompt begins with the same 1,000 tokens.
- **shared**: streams of 64 tokens after one prompt of 1,000 tokens, against as many after prompts of their
  own, in turns.
- **http**: one stream of 256 tokens from `kukri serve`, client included, against `LLM.generate`, in turns.

`python -m benchmarks.fairness` has a short chat next to a long prompt, and a server that is full.

Prompts are random ids and sampling is greedy; times include scheduling and sampling, not text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.harness import (
    ENGINES,
    Comparison,
    Experiment,
    Say,
    Table,
    Worker,
    installed_engines,
    model_path,
    run,
    served,
    silent,
)
from benchmarks.turns import SETTLE_S, in_turns
from kukri.bench.offline import Kukri
from kukri.engine import Engine, Request
from kukri.errors import KukriError
from kukri.kernels.arrays import IntArray
from kukri.sampling import SamplingParams

_PROMPT, _NEW = 128, 64  # tokens of each stream
_LONG_PROMPT = 1000
_STORY, _N_STREAMED = "Once upon a time", 256
_BUDGETS = (32, 64, 128, 256)  # prefill tokens of a step next to the streams
_N_LATE_TOKENS = 100  # how many tokens of each stream are measured for lateness


@dataclass(frozen=True)
class Lateness:
    """Times between tokens of streams next to which long prompts arrive, in milliseconds."""

    n_streams: int
    max_prompt_tokens: int
    median_ms: float
    p99_ms: float
    ratio: float
    prompts_per_s: float


@dataclass(frozen=True)
class ServingReport:
    """The report of `python -m benchmarks.serving`. `prefix` is in ms, all else in tokens/s."""

    model: str
    n_threads: int
    n_streams: int
    to_one: Comparison  # all streams against one
    to_llama_cpp: Comparison | None  # all streams; None without llama-cpp-python
    lateness: tuple[Lateness, ...]  # with prefill budgets of _BUDGETS, the engine's own among them
    prefix: Comparison  # first token of a known prefix against a new one
    shared: Comparison  # all streams after one long prompt against as many after prompts of their own
    http: Comparison | None  # one stream over HTTP against offline; None without the extra `serve`


def measure(
    model: str | None, n_threads: int, n_streams: int, rounds: int, say: Say = silent
) -> ServingReport:
    """Measures all four; the comparison with llama.cpp only if it is installed."""
    path = model_path(model, _LONG_PROMPT + 64)
    say("streams side by side")
    to_one, to_llama_cpp = _batch(path, n_threads, n_streams, rounds, say)
    kukri = Kukri(path, n_threads, _LONG_PROMPT + 4 * _N_LATE_TOKENS, max_requests=n_streams)
    say("times between tokens")
    lateness = tuple(_lateness(kukri.llm.engine, n_streams, budget) for budget in _BUDGETS)
    say("a shared prefix")
    prefix = _prefix(kukri.llm.engine, rounds)
    shared = _shared(kukri, n_streams, rounds)
    say("one stream over HTTP")
    http = _http(kukri, path, n_threads, rounds) if find_spec("uvicorn") else None
    kukri.close()
    return ServingReport(
        str(path), n_threads, n_streams, to_one, to_llama_cpp, lateness, prefix, shared, http
    )


def _batch(
    path: Path, n_threads: int, n_streams: int, rounds: int, say: Say
) -> tuple[Comparison, Comparison | None]:
    """Tokens/s of all streams against one stream's, and against llama.cpp's of as many streams."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(engine, path, n_threads, _PROMPT + _NEW + 1, n_streams))
            for engine in installed_engines()
        ]
        for worker in workers:
            worker.ready()
        tests = [(workers[0], n_streams), (workers[0], 1), *((peer, n_streams) for peer in workers[1:])]
        measures = [partial(worker.batch_decode_tokens_per_s, n, _PROMPT, _NEW) for worker, n in tests]
        found = in_turns(measures, rounds, say)
    to_one = Comparison.of((f"{n_streams} streams", "one stream"), [(all_, one) for all_, one, *_ in found])
    if len(workers) == 1:
        return to_one, None
    return to_one, Comparison.of(ENGINES, [(ours, theirs) for ours, _, theirs in found])


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


def _prefix(engine: Engine, rounds: int) -> Comparison:
    random, n_vocab = np.random.default_rng(2), engine.model.config.n_vocab

    def first_token_ms(prefix: IntArray) -> float:
        own = random.integers(0, n_vocab, 20, np.int32)
        request = engine.maker.make_request(np.concatenate([prefix, own]), _greedy(1))
        engine.add_request(request)
        while engine.has_work:
            engine.step()
        return 1e3 * request.timings.first_token_s

    def pair() -> tuple[float, float]:
        prefix = random.integers(0, n_vocab, _LONG_PROMPT, np.int32)
        new = first_token_ms(prefix)
        time.sleep(SETTLE_S)
        return first_token_ms(prefix), new

    return Comparison.of(("known", "new"), [found for (found,) in in_turns([pair], rounds, silent)])


def _shared(kukri: Kukri, n_streams: int, rounds: int) -> Comparison:
    random, n_vocab = np.random.default_rng(3), kukri.llm.config.n_vocab

    def tokens_per_s(n_prompts: int) -> float:
        long = random.integers(0, n_vocab, (n_prompts, _LONG_PROMPT), np.int32)
        own = random.integers(0, n_vocab, (n_streams, 20), np.int32)
        for prompt in long:  # they are in the cache then, so that all streams generate from the start
            kukri.prompts_decode_s(prompt[None], 2)
        prompts = np.hstack([np.resize(long, (n_streams, _LONG_PROMPT)), own])
        return n_streams * (_NEW - 1) / kukri.prompts_decode_s(prompts, _NEW)

    measures = [partial(tokens_per_s, n) for n in (1, n_streams)]
    return Comparison.of(("one prompt", "own prompts"), in_turns(measures, rounds, silent))


def _http(kukri: Kukri, path: Path, n_threads: int, rounds: int) -> Comparison:
    def offline() -> float:
        return kukri.llm.generate(_STORY, _greedy(_N_STREAMED)).timings.decode_tokens_per_s

    options = ["--threads", str(n_threads), "--alias", "model", "--max-context", "512"]
    with served(path, *options, "--log-level", "warning", "--speculation", "off") as (_, url):
        port = int(url.rpartition(":")[2])
        return Comparison.of(("http", "offline"), in_turns([lambda: _stream(port), offline], rounds, silent))


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
    return engine.maker.make_request(prompt, _greedy(n_new))


def _greedy(n_new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)


def _tables(report: ServingReport) -> Iterator[Table | str]:
    many = f"{report.n_streams} streams"
    rows = [
        [f"kukri, {many}", f"{report.to_one.median(many):.0f}", ""],
        [
            "kukri, one stream",
            f"{report.to_one.median('one stream'):.0f}",
            f"{report.to_one.median_ratio:.2f}",
        ],
    ]
    if report.to_llama_cpp is not None:
        peer = report.to_llama_cpp
        rows.append([f"llama.cpp, {many}", f"{peer.median(ENGINES[1]):.0f}", f"{peer.median_ratio:.2f}"])
    yield Table("generated tokens/s in all", ["", "tokens/s", f"{many} / this"], rows)
    rows = []
    for late in report.lateness:
        times = [f"{late.median_ms:.1f}", f"{late.p99_ms:.1f}", f"{late.ratio:.2f}"]
        rows.append([str(late.max_prompt_tokens), *times, f"{late.prompts_per_s:.2f}"])
    title = f"ms between tokens of {report.n_streams - 1} streams while prompts of {_LONG_PROMPT} arrive"
    yield Table(title, ["prefill tokens a step", "median", "p99", "ratio", "prompts/s"], rows)
    prefix, http = report.prefix, report.http
    yield (
        f"first token of a {_LONG_PROMPT}-token prompt: {prefix.median('new'):.0f} ms, with a known "
        f"prefix {prefix.median('known'):.0f} ms ({prefix.median_ratio:.1%})"
    )
    one, own = (report.shared.median(name) for name in ("one prompt", "own prompts"))
    yield (
        f"{many} that share one prompt of {_LONG_PROMPT} tokens: {one:.0f} tokens/s, with their own "
        f"{own:.0f} ({report.shared.median_ratio:.2f} times)"
    )
    if http is not None:
        yield (
            f"one stream: {http.median('offline'):.0f} tokens/s offline, "
            f"{http.median('http'):.0f} over HTTP ({1 - http.median_ratio:.1%} less)"
        )


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment(
        "serving", "Measure many streams on one engine: batch, lateness, shared prefixes."
    )
    experiment.count("-s", "--streams", 16, "streams side by side")
    experiment.count("-r", "--rounds", 5, "rounds of each")
    given = experiment.parse()
    if given.streams < 2:
        experiment.options.error("argument -s/--streams: at least 2, as they are compared with one")
    report = measure(given.model, given.threads, given.streams, given.rounds, experiment.say)
    experiment.show(report, *_tables(report))


if __name__ == "__main__":
    run(main)
