"""Seconds and megabytes of the README's two commands in a new environment: `python -m benchmarks.install`.

`pip install` of this checkout, or of a wheel, and two runs of 16 tokens, the first with an empty cache of
kernels. Megabytes are 10^6 bytes on disk below site-packages, next to what a new environment has (pip). The
model is downloaded before, its time is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.harness import Experiment, Say, Table, run, silent
from benchmarks.start import timed_process
from kukri.errors import KukriError
from kukri.formats import hub


@dataclass(frozen=True)
class InstallReport:
    """The report of `python -m benchmarks.install`. `least_s`: Python with numpy and tokenizers, no more."""

    source: str
    kernels: str
    install_s: float
    megabytes: float
    packages: dict[str, float]  # megabytes, the largest first
    first_run_s: float
    second_run_s: float
    least_s: float


def measure(source: str, kernels: str, model: str | None, say: Say = silent) -> InstallReport:
    """Installs into a new environment and runs there. Raises KukriError if that fails."""
    path = hub.resolve(model)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "venv", directory]
        subprocess.run(command, check=True)
        python = str(Path(directory, "bin", "python"))
        (site,) = Path(directory, "lib").glob("python*/site-packages")
        before = _megabytes(site.rglob("*"))
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KUKRI_CPU")}
        environment |= {"KUKRI_KERNELS": kernels, "KUKRI_CACHE_DIR": str(Path(directory, "cache"))}
        say("pip install")
        started = time.perf_counter()
        constraints = str(Path(__file__).parents[1] / ".ci" / "constraints.txt")
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "-q",
            "-c",
            constraints,
            source,
        ]
        done = subprocess.run(install, env=environment, capture_output=True, text=True)
        install_s = time.perf_counter() - started
        if done.returncode:
            raise KukriError(f"pip install failed: {done.stderr.strip()[-1000:]}")
        packages = {
            found.metadata["Name"]: _megabytes(
                Path(str(found.locate_file(file))) for file in found.files or ()
            )
            for found in distributions(path=[str(site)])
            if found.metadata["Name"] not in ("pip", "setuptools")
        }
        say("kukri run")
        ask = [
            python,
            "-P",
            "-m",
            "kukri",
            "run",
            "What is the capital of France?",
            "-n",
            "16",
            "-m",
            str(path),
        ]
        first_s, second_s = (timed_process(ask, environment).seconds for _ in range(2))
        least_s = timed_process([python, "-P", "-c", "import numpy, tokenizers"], environment).seconds
        total = _megabytes(site.rglob("*")) - before
    largest = dict(sorted(packages.items(), key=lambda item: -item[1]))
    return InstallReport(source, kernels, install_s, total, largest, first_s, second_s, least_s)


def _megabytes(paths: Iterable[Path]) -> float:
    """10^6 bytes that files take on disk."""
    return sum(512 * path.lstat().st_blocks for path in paths if path.is_file()) / 1e6


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("install", "Measure installing kukri and its first runs.")
    experiment.options.add_argument("source", nargs="?", default=".", help="a checkout or a wheel (.)")
    experiment.options.add_argument(
        "--kernels", default="", help="levels to compile kernels for, as KUKRI_KERNELS names them (none)"
    )
    given = experiment.parse()
    report = measure(given.source, given.kernels, given.model, experiment.say)
    rows = [
        ["pip install", f"{report.install_s:.1f}"],
        ["first run", f"{report.first_run_s:.2f}"],
        ["second run", f"{report.second_run_s:.2f}"],
        ["import numpy, tokenizers", f"{report.least_s:.2f}"],
    ]
    sizes = [[name, f"{size:.1f}"] for name, size in report.packages.items() if size >= 0.5]
    experiment.show(
        report,
        Table("", ["", "seconds"], rows),
        Table("", ["package", "MB"], [*sizes, ["all", f"{report.megabytes:.1f}"]]),
    )


if __name__ == "__main__":
    run(main)
