"""The CPU backend, for all tests of a file."""

from __future__ import annotations

import pytest

from kukri.kernels.cpu import CpuBackend


@pytest.fixture(scope="module")
def backend():
    backend = CpuBackend(n_threads=2)
    yield backend
    backend.close()
