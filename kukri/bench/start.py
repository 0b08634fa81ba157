"""How long a whole `kukri run` takes: `python -m kukri.bench.start`.

A fresh process is timed from its start to its end, with model and kernels in their caches; its memory is the
most it held at once. The first start ever, which compiles the kernels, is timed with an empty kernel cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kukri.bench.command import parser, positive, print_table, run, say
from kukri.errors import KukriError
from kukri.formats import hub

_PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class StartReport:
    """What `python -m kukri.bench.start` found. `first_s`: with no kernel compiled, or None."""

    model: str
    n_generate: int
    seconds: tuple[float, ...]
    median_s: float
    peak_rss_bytes: int  # the largest of all starts with warm caches
    first_s: float | None


def measure(
    model: str | None,
    n_generate: int,
    rounds: int,
    n_threads: int | None,
    *,
    first: bool,
    silent: bool = False,
) -> StartReport:
    """Starts `kukri run` `rounds` times after one that warms the caches up. Raises KukriError if it fails."""
    path = hub.resolve(model)
    command = [sys.executable, "-m", "kukri", "run", _PROMPT, "--model", str(path)]
    command += ["--max-tokens", str(n_generate), "--ignore-eos"]
    if n_threads is not None:
        command += ["--threads", str(n_threads)]
    first_s = None
    if first:
        say("first start, kernels compile", silent=silent)
        with tempfile.TemporaryDirectory() as empty:
            first_s, _ = _timed(command, os.environ | {"KUKRI_CACHE_DIR": empty})
    starts = []
    for i in range(rounds + 1):
        say(f"start {i} of {rounds}" if i else "warming up", silent=silent)
        starts.append(_timed(command, dict(os.environ)))
    seconds = tuple(s for s, _ in starts[1:])
    return StartReport(
        str(path), n_generate, seconds, median(seconds), max(m for _, m in starts[1:]), first_s
    )


def _timed(command: list[str], environment: dict[str, str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of one process."""
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
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """The program."""
    options = parser("start", "wall time and memory of a whole `kukri run`")
    options.add_argument("-r", "--rounds", type=positive, default=5, help="starts (5)")
    options.add_argument("-n", "--n-generate", type=positive, default=16, help="tokens generated (16)")
    options.add_argument("--no-first", action="store_true", help="leave the first start, which compiles, out")
    given = options.parse_args()
    report = measure(
        given.model,
        given.n_generate,
        given.rounds,
        given.threads,
        first=not given.no_first,
        silent=given.json,
    )
    if not given.json:
        rows = [[str(i), f"{seconds:.3f}"] for i, seconds in enumerate(report.seconds, 1)]
        rows.append(["median", f"{report.median_s:.3f}"])
        if report.first_s is not None:
            rows.append(["first ever", f"{report.first_s:.3f}"])
        print_table(f"{Path(report.model).name}, {report.n_generate} tokens", ["start", "seconds"], rows)
        print(f"peak memory {report.peak_rss_bytes / 1e6:.1f} MB\n")
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
