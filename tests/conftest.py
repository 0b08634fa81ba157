"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct Q4_1 file: $KUKRI_TEST_MODEL, or the cached one, downloaded once."""
    from kukri.formats import hub

    return hub.resolve(os.environ.get("KUKRI_TEST_MODEL"))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, for it and its subprocesses. Compiled kernels would land here too."""
    path = tmp_path / "cache"
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(path))
    return path
