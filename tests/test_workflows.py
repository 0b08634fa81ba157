"""The workflows of .github, which run elsewhere: `.ci/workflows` checks their form, this what they run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(path: Path) -> dict[str, Any]:
    """Return the jobs of a workflow, by name."""
    jobs: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return jobs


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_run_here(path: Path) -> None:
    """Catches a command that only the workflow knows, a script that is gone, and an action that changes."""
    for job in jobs_of(path).values():
        names = job.get("strategy", {}).get("matrix", {}).get("check", [])
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
                continue
            found = re.fullmatch(r'\.ci/("\$CHECK"|\w+)(?: "\$GITHUB_REF_NAME")?', step["run"])
            assert found, step["run"]
            for name in names if "CHECK" in found[1] else [found[1]]:
                assert os.access(ROOT / ".ci" / name, os.X_OK), f".ci/{name}"


def test_the_tests_run_on_every_version_and_system() -> None:
    """Catches a version of Python or a system that a change drops from the list."""
    matrix = jobs_of(ROOT / ".github" / "workflows" / "checks.yml")["tests"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    systems = {re.sub(r"-[\d.]+", "", one) for one in matrix["system"]}
    assert systems == {"ubuntu", "ubuntu-arm", "macos", "windows"}
