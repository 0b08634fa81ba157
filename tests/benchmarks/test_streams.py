"""The server's processor time for a streamed token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import streams


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts a thread's time")
def test_the_server_is_measured(smollm2_path: Path) -> None:
    """Would catch tokens that are not counted, options that `kukri serve` no longer has, a wrong share."""
    report = streams.measure(str(smollm2_path), 2, n_streams=3, n_generate=24, rounds=1, step_ms=10.0)
    assert 5 < report.median_us < 5000
    assert report.share == pytest.approx(3 * report.median_us / 1e4)
