"""The soak that `python -m benchmarks.soak` runs for minutes, here for seconds."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.soak import Load, SoakReport, soak

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_server_survives_its_clients(smollm2_path, seconds):
    """Catches lost or crossed tokens, pages that leak, a 5xx, and answers that SIGTERM cuts off."""
    report = asyncio.run(soak(smollm2_path, seconds=seconds, n_clients=16, seed=1, n_threads=None))
    assert report.failures == []
    assert report.statuses["200"] > seconds
    assert report.statuses["400"] > 0
    assert {"ask", "stream", "leave", "give_up", "send_broken"} <= set(report.actions)
    assert report.warm_rss_bytes > 0


def test_the_soak_sees_a_wrong_answer(smollm2_path):
    """Catches a comparison that passes whatever the server says."""
    report = SoakReport("x", 1.0, 1)
    load = Load(None, {"1 a": "b"}, report)
    load._compare({"prompt": "a", "max_tokens": 1}, "b", "an answer")
    assert report.failures == []
    load._compare({"prompt": "a", "max_tokens": 1}, "c", "an answer")
    load._count(500)
    assert len(report.failures) == 2
    report.warm_rss_bytes, report.peak_rss_bytes = 100, 110
    assert report.rss_growth == pytest.approx(0.1)
