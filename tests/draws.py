"""Requests without a seed draw the same numbers in each run of a test, and so do libraries' own generators.

Without this, a test whose outcome depends on what it draws fails once in a hundred runs, for nobody's fault.
`pytest --draws N` takes other numbers: a test that fails with some of them needs a seed or temperature 0.
Processes that a test starts read child_process/sitecustomize.py.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from kukri.sampling import sampler
from tests.child_process.sitecustomize import FixedRandom


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=0, help="which numbers requests without a seed draw")


def pytest_configure(config: pytest.Config) -> None:
    paths = str(Path(__file__).parent / "child_process"), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["KUKRI_TEST_DRAWS"] = str(config.getoption("draws"))
    sampler.Random = FixedRandom  # type: ignore[attr-defined, misc]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # which tests ran before this one in the same process must not decide what it draws
    seed = item.config.getoption("draws")
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
