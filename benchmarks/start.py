"""Wall time and memory of a whole `kukri run`: `python -m benchmarks.start`.

A fresh process is timed from its start to its end, with model and kernels in their caches; its memory is the
most it held at once. The first start ever, which compiles the kernels, is timed with an empty kernel cache.

With --floor each start is set against the least that it could take: a Python that imports numpy and
tokenizers and no more, and the loading and the tokens of a process that has loaded the model before. Wall
time and processor time, of all threads and of the process that renders the chat template.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import Experiment, Say, Table, output_of, run, silent
from benchmarks.turns import in_turns
from kukri.errors import KukriError
from kukri.formats import hub

_PROMPT = "What is the capital of France?"
_BARE = "import numpy, tokenizers"
# Prints wall and processor seconds of a second loading, and of the tokens, of the model in argv.
_LOADED = """
import json, resource, sys, time
from kukri import LLM

path, prompt, n_tokens, n_threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def spent():
    return time.perf_counter(), time.process_time()

def load():
    return LLM(path, n_threads=n_threads)

def answer(llm):
    llm.chat([{"role": "user", "content": prompt}], max_tokens=n_tokens, ignore_eos=True)

with load() as llm:
    answer(llm)
before = spent()
with load() as llm:
    answer(llm)
    print(json.dumps([b - a for a, b in zip(before, spent())]))
"""


@dataclass(frozen=True)
class StartReport:
    """The report of `python -m benchmarks.start`. `first_s`: with no kernel compiled, or None."""

    model: str
    n_generate: int
    seconds: tuple[float, ...]
    median_s: float
    peak_rss_bytes: int  # the largest of all starts with warm caches
    first_s: float | None


@dataclass(frozen=True)
class FloorReport:
    """The report of `python -m benchmarks.start --floor`: seconds, and medians of the rounds' ratios."""

    model: str
    n_generate: int
    run_s: tuple[float, ...]  # `kukri run`
    bare_s: tuple[float, ...]  # Python with numpy and tokenizers
    loaded_s: tuple[float, ...]  # a second loading, and the tokens
    ratio: float  # run / (bare + loaded)
    processor_ratio: float


def measure_floor(
    model: str | None, n_generate: int, rounds: int, n_threads: int, say: Say = silent
) -> FloorReport:
    """Starts `kukri run` and its floor alternating. Raises KukriError if one fails."""
    path = str(hub.resolve(model))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def start() -> tuple[float, float]:
        return timed_process(_command(path, n_generate, n_threads), environment)[:2]

    def bare() -> tuple[float, float]:
        return timed_process([sys.executable, "-c", _BARE], environment)[:2]

    def loaded() -> tuple[float, float]:
        command = [sys.executable, "-c", _LOADED, path, _PROMPT, str(n_generate), str(n_threads)]
        seconds, processor_s = json.loads(output_of(command, environment))
        return seconds, processor_s

    found = in_turns([start, bare, loaded], rounds, say)
    # by wall and by processor time
    ratio, processor_ratio = (
        median(one[i] / (least[i] + rest[i]) for one, least, rest in found) for i in (0, 1)
    )
    run_s, bare_s, loaded_s = (tuple(side[0] for side in sides) for sides in zip(*found, strict=True))
    return FloorReport(path, n_generate, run_s, bare_s, loaded_s, ratio, processor_ratio)


def measure(
    model: str | None, n_generate: int, rounds: int, n_threads: int, *, first: bool, say: Say = silent
) -> StartReport:
    """Starts `kukri run` `rounds` times after one that warms the caches up. Raises KukriError if it fails."""
    path = hub.resolve(model)
    command = _command(str(path), n_generate, n_threads)
    first_s = None
    if first:
        say("first start, kernels compile")
        with tempfile.TemporaryDirectory() as empty:
            first_s = timed_process(command, os.environ | {"KUKRI_CACHE_DIR": empty}).seconds
    starts = [found for (found,) in in_turns([lambda: timed_process(command)], rounds, say)]
    seconds = tuple(start.seconds for start in starts)
    peak_rss_bytes = max(start.peak_rss_bytes for start in starts)
    return StartReport(str(path), n_generate, seconds, median(seconds), peak_rss_bytes, first_s)


def _command(path: str, n_generate: int, n_threads: int) -> list[str]:
    command = [sys.executable, "-m", "kukri", "run", _PROMPT, "--model", path]
    return [*command, "--max-tokens", str(n_generate), "--ignore-eos", "--threads", str(n_threads)]


class ProcessCost(NamedTuple):
    """The cost of one process: wall and processor seconds, and the most memory that it held at once."""

    seconds: float
    processor_s: float
    peak_rss_bytes: int


def timed_process(command: list[str], environment: dict[str, str] | None = None) -> ProcessCost:
    """Runs a process to its end and returns its cost. Raises KukriError if it fails."""
    with tempfile.TemporaryFile() as messages:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=messages
        )
        # the child's own usage; RUSAGE_CHILDREN would mix it with that of earlier ones
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").strip().splitlines()
            raise KukriError(f"kukri run failed: {lines[-1] if lines else f'status {process.returncode}'}")
    peak_rss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return ProcessCost(seconds, usage.ru_utime + usage.ru_stime, peak_rss_bytes)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("start", "Measure wall time and memory of a whole `kukri run`.")
    experiment.count("-r", "--rounds", 5, "starts")
    experiment.count("-n", "--n-generate", 16, "tokens generated")
    experiment.options.add_argument("--no-first", action="store_true", help="skip the start that compiles")
    experiment.options.add_argument("--floor", action="store_true", help="also the least it could take")
    given = experiment.parse()
    if given.floor:
        _show_floor(experiment, given)
        return
    report = measure(
        given.model,
        given.n_generate,
        given.rounds,
        given.threads,
        first=not given.no_first,
        say=experiment.say,
    )
    rows = [[str(i), f"{seconds:.3f}"] for i, seconds in enumerate(report.seconds, 1)]
    rows.append(["median", f"{report.median_s:.3f}"])
    if report.first_s is not None:
        rows.append(["first ever", f"{report.first_s:.3f}"])
    title = f"{Path(report.model).name}, {report.n_generate} tokens"
    experiment.show(
        report, Table(title, ["start", "seconds"], rows), f"peak memory {report.peak_rss_bytes / 1e6:.1f} MB"
    )


def _show_floor(experiment: Experiment, given: Any) -> None:
    report = measure_floor(given.model, given.n_generate, given.rounds, given.threads, experiment.say)
    sides = {"kukri run": report.run_s, _BARE: report.bare_s, "load and tokens": report.loaded_s}
    rows = [[name, f"{median(seconds):.3f}"] for name, seconds in sides.items()]
    ratio = f"kukri run / the other two: {report.ratio:.2f}, by processor time {report.processor_ratio:.2f}"
    experiment.show(
        report, Table(f"{Path(report.model).name}, {report.n_generate} tokens", ["", "s"], rows), ratio
    )


if __name__ == "__main__":
    run(main)
