"""This checkout and another one, alternating: `python -m benchmarks.checkouts PATH`.

PATH is a checkout of another commit (`git worktree add --detach PATH COMMIT`). In each round both run
`kukri run` of a few tokens, greedily, with model, kernels and bytecode in their caches, `kukri bench`, and
16 streams of 64 tokens on one engine; shown are medians of the rounds' ratios, here / there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import Comparison, Experiment, Say, Table, model_path, run, silent
from benchmarks.start import timed_process
from benchmarks.turns import in_turns
from kukri.errors import ConfigError, KukriError

_PROMPT = "What is the capital of France?"
_SIDES = ("here", "there")
_HERE = Path(__file__).parent.parent
# The measurements, and whether more is better.
_TESTS = {
    "kukri run, s": False,
    "kukri run, processor s": False,
    "prefill, tokens/s": True,
    "decode, tokens/s": True,
    "engine overhead, % of a step": False,
    "16 streams, tokens/s": True,
}
# `kukri.bench.offline` has the same names in all checkouts; the first turn is a warm-up
_STREAMS = """
import sys
from kukri.bench.offline import Kukri
kukri = Kukri(sys.argv[1], int(sys.argv[2]), 193, max_requests=16)
print(16 * 63 / min([kukri.batch_decode_s(16, 128, 64) for _ in range(3)][1:]))
kukri.close()
"""


@dataclass(frozen=True)
class CheckoutsReport:
    """The report of `python -m benchmarks.checkouts`: each measurement of both checkouts."""

    here: str  # the commit, with "+" if files have changed since
    there: str
    n_prompt: int
    n_generate: int
    tests: dict[str, Comparison]


def measure(
    there: Path,
    model: Path,
    n_threads: int,
    *,
    n_prompt: int,
    n_generate: int,
    rounds: int,
    say: Say = silent,
) -> CheckoutsReport:
    """Measures both checkouts in turns. Raises ConfigError if `there` is not one, KukriError if one fails."""
    if not (there / "kukri" / "cli.py").is_file():
        raise ConfigError(f"{there} is no checkout of kukri: make one by git worktree add --detach")
    sizes = ["-p", str(n_prompt), "-g", str(n_generate)]
    sides = [partial(_measure, side, str(model), str(n_threads), sizes) for side in (_HERE, there)]
    found = in_turns(sides, rounds, say)
    tests = {
        name: Comparison.of(_SIDES, [[side[i] for side in one] for one in found])
        for i, name in enumerate(_TESTS)
    }
    return CheckoutsReport(commit(_HERE), commit(there), n_prompt, n_generate, tests)


def _measure(checkout: Path, model: str, n_threads: str, sizes: list[str]) -> tuple[float, ...]:
    """One round of a checkout, in the order of _TESTS."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # -P: the package is that of PYTHONPATH, not of the working directory
    python = [sys.executable, "-P"]
    kukri, options = [*python, "-m", "kukri"], ["--threads", n_threads, "-m", model]
    started = timed_process([*kukri, "run", _PROMPT, "-n", "16", "--temperature", "0", *options], environment)
    speeds = json.loads(_output([*kukri, "bench", *sizes, "-r", "1", "--json", *options], environment))
    rates = (speeds[f"{name}_tokens_per_s"]["mean"] for name in ("prefill", "decode"))
    streams = float(_output([*python, "-c", _STREAMS, model, n_threads], environment))
    return started.seconds, started.processor_s, *rates, 100 * speeds["engine_overhead"], streams


def _output(command: list[str], environment: dict[str, str]) -> str:
    """Standard output of a command. Raises KukriError with its errors if it fails."""
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise KukriError(
            f"{' '.join(command[2:4])} failed in {environment['PYTHONPATH']}: {done.stderr.strip()}"
        )
    return done.stdout


def commit(checkout: Path) -> str:
    """The commit of a checkout, with "+" if files that git knows have changed since, or "unknown"."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=9", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("checkouts", "Compare this checkout with another one, alternating.")
    experiment.options.add_argument("checkout", type=Path, help="the other checkout")
    experiment.count("-r", "--rounds", 5, "rounds")
    experiment.count("-p", "--prompt-tokens", 512, "tokens of the prompt that is prefilled")
    experiment.count("-g", "--generate-tokens", 128, "tokens decoded")
    given = experiment.parse()
    report = measure(
        given.checkout.resolve(),
        model_path(given.model, max(given.prompt_tokens + 1, given.generate_tokens + 1, 193)),
        given.threads,
        n_prompt=given.prompt_tokens,
        n_generate=given.generate_tokens,
        rounds=given.rounds,
        say=experiment.say,
    )
    rows = []
    for name, found in report.tests.items():
        values = [f"{median(found.sides[side]):.3g}" for side in _SIDES]
        better = "more" if _TESTS[name] else "less"
        rows.append([name, *values, f"{found.median_ratio:.3f}", better])
    title = f"{report.here} here, {report.there} in {given.checkout}: medians"
    experiment.show(report, Table(title, ["", *_SIDES, "ratio", "better"], rows))


if __name__ == "__main__":
    run(main)
