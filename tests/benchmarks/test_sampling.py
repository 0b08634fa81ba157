"""The cost of sampling next to the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sampling
from kukri.sampling import SamplingParams


@pytest.mark.full
def test_a_short_run_is_measured(smollm2_path: Path) -> None:
    """Would catch steps that are not timed, or sampling timed as a part of nothing."""
    report = sampling.measure(str(smollm2_path), 14, 5, None)
    assert (report.n_requests, report.n_steps) == (14, 5)
    assert 0 < report.sampling_ms < report.step_ms
    assert 0 < report.share < 1
    assert report.masks_ms == 0
    constrained = sampling.measure(str(smollm2_path), 3, 5, None, constrained=True)
    assert 0 < constrained.masks_ms < constrained.sampling_ms


def test_the_mix_has_every_stage() -> None:
    """Would catch a new stage whose cost nobody sees."""
    mixed = [SamplingParams(**fields) for fields in sampling._MIXED]
    stages = {stage for params in mixed for stage in params.active_stages}
    assert stages == set(SamplingParams().samplers)
