"""Timing whole processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import start
from kukri.errors import KukriError


def test_a_process_is_timed() -> None:
    """Would catch memory in kilobytes, or a time that leaves the interpreter's own start out."""
    code = "import time; held = bytearray(100 << 20); time.sleep(0.2)"
    cost = start.timed_process([sys.executable, "-c", code])
    assert 0.2 < cost.seconds < 20
    assert 0 < cost.processor_s < cost.seconds
    assert 100 << 20 < cost.peak_rss_bytes < 8 << 30


def test_a_failing_process_is_an_error() -> None:
    """Would catch a crash being reported as a quick start."""
    with pytest.raises(KukriError, match="kukri run failed: ValueError: what went wrong"):
        start.timed_process([sys.executable, "-c", "raise ValueError('what went wrong')"])


@pytest.mark.full
def test_the_whole_command_is_measured(smollm2_path: Path) -> None:
    """Would catch options that `kukri run` no longer has."""
    report = start.measure(str(smollm2_path), 2, 1, 1, first=False)
    assert report.median_s == report.seconds[0] > 0
    assert report.peak_rss_bytes > 50e6
    assert report.first_s is None


@pytest.mark.full
def test_a_start_is_set_against_its_floor(smollm2_path: Path) -> None:
    """Would catch a ratio of other sums, or a program of the floor that no longer runs."""
    report = start.measure_floor(str(smollm2_path), 2, 1, 1)
    assert report.ratio == pytest.approx(report.run_s[0] / (report.bare_s[0] + report.loaded_s[0]))
    assert 0 < report.bare_s[0] < report.run_s[0]
    assert report.processor_ratio > 0.5
