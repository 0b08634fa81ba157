"""Numbers that nobody seeded, in tests and in the processes that tests start."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

_DRAW = "import random; exec('print(random.Random().random())', {'random': random, '__name__': 'kukri.x'})"


def _drawn_by_a_process() -> str:
    return subprocess.run([sys.executable, "-c", _DRAW], capture_output=True, text=True, check=True).stdout


def test_a_process_draws_what_follows_from_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a test of a command that fails once in a hundred runs, because of what the command drew."""
    drawn = _drawn_by_a_process()
    assert _drawn_by_a_process() == drawn
    monkeypatch.setenv("KUKRI_TEST_DRAWS", "another number")
    assert _drawn_by_a_process() != drawn


def test_the_order_of_tests_does_not_decide_what_they_draw(request: pytest.FixtureRequest) -> None:
    """Catches a random generator of the process that goes on where the test before it stopped."""
    drawn = random.random()
    random.seed(request.config.getoption("draws"))
    assert random.random() == drawn
