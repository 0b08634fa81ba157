"""This checkout beside another one, by turns: `python -m benchmarks.checkouts PATH`.

PATH is a checkout of another commit (`git worktree add --detach PATH COMMIT`). In each round both run
`kukri run` of a few tokens, greedily, with model, kernels and bytecode in their caches, and `kukri bench`;
shown are medians of the rounds' ratios, here / there.
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

from benchmarks.harness import Comparison, Experiment, Say, Table, run, silent
from benchmarks.start import timed_process
from kukri.bench.turns import in_turns
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
}


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
    model: str | None,
    n_threads: int,
    *,
    n_prompt: int,
    n_generate: int,
    rounds: int,
    say: Say = silent,
) -> CheckoutsReport:
    """Measures both checkouts in turns. Raises ConfigError if `there` is none, KukriError if one fails."""
    if not (there / "kukri" / "cli.py").is_file():
        raise ConfigError(f"{there} is no checkout of kukri: make one by git worktree add --detach")
    options = ["--threads", str(n_threads), *(["-m", model] if model else [])]
    sizes = ["-p", str(n_prompt), "-g", str(n_generate)]
    found = in_turns([partial(_measure, side, options, sizes) for side in (_HERE, there)], rounds, say)
    tests = {
        name: Comparison.of(_SIDES, [[side[i] for side in one] for one in found])
        for i, name in enumerate(_TESTS)
    }
    return CheckoutsReport(commit(_HERE), commit(there), n_prompt, n_generate, tests)


def _measure(checkout: Path, options: list[str], sizes: list[str]) -> tuple[float, ...]:
    """One round of a checkout, in the order of _TESTS."""
    # -P: the package is that of PYTHONPATH, not of the working directory
    command = [sys.executable, "-P", "-m", "kukri"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = timed_process(
        [*command, "run", _PROMPT, "-n", "16", "--temperature", "0", *options], environment
    )
    bench = [*command, "bench", *sizes, "-r", "1", "--json", *options]
    done = subprocess.run(bench, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise KukriError(f"kukri bench failed in {checkout}: {done.stderr.strip()}")
    speeds = json.loads(done.stdout)
    rates = (speeds[f"{name}_tokens_per_s"]["mean"] for name in ("prefill", "decode"))
    return started.seconds, started.processor_s, *rates, 100 * speeds["engine_overhead"]


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
    experiment = Experiment("checkouts", "Compare this checkout with another one, by turns.")
    experiment.options.add_argument("checkout", type=Path, help="the other checkout")
    experiment.count("-r", "--rounds", 5, "rounds")
    experiment.count("-p", "--prompt-tokens", 512, "tokens of the prompt that is prefilled")
    experiment.count("-g", "--generate-tokens", 128, "tokens decoded")
    given = experiment.parse()
    report = measure(
        given.checkout.resolve(),
        given.model,
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
