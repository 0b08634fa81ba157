"""kukri and llama.cpp side by side: `python -m kukri.bench.peers`.

Both load the same file, with the same threads, in a process of their own, and take turns: each pair of
measurements lies within a second or two, and which goes first changes from round to round. What else the
machine does then hits both alike, so the ratio of a pair says more than either speed.

Timed are, for kukri, a whole `LLM.generate` on random ids, greedy sampling and text included; for llama.cpp,
`llama_decode` on random ids and nothing else (`kukri.bench.llama_cpp`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median

from kukri.bench.command import model_path, parser, positive, print_table, run, say
from kukri.bench.llama_cpp import import_llama_cpp
from kukri.bench.worker import ENGINES, Worker
from kukri.kernels.cpu.features import usable_cores

SETTLE_S = 0.1  # between measurements: threads that spin for work have gone to sleep then


@dataclass(frozen=True)
class Comparison:
    """One test: tokens per second, round by round. `ratios` are kukri / llama.cpp."""

    n_tokens: int
    kukri: tuple[float, ...]
    llama_cpp: tuple[float, ...]
    ratios: tuple[float, ...]
    median_ratio: float


@dataclass(frozen=True)
class PeersReport:
    """What `python -m kukri.bench.peers` found."""

    model: str
    n_threads: int
    rounds: int
    versions: dict[str, str]
    prefill: Comparison
    decode: Comparison


def compare(
    model: str | None, n_threads: int, rounds: int, n_prompt: int, n_generate: int, *, silent: bool = False
) -> PeersReport:
    """Measures both engines in turns. Raises UnsupportedError without llama-cpp-python."""
    import_llama_cpp()
    context = max(n_prompt, n_generate) + 1
    path = model_path(model, context)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(engine, path, n_threads, context)) for engine in ENGINES]
        for worker in workers:
            say(f"loading {worker.engine}", silent=silent)
            worker.ready()
        speeds: dict[str, list[list[float]]] = {"prefill": [[], []], "decode": [[], []]}
        for i in range(rounds + 1):
            say(f"round {i} of {rounds}" if i else "warming up", silent=silent)
            turns = (0, 1) if i % 2 else (1, 0)
            for turn in turns:
                speeds["prefill"][turn].append(_settled(workers[turn].prefill_tokens_per_s, n_prompt))
            for turn in turns:
                speeds["decode"][turn].append(_settled(workers[turn].decode_tokens_per_s, n_generate))
        versions = {name: number for worker in workers for name, number in worker.versions().items()}
    prefill = _comparison(n_prompt, *speeds["prefill"])
    decode = _comparison(n_generate, *speeds["decode"])
    return PeersReport(str(path), n_threads, rounds, versions, prefill, decode)


def _settled(measure: Callable[[int], float], n_tokens: int) -> float:
    time.sleep(SETTLE_S)
    return measure(n_tokens)


def _comparison(n_tokens: int, kukri: list[float], llama_cpp: list[float]) -> Comparison:
    """Without the first round, which warmed up."""
    ours, theirs = tuple(kukri[1:]), tuple(llama_cpp[1:])
    ratios = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    return Comparison(n_tokens, ours, theirs, ratios, median(ratios))


def _print(report: PeersReport) -> None:
    for name, test in (("pp", report.prefill), ("tg", report.decode)):
        pairs = zip(test.kukri, test.llama_cpp, test.ratios, strict=True)
        rows = [[str(i), f"{a:.1f}", f"{b:.1f}", f"{r:.2f}"] for i, (a, b, r) in enumerate(pairs, 1)]
        rows.append(["median", f"{median(test.kukri):.1f}", f"{median(test.llama_cpp):.1f}"])
        rows[-1].append(f"{test.median_ratio:.2f}")
        title = f"{name}{test.n_tokens}, tokens/s, {report.n_threads} threads"
        print_table(title, ["round", *ENGINES, "ratio"], rows)
        print()


def main() -> None:
    """The program."""
    options = parser("peers", "kukri and llama-cpp-python in turns, on the same file, threads and lengths")
    options.add_argument("-r", "--rounds", type=positive, default=5, help="pairs of measurements (5)")
    options.add_argument("-p", "--n-prompt", type=positive, default=512, help="tokens of a prompt (512)")
    options.add_argument("-n", "--n-generate", type=positive, default=128, help="tokens generated (128)")
    given = options.parse_args()
    threads = given.threads or usable_cores()
    report = compare(given.model, threads, given.rounds, given.n_prompt, given.n_generate, silent=given.json)
    if not given.json:
        _print(report)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
