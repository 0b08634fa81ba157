"""Requests without a seed draw the same numbers in each run of a test.

Without this, a test whose outcome depends on what it draws fails once in a hundred runs, for nobody's fault.
`pytest --draws N` takes other numbers: a test that fails with some of them needs a seed or temperature 0.
"""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from kukri.sampling import sampler


class Draws:
    """Seed the requests of a test that have no seed, by its name and their order in it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._test = ""
        self._order = count()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test, self._order = item.nodeid, count()

    def random(self, seed: int | None) -> Random:
        return Random(f"{self._number} {self._test} {next(self._order)}" if seed is None else seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=0, help="which numbers requests without a seed draw")


def pytest_configure(config: pytest.Config) -> None:
    draws = Draws(config.getoption("draws"))
    config.pluginmanager.register(draws)
    sampler.Random = draws.random  # type: ignore[assignment, misc]
