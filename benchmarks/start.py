"""Wall time and memory of a whole `kukri run`: `python -m benchmarks.start`.

A fresh process is timed from its start to its end, with model and kernels in their caches; its memory is the
most it held at once. The first start ever, which compiles the kernels, is timed with an empty kernel cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness import Experiment, Say, Table, run, silent
from kukri.bench.turns import in_turns
from kukri.errors import KukriError
from kukri.formats import hub

_PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class StartReport:
    """The report of `python -m benchmarks.start`. `first_s`: with no kernel compiled, or None."""

    model: str
    n_generate: int
    seconds: tuple[float, ...]
    median_s: float
    peak_rss_bytes: int  # the largest of all starts with warm caches
    first_s: float | None


def measure(
    model: str | None, n_generate: int, rounds: int, n_threads: int, *, first: bool, say: Say = silent
) -> StartReport:
    """Starts `kukri run` `rounds` times after one that warms the caches up. Raises KukriError if it fails."""
    path = hub.resolve(model)
    command = [sys.executable, "-m", "kukri", "run", _PROMPT, "--model", str(path)]
    command += ["--max-tokens", str(n_generate), "--ignore-eos", "--threads", str(n_threads)]
    first_s = None
    if first:
        say("first start, kernels compile")
        with tempfile.TemporaryDirectory() as empty:
            first_s = timed_process(command, os.environ | {"KUKRI_CACHE_DIR": empty}).seconds
    starts = [found for (found,) in in_turns([lambda: timed_process(command)], rounds, say)]
    seconds = tuple(start.seconds for start in starts)
    peak_rss_bytes = max(start.peak_rss_bytes for start in starts)
    return StartReport(str(path), n_generate, seconds, median(seconds), peak_rss_bytes, first_s)


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
    given = experiment.parse()
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


if __name__ == "__main__":
    run(main)
