"""Decoding and prefill while another process keeps a core busy: `python -m benchmarks.neighbour`.

A second process does nothing but count. Speeds with and without it are measured in pairs, and their ratio
is the share of its speed that an engine keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    """The report of `python -m benchmarks.neighbour`: by engine, tokens/s beside the process and alone.

    `engines` are the speeds of decoding, `prefill` those of a prompt.
    """

    model: str
    n_threads: int
    rounds: int
    n_generate: int
    n_prompt: int
    engines: dict[str, Comparison]
    prefill: dict[str, Comparison]


def disturb(
    model: str | None, n_threads: int, rounds: int, n_generate: int, n_prompt: int, say: Say = silent
) -> NeighbourReport:
    """Measures kukri, and llama-cpp-python if it is installed."""
    context = max(n_prompt, n_generate) + 1
    path = model_path(model, context)
    with ExitStack() as stack:
        workers = []
        for engine in installed_engines():
            say(f"loading {engine}")
            workers.append(stack.enter_context(Worker(engine, path, n_threads, context)))
            workers[-1].ready()

        def compared(measures: list[Callable[[], float]]) -> dict[str, Comparison]:
            found = in_turns([partial(_pair, measure) for measure in measures], rounds, say)
            return {
                worker.engine: Comparison.of(("busy", "quiet"), pairs)
                for worker, pairs in zip(workers, zip(*found, strict=True), strict=True)
            }

        decode = compared([partial(worker.decode_tokens_per_s, n_generate) for worker in workers])
        prefill = compared([partial(worker.prefill_tokens_per_s, n_prompt) for worker in workers])
    return NeighbourReport(str(path), n_threads, rounds, n_generate, n_prompt, decode, prefill)


def _pair(measure: Callable[[], float]) -> tuple[float, float]:
    """Tokens per second beside a busy process, and alone."""
    quiet = measure()
    with _busy_process():
        busy = measure()
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
    experiment = Experiment("neighbour", "Compare an engine beside one busy process with itself alone.")
    experiment.count("-r", "--rounds", 5, "pairs of measurements")
    experiment.count("-n", "--n-generate", 128, "tokens generated")
    experiment.count("-p", "--n-prompt", 512, "tokens of a prompt")
    given = experiment.parse()
    report = disturb(
        given.model, given.threads, given.rounds, given.n_generate, given.n_prompt, experiment.say
    )
    unit = f"tokens/s, {report.n_threads} threads"
    experiment.show(
        report,
        *(found.table(f"{name}, tg{report.n_generate}, {unit}") for name, found in report.engines.items()),
        *(found.table(f"{name}, pp{report.n_prompt}, {unit}") for name, found in report.prefill.items()),
    )


if __name__ == "__main__":
    run(main)
