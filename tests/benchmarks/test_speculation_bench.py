"""Gains of speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import speculation
from kukri.engine.lookup_drafts import LookupDrafts


@pytest.mark.slow
def test_a_short_run_is_measured(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch ratios of other texts, upside down, or of runs without drafts."""
    copies = (replace(speculation.COPIES[1], max_tokens=40),)
    prose = (replace(speculation.PROSE[3], max_tokens=6),)
    monkeypatch.setattr(speculation, "_GROUPS", {"copies": copies, "prose": prose})
    monkeypatch.setattr(speculation, "_TURNS", speculation._TURNS[:2])
    monkeypatch.setattr(speculation, "_N_EDITED", 5)
    monkeypatch.setattr(speculation, "_N_STREAMS", 2)
    report = speculation.measure(str(smollm2_path), 1, None)
    assert [row.n_tokens for row in report.rows] == [40, 80, 6, 12, 10] * 2
    copied, streams = report.rows[:2]
    assert 20 < copied.n_accepted <= copied.n_drafted
    assert streams.n_accepted > 40
    assert copied.ratio == copied.ratios[0] > 1
    assert copied.ratio == pytest.approx(copied.speculating / copied.plain)
    assert report.means["copies"]["0"] == pytest.approx(copied.ratio)


@pytest.mark.full
def test_a_random_layer_drafts(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that does not fit its model, or drafts that are never forced."""
    monkeypatch.setattr(speculation, "_N_PROSE", 60)
    monkeypatch.setattr(speculation, "_EAGLE_TOKENS", 2000)
    monkeypatch.setattr(LookupDrafts, "chances", LookupDrafts.chances)  # which forcing replaces
    (row,) = speculation.measure(str(smollm2_path), 1, None, only="eagle3").rows
    assert row.n_tokens == 60
    assert 4 < row.n_accepted <= row.n_drafted
