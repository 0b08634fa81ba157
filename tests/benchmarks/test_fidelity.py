"""The distance between two engines' logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fidelity
from kukri.errors import ConfigError
from kukri.evaluate.text import prose
from kukri.tokenizer import Tokenizer


def test_distance_of_known_distributions() -> None:
    """Would catch the divergence taken the wrong way round, or in bits."""
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    found = fidelity.distance(np.log(p).astype(np.float32), np.log(q).astype(np.float32) + 7)
    assert found.mean_kl == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert found.same_top == 0.0
    three = fidelity.distance(np.zeros((1, 2), np.float32), np.array([[0, math.log(3)]], np.float32))
    assert three.mean_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)


def test_distance_over_many_tokens() -> None:
    """Would catch rows lost between the pieces that are compared at a time."""
    rng = np.random.default_rng(0)
    a = rng.normal(0, 3, (131, 50)).astype(np.float32)
    assert fidelity.distance(a, a + 1).mean_kl == pytest.approx(0, abs=1e-10)
    b = a.copy()
    b[130, 7] += 20.0
    found = fidelity.distance(a, b)
    assert found.max_kl == pytest.approx(found.mean_kl * 131)
    assert found.same_top == pytest.approx(130 / 131)
    assert found.max_logit_difference == pytest.approx(20.0, rel=1e-5)


def test_the_prose_is_long_enough(smollm2_path: Path) -> None:
    """Would catch a text cut short, which would make the mean meaningless."""
    text = prose()
    assert text.startswith("It is a truth universally acknowledged")
    assert len(Tokenizer.from_gguf(smollm2_path).encode(text)) >= 1024


def test_sources_are_long_enough(smollm2_path: Path) -> None:
    """Would catch modules that a version of Python no longer has in one file, or that have become short."""
    assert len(Tokenizer.from_gguf(smollm2_path).encode(fidelity.python_sources())) >= 2 * 8192


def test_a_short_text_is_an_error(smollm2_path: Path) -> None:
    """Would catch fewer tokens compared than the report says."""
    with pytest.raises(ConfigError, match="ask for fewer"):
        fidelity.compare(str(smollm2_path), "Hello.", 64, 1, with_reference=False)


@pytest.mark.slow
def test_kukri_is_as_close_to_float32_as_promised(smollm2_path: Path) -> None:
    """Would catch a loss of precision in any kernel: 0.0033 is what llama.cpp is allowed to lose too.

    The reference backend, in float32 throughout, must agree to the rounding of other orders of summing.
    """
    command = [sys.executable, "-m", "benchmarks.fidelity", "-m", str(smollm2_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["n_tokens"] >= 900
    assert report["kukri"]["mean_kl"] <= 0.0033
    assert report["kukri"]["same_top"] > 0.95
    assert report["kukri_reference"]["max_logit_difference"] <= 1e-3
