"""Pictures that a small model learns to name, and its training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sight, train_vision
from benchmarks.drawn_pictures import COLOURS, COUNTS, KINDS, SIDE, Contents, draw, read


def test_answers_are_read_as_they_are_written() -> None:
    """Catches a plural that is counted as another shape."""
    every = [Contents(a, b, c) for a in COUNTS for b in COLOURS for c in KINDS]
    assert [read(f" {one}.") for one in every] == every
    assert read("I see a dog in it") is None
    assert sight.n_right(["one red circle", "two reds"], every[:1] * 2) == {
        **{"count": 1, "colour": 1, "kind": 1, "all": 1}
    }


def test_pictures_show_what_they_say() -> None:
    """Catches shapes outside of the picture, or in another colour."""
    random = np.random.default_rng(3)
    for _ in range(50):
        picture, contents = draw(random)
        assert (picture.shape, picture.dtype) == ((SIDE, SIDE, 3), np.uint8)
        distance = np.abs(picture.astype(int) - COLOURS[contents.colour]).max(axis=2)
        assert (distance < 60).sum() > 20 * (COUNTS.index(contents.count) + 1)


@pytest.mark.slow
def test_a_model_is_trained_and_asked(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a checkpoint that only its writer reads: both sides give the same answers after a few steps."""
    options = ["-m", str(smollm2_path), "-w", "2", "-a", "1", "-b", "2", "-t", "1"]
    monkeypatch.setattr(sys, "argv", ["train_vision", str(tmp_path / "sees"), *options])
    train_vision.main()
    monkeypatch.setattr(sys, "argv", ["sight", str(tmp_path / "sees"), "-n", "3", "-t", "1"])
    sight.main()
    assert '"same": 3' in capsys.readouterr().out
