"""Which tests a command line runs: `tests/tiers.py` over a small suite of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest

def test_cheap():
    pass

@pytest.mark.full
def test_dear():
    assert FINE

@pytest.mark.full(but=["a*"])
@pytest.mark.parametrize("name", ["aa", "b", "c"])
def test_product(name):
    pass

@pytest.mark.slow
def test_slow():
    pass
"""
INI = """[pytest]
testpaths = tests
addopts = -m "not slow and not ray"
markers =
    full(but, only): second tier
    slow: minutes
    ray: Ray
    representative(seconds): first tier
"""
FIRST, SECOND = {"test_cheap", "test_product[aa]"}, {"test_dear", "test_product[b]", "test_product[c]"}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(INI, encoding="utf-8")
    (tmp_path / "tests" / "test_one.py").write_text(SUITE.replace("FINE", "True"), encoding="utf-8")
    return tmp_path


def ran(suite: Path, *arguments: str) -> tuple[set[str], str]:
    """The tests that a command line ran, and all that it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.tiers", *arguments]
    done = subprocess.run(
        command, cwd=suite, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    return set(re.findall(r"test_one\.py::(\S+) (?:PASSED|FAILED)", done.stdout)), done.stdout + done.stderr


def test_a_tier_is_what_was_asked_for(suite: Path) -> None:
    """Catches a test of the second tier before each commit, and one that neither command runs."""
    tests, printed = ran(suite)
    assert tests == FIRST
    assert "3 tests of the second tier were left out: `pytest -m full` runs them" in printed
    assert ran(suite, "-m", "full")[0] == SECOND
    assert ran(suite, "-m", "slow")[0] == {"test_slow"}


@pytest.mark.parametrize(
    "named", [["tests/test_one.py"], ["-k", "dear or cheap or product"], ["tests/test_one.py::test_dear"]]
)
def test_naming_tests_runs_both_tiers(suite: Path, named: list[str]) -> None:
    """Catches a test that somebody names and that does not run."""
    tests, printed = ran(suite, *named)
    assert tests == ({"test_dear"} if "::" in named[0] else FIRST | SECOND)
    assert "both tiers ran: a bare `pytest` leaves out" in printed


def test_a_failure_of_either_tier_runs_again(suite: Path) -> None:
    """Catches a `pytest --lf` that says nothing failed."""
    test = suite / "tests" / "test_one.py"
    test.write_text(SUITE.replace("FINE", "False"), encoding="utf-8")
    assert "1 failed" in ran(suite, "-m", "full")[1]
    tests, printed = ran(suite, "--lf")
    assert tests == {"test_dear"}
    assert "1 failed" in printed


def test_processes_of_a_run_take_the_same_tier(suite: Path) -> None:
    """Catches workers that read the command line again and choose another tier."""
    _, printed = ran(suite, "-n", "2")
    assert "2 passed" in printed, printed
    assert "3 tests of the second tier were left out" in printed


def test_a_pattern_that_matches_nothing_is_an_error(suite: Path) -> None:
    """Catches parameters that were renamed and so left the first tier."""
    test = suite / "tests" / "test_one.py"
    test.write_text(SUITE.replace('but=["a*"]', 'but=["z*"]'), encoding="utf-8")
    assert "patterns of the mark full match no parameter" in ran(suite)[1]
