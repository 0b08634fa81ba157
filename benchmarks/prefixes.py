"""Saved prefixes: the first token of a known prompt after a restart. `python -m benchmarks.prefixes`.

Each round has new prompts and two processes. The first computes a prompt, saves it and ends; the second is
given that one and then another, which is unknown. Times are from the call to the first token.

With `--cost`, what saving costs: eight streams and a new prompt, with and without it, alternating.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Comparison, Experiment, Say, output_of, run, silent
from benchmarks.turns import in_turns
from kukri import LLM, SamplingParams
from kukri.formats import hub

_N_STREAMS, _N_TOKENS = 8, 64


@dataclass(frozen=True)
class PrefixReport:
    """The report: milliseconds to the first token, and the share of the unknown prompt's time."""

    model: str
    n_prompt: int
    first_token_ms: Comparison  # known, unknown


def measure(model: str | None, n_prompt: int, rounds: int, n_threads: int, say: Say = silent) -> PrefixReport:
    """Runs the rounds. Raises KukriError if a process fails."""
    path = str(hub.resolve(model))
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            _child(path, directory, n_prompt, n_threads, [2 * i])
            known, unknown = _child(path, directory, n_prompt, n_threads, [2 * i, 2 * i + 1])
            found.append((known, unknown))
    return PrefixReport(path, n_prompt, Comparison.of(("known, ms", "unknown, ms"), found))


def _child(path: str, directory: str, n_prompt: int, n_threads: int, seeds: list[int]) -> list[float]:
    """Milliseconds to the first token of the prompt of each seed, in a process of its own."""
    task = json.dumps([path, directory, n_prompt, n_threads, seeds])
    command = [sys.executable, "-m", "benchmarks.prefixes", "--child", task]
    times: list[float] = json.loads(output_of(command))
    return times


def _run_child(path: str, directory: str, n_prompt: int, n_threads: int, seeds: list[int]) -> None:
    with LLM(path, n_threads=n_threads, prefix_dir=directory, max_requests=2) as llm:
        llm.generate(_prompt(llm, 10**6 + seeds[0], 32), max_tokens=4)  # weights and kernels are loaded
        times = [_first_token_ms(llm, _prompt(llm, seed, n_prompt)) for seed in seeds]
    print(json.dumps(times))


@dataclass(frozen=True)
class CostReport:
    """The report of `--cost`: milliseconds, and the share of those without; bytes on the disk for a token."""

    model: str
    n_prompt: int
    first_token_ms: Comparison  # saving, not saving
    step_ms: Comparison  # of the streams and the prompt's answer
    bytes_per_token: float


def measure_cost(
    model: str | None, n_prompt: int, rounds: int, n_threads: int, say: Say = silent
) -> CostReport:
    """Runs the rounds in this process."""
    path = str(hub.resolve(model))
    options: dict[str, Any] = {"n_threads": n_threads, "max_requests": _N_STREAMS + 1}
    options |= {"max_context": n_prompt + 2 * _N_TOKENS, "speculation": "off"}
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(path, prefix_dir=directory, **options) as saving,
        LLM(path, **options) as plain,
    ):
        sides = [partial(_next_to_streams, llm, n_prompt, count()) for llm in (saving, plain)]
        pairs = in_turns(sides, rounds, say)
        page_tokens = saving.engine.runner.cache.page_tokens
        saving.close()  # all is on the disk
        sizes = [file.stat().st_size for file in Path(directory).iterdir()]
    names = "saving, ms", "not saving, ms"
    first, step = (Comparison.of(names, [(a[i], b[i]) for a, b in pairs]) for i in range(2))
    return CostReport(path, n_prompt, first, step, sum(sizes) / len(sizes) / page_tokens)


def _next_to_streams(llm: LLM, n_prompt: int, seeds: Iterator[int]) -> tuple[float, float]:
    """Milliseconds to the first token of a new prompt next to streams, and of the median step after it."""
    engine, seed = llm.engine, next(seeds)
    params = SamplingParams(temperature=0, max_tokens=n_prompt + _N_TOKENS, ignore_eos=True)
    streams = [engine.maker.make_request(_prompt(llm, 99 * seed + i, 8), params) for i in range(_N_STREAMS)]
    for stream in streams:
        engine.add_request(stream)
    while not all(stream.n_generated for stream in streams):
        engine.step()
    params = SamplingParams(temperature=0, max_tokens=_N_TOKENS, ignore_eos=True)
    asked = engine.maker.make_request(_prompt(llm, 10**6 + seed, n_prompt), params)
    engine.add_request(asked)
    started_s = time.perf_counter()
    while not asked.n_generated:
        engine.step()
    first_s, steps = time.perf_counter() - started_s, []
    while not asked.has_ended:
        started_s = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started_s)
    for stream in streams:
        engine.abort(stream)
    return 1000 * first_s, 1000 * median(steps)


def _prompt(llm: LLM, seed: int, n_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, llm.tokenizer.n_vocab) for _ in range(n_tokens)]


def _first_token_ms(llm: LLM, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    (result,) = llm.generate([prompt], max_tokens=1, temperature=0, ignore_eos=True)
    assert len(result.token_ids) == 1
    return (time.perf_counter() - started_s) * 1000


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("prefixes", "Measure the first token of a saved prompt after a restart.")
    experiment.count("-r", "--rounds", 5, "rounds")
    experiment.count("-p", "--n-prompt", 1000, "tokens of a prompt")
    experiment.options.add_argument("--cost", action="store_true", help="measure what saving costs")
    given = experiment.parse()
    if given.cost:
        cost = measure_cost(given.model, given.n_prompt, given.rounds, given.threads, experiment.say)
        tables = cost.first_token_ms.table("first token"), cost.step_ms.table("a step after it")
        experiment.show(cost, *tables, f"{cost.bytes_per_token / 1000:.1f} kB a token on the disk")
        return
    report = measure(given.model, given.n_prompt, given.rounds, given.threads, experiment.say)
    title = f"first token of {report.n_prompt} tokens, after a restart"
    experiment.show(report, report.first_token_ms.table(title), "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _run_child(*json.loads(sys.argv[2]))
    else:
        run(main)
