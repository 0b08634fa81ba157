"""Decoding and prefill while other processes keep cores busy: `python -m benchmarks.neighbour --busy 1 2`.

Other processes do nothing but count. Speeds with and without them are measured in pairs, and their ratio is
the share of its speed that an engine keeps.

`--quota 1.5` is another experiment: kukri in a control group that grants it so many cores, next to kukri with
a thread for each whole one and no such limit. It needs the right to make control groups (root, on Linux).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    Comparison,
    Experiment,
    Say,
    Worker,
    installed_engines,
    model_path,
    positive,
    run,
    silent,
)
from benchmarks.turns import in_turns
from kukri.errors import UnsupportedError

_START_S = 0.5  # until a new interpreter is counting
# ends with its parent, however that ends
_COUNT = (
    "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1_000_000):\n        pass"
)


@dataclass(frozen=True)
class NeighbourReport:
    """The report of `python -m benchmarks.neighbour`: by test and engine, tokens/s when busy and alone.

    Tests are tg128@1 and pp512@2: what is measured, and the number of busy processes next to it.
    """

    model: str
    n_threads: int
    rounds: int
    tests: dict[str, dict[str, Comparison]]


@dataclass(frozen=True)
class QuotaReport:
    """The report of `--quota`: by test, tokens/s within the quota and with as many threads without one."""

    model: str
    cores: float
    rounds: int
    tests: dict[str, Comparison]


def disturb(
    model: str | None,
    n_threads: int,
    rounds: int,
    n_generate: int,
    n_prompt: int,
    say: Say = silent,
    *,
    busy: Sequence[int] = (1,),
) -> NeighbourReport:
    """Measures kukri, and llama-cpp-python if it is installed, next to each number of busy processes."""
    context = max(n_prompt, n_generate) + 1
    path = model_path(model, context)
    with ExitStack() as stack:
        workers = []
        for engine in installed_engines():
            say(f"loading {engine}")
            workers.append(stack.enter_context(Worker(engine, path, n_threads, context)))
            workers[-1].ready()

        def compared(measures: Sequence[Callable[[], float]], n_busy: int) -> dict[str, Comparison]:
            found = in_turns([partial(_pair, measure, n_busy) for measure in measures], rounds, say)
            return {
                worker.engine: Comparison.of(("busy", "quiet"), pairs)
                for worker, pairs in zip(workers, zip(*found, strict=True), strict=True)
            }

        tests = {}
        for n_busy in busy:
            decodes = [partial(worker.decode_tokens_per_s, n_generate) for worker in workers]
            tests[f"tg{n_generate}@{n_busy}"] = compared(decodes, n_busy)
            prefills = [partial(worker.prefill_tokens_per_s, n_prompt) for worker in workers]
            tests[f"pp{n_prompt}@{n_busy}"] = compared(prefills, n_busy)
    return NeighbourReport(str(path), n_threads, rounds, tests)


def limit(
    model: str | None, cores: float, rounds: int, n_generate: int, n_prompt: int, say: Say = silent
) -> QuotaReport:
    """Measures kukri within a quota of `cores`, its threads by its own choice, and with a thread a core.

    Raises UnsupportedError if no control group can be made.
    """
    context = max(n_prompt, n_generate) + 1
    path = model_path(model, context)
    with ExitStack() as stack:
        group = stack.enter_context(_control_group(cores))
        limited = stack.enter_context(Worker("kukri", path, 0, context))
        (group / "cgroup.procs").write_text(str(limited.process_id))
        free = stack.enter_context(Worker("kukri", path, max(int(cores), 1), context))
        for worker in (limited, free):
            worker.ready()
        tests = {}
        for test, method, n in (
            (f"tg{n_generate}", "decode_tokens_per_s", n_generate),
            (f"pp{n_prompt}", "prefill_tokens_per_s", n_prompt),
        ):
            found = in_turns([partial(getattr(worker, method), n) for worker in (limited, free)], rounds, say)
            tests[test] = Comparison.of(("quota", "threads"), found)
    return QuotaReport(str(path), cores, rounds, tests)


@contextmanager
def _control_group(cores: float) -> Iterator[Path]:
    """A control group of this command's own that grants `cores`, for as long as the `with` block."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "cpu/cpu.cfs_quota_us").exists() or (root / "cpu/tasks").exists()
    group = (root / "cpu" if is_v1 else root) / f"kukri-quota-{os.getpid()}"
    quota_us = round(100_000 * cores)
    try:
        group.mkdir()
        if is_v1:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} 100000")
    except OSError as error:
        raise UnsupportedError(f"no control group can be made here: {error}") from None
    try:
        yield group
    finally:
        for _ in range(50):  # it is busy until its last process is gone
            with suppress(OSError):
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.1)


def _pair(measure: Callable[[], float], n_busy: int) -> tuple[float, float]:
    """Tokens per second next to busy processes, and alone."""
    quiet = measure()
    with _busy_processes(n_busy):
        busy = measure()
    return busy, quiet


@contextmanager
def _busy_processes(n: int) -> Iterator[None]:
    """Processes that keep a core busy each within the `with` block."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", _COUNT, str(os.getpid())]) for _ in range(n)]
    try:
        time.sleep(_START_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _cores(text: str) -> float:
    """An option's number of cores, whole or not."""
    with suppress(ValueError):
        if 0.01 <= (cores := float(text)) <= 1024:
            return cores
    raise ArgumentTypeError(f"must be a number of cores, such as 1.5, not {text!r}")


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("neighbour", "Compare an engine next to busy processes with itself alone.")
    experiment.count("-r", "--rounds", 5, "pairs of measurements")
    experiment.count("-n", "--n-generate", 128, "tokens generated")
    experiment.count("-p", "--n-prompt", 512, "tokens of a prompt")
    add = experiment.options.add_argument
    add("--busy", type=positive, nargs="+", default=[1], metavar="N", help="busy processes (1)")
    add("--quota", type=_cores, metavar="CORES", help="measure within a quota of a control group instead")
    given = experiment.parse()
    sizes = given.rounds, given.n_generate, given.n_prompt, experiment.say
    if given.quota:
        limited = limit(given.model, given.quota, *sizes)
        tables = [found.table(f"{test}, tokens/s") for test, found in limited.tests.items()]
        experiment.show(limited, *tables)
        return
    report = disturb(given.model, given.threads, *sizes, busy=given.busy)
    tables = [
        found.table(f"{engine}, {test}, tokens/s, {report.n_threads} threads")
        for test, engines in report.tests.items()
        for engine, found in engines.items()
    ]
    experiment.show(report, *tables)


if __name__ == "__main__":
    run(main)
