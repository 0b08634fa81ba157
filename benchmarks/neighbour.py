"""Decoding while another process keeps a core busy: `python -m benchmarks.neighbour`.

A second process does nothing but count. Speeds with and without it are measured in pairs, and their ratio
is the share of its speed that an engine keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import Comparison, Experiment, Say, Worker, installed_engines, model_path, run, silent
from kukri.bench.turns import in_turns

_START_S = 0.5  # until a new interpreter is counting
# ends with its parent, however that ends
_COUNT = (
    "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1_000_000):\n        pass"
)


@dataclass(frozen=True)
class NeighbourReport:
    """The report of `python -m benchmarks.neighbour`: by engine, tokens/s beside the process and alone."""

    model: str
    n_threads: int
    rounds: int
    n_generate: int
    engines: dict[str, Comparison]


def disturb(
    model: str | None, n_threads: int, rounds: int, n_generate: int, say: Say = silent
) -> NeighbourReport:
    """Measures kukri, and llama-cpp-python if it is installed."""
    path = model_path(model, n_generate + 1)
    with ExitStack() as stack:
        workers = []
        for engine in installed_engines():
            say(f"loading {engine}")
            workers.append(stack.enter_context(Worker(engine, path, n_threads, n_generate + 1)))
            workers[-1].ready()
        found = in_turns([partial(_pair, worker, n_generate) for worker in workers], rounds, say)
    engines = {
        worker.engine: Comparison.of(("busy", "quiet"), pairs)
        for worker, pairs in zip(workers, zip(*found, strict=True), strict=True)
    }
    return NeighbourReport(str(path), n_threads, rounds, n_generate, engines)


def _pair(worker: Worker, n_tokens: int) -> tuple[float, float]:
    """Tokens per second beside a busy process, and alone."""
    quiet = worker.decode_tokens_per_s(n_tokens)
    with _busy_process():
        busy = worker.decode_tokens_per_s(n_tokens)
    return busy, quiet


@contextmanager
def _busy_process() -> Iterator[None]:
    """A process that keeps one core busy within the `with` block."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _COUNT, str(os.getpid())])
    try:
        time.sleep(_START_S)
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("neighbour", "Compare decoding beside one busy process with decoding alone.")
    experiment.count("-r", "--rounds", 5, "pairs of measurements")
    experiment.count("-n", "--n-generate", 128, "tokens generated")
    given = experiment.parse()
    report = disturb(given.model, given.threads, given.rounds, given.n_generate, experiment.say)
    unit = f"tg{report.n_generate}, tokens/s, {report.n_threads} threads"
    experiment.show(report, *(found.table(f"{engine}, {unit}") for engine, found in report.engines.items()))


if __name__ == "__main__":
    run(main)
