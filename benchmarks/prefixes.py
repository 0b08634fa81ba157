"""Saved prefixes: the first token of a known prompt after a restart. `python -m benchmarks.prefixes`.

Each round has new prompts and two processes. The first computes a prompt, saves it and ends; the second is
given that one and then another, which is unknown. Times are from the call to the first token.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.harness import Comparison, Experiment, Say, output_of, run, silent
from kukri.formats import hub
from kukri.llm import LLM


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
    given = experiment.parse()
    report = measure(given.model, given.n_prompt, given.rounds, given.threads, experiment.say)
    title = f"first token of {report.n_prompt} tokens, after a restart"
    experiment.show(report, report.first_token_ms.table(title), "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _run_child(*json.loads(sys.argv[2]))
    else:
        run(main)
