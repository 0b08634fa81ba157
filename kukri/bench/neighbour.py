"""Decoding while another process keeps a core busy: `python -m kukri.bench.neighbour`.

A second process does nothing but count. Speeds with and without it are measured in turns, and their ratio
pair by pair is the share of its speed that an engine keeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

from kukri.bench.command import model_path, parser, positive, print_table, run, say
from kukri.bench.llama_cpp import import_llama_cpp
from kukri.bench.peers import SETTLE_S
from kukri.bench.worker import ENGINES, Worker
from kukri.errors import UnsupportedError
from kukri.kernels.cpu.features import usable_cores

_START_S = 0.5  # until a new interpreter is counting
# ends with its parent, however that ends
_COUNT = (
    "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1_000_000):\n        pass"
)


@dataclass(frozen=True)
class Disturbed:
    """One engine: decode speed in tokens per second, alone and with the neighbour, and busy / quiet."""

    quiet: tuple[float, ...]
    busy: tuple[float, ...]
    ratios: tuple[float, ...]
    median_ratio: float


@dataclass(frozen=True)
class NeighbourReport:
    """What `python -m kukri.bench.neighbour` found; `engines` by name."""

    model: str
    n_threads: int
    rounds: int
    n_generate: int
    engines: dict[str, Disturbed]


def disturb(
    model: str | None, n_threads: int, rounds: int, n_generate: int, *, silent: bool = False
) -> NeighbourReport:
    """Measures kukri, and llama-cpp-python where it is installed."""
    path = model_path(model, n_generate + 1)
    with ExitStack() as stack:
        workers = []
        for engine in _installed():
            say(f"loading {engine}", silent=silent)
            workers.append(stack.enter_context(Worker(engine, path, n_threads, n_generate + 1)))
            workers[-1].ready()
            workers[-1].decode_tokens_per_s(n_generate)
        speeds: dict[str, list[tuple[float, float]]] = {worker.engine: [] for worker in workers}
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}", silent=silent)
            for worker in workers:
                speeds[worker.engine].append(_pair(worker, n_generate))
    engines = {engine: _disturbed(pairs) for engine, pairs in speeds.items()}
    return NeighbourReport(str(path), n_threads, rounds, n_generate, engines)


def _installed() -> list[str]:
    try:
        import_llama_cpp()
    except UnsupportedError:
        return [ENGINES[0]]
    return list(ENGINES)


def _pair(worker: Worker, n_tokens: int) -> tuple[float, float]:
    """Tokens per second alone, then with the neighbour."""
    time.sleep(SETTLE_S)
    quiet = worker.decode_tokens_per_s(n_tokens)
    with _neighbour():
        busy = worker.decode_tokens_per_s(n_tokens)
    return quiet, busy


@contextmanager
def _neighbour() -> Iterator[None]:
    """A process that keeps one core busy within the `with` block."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _COUNT, str(os.getpid())])
    try:
        time.sleep(_START_S)
        yield
    finally:
        process.kill()
        process.wait()


def _disturbed(pairs: list[tuple[float, float]]) -> Disturbed:
    ratios = tuple(busy / quiet for quiet, busy in pairs)
    return Disturbed(tuple(q for q, _ in pairs), tuple(b for _, b in pairs), ratios, median(ratios))


def main() -> None:
    """The program."""
    options = parser("neighbour", "decoding speed with one busy process on the machine, against a quiet one")
    options.add_argument("-r", "--rounds", type=positive, default=5, help="pairs of measurements (5)")
    options.add_argument("-n", "--n-generate", type=positive, default=128, help="tokens generated (128)")
    given = options.parse_args()
    threads = given.threads or usable_cores()
    report = disturb(given.model, threads, given.rounds, given.n_generate, silent=given.json)
    if not given.json:
        for engine, found in report.engines.items():
            pairs = zip(found.quiet, found.busy, found.ratios, strict=True)
            rows = [[str(i), f"{q:.1f}", f"{b:.1f}", f"{r:.2f}"] for i, (q, b, r) in enumerate(pairs, 1)]
            rows.append(["median", f"{median(found.quiet):.1f}", f"{median(found.busy):.1f}"])
            rows[-1].append(f"{found.median_ratio:.2f}")
            title = f"{engine}, tg{report.n_generate}, tokens/s, {report.n_threads} threads"
            print_table(title, ["round", "quiet", "busy", "ratio"], rows)
            print()
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
