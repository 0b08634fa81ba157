"""Models whose sizes no CPU kernel takes, such as the tiny ones of other projects: they run all the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import tiny_config, write_tiny

from kukri import LLM
from kukri.config import RopeConfig
from kukri.errors import KernelSizeError


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 100},
        {"d_head": 24, "rope": RopeConfig(10000.0, 24)},
        {"d_head": 8, "rope": RopeConfig(10000.0, 8)},
        {"d_ffn": 50},
    ],
    ids=str,
)
def test_a_model_of_odd_sizes_runs_on_the_reference(
    tmp_path: Path, sizes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a refusal, an answer other than the reference's, and slowness that nobody is told of."""
    path = write_tiny(tmp_path / "odd.gguf", replace(tiny_config(), **sizes))
    with pytest.raises(KernelSizeError, match="multiples of 16"):
        LLM(path, backend="cpu")
    caplog.set_level(logging.WARNING, "kukri.loading")
    with LLM(path) as llm, LLM(path, backend="reference") as reference:
        assert llm.engine_config.backend == "reference"
        assert "reference backend, which is slow" in caplog.text
        ids = list(range(40))
        np.testing.assert_array_equal(llm.logits(ids), reference.logits(ids))
        answers = [one.generate(ids, max_tokens=8, temperature=0).token_ids for one in (llm, reference)]
        assert answers[0] == answers[1]
