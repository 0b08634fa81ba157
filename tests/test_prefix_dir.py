"""`LLM(prefix_dir=...)`: what an earlier process computed, and when it may not be used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.config import RopeConfig
from kukri.errors import ConfigError
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

CONFIG = replace(tiny_config(), n_heads=2, n_kv_heads=1, d_head=32, rope=RopeConfig(10000.0, 32))
PROMPT = [int(i) for i in np.random.default_rng(1).integers(0, 200, 60)]


def ask(model: Path, directory: Path, **options: Any) -> tuple[list[int], int]:
    """(the answer of an LLM that is opened for it, the prompt's tokens that it read from disk)."""
    with LLM(model, prefix_dir=directory, n_threads=1, **options) as llm:
        result = llm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        return result.token_ids, llm.engine.allocator.n_restored


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_type": "q4"},
        {"backend": "reference", "kv_type": "q4"},
        {"backend": "reference"},
        {"backend": "torch"},
        {"rope_scaling": "dynamic", "rope_factor": 2.0},
    ],
    ids=str,
)
def test_a_later_process_reads_what_was_computed(tmp_path: Path, options: dict[str, Any]) -> None:
    """Catches an answer that a restart changes, and a prompt that is computed again."""
    model = write_tiny(tmp_path / "tiny.gguf", CONFIG)
    first, n_first = ask(model, tmp_path / "saved", **options)
    second, n_second = ask(model, tmp_path / "saved", **options)
    assert (n_first, n_second) == (0, 48)
    assert first == second


def test_other_weights_options_or_arithmetic_find_nothing(tmp_path: Path) -> None:
    """Catches keys and values of another model under the same path, or of another cache."""
    model, saved = write_tiny(tmp_path / "tiny.gguf", CONFIG), tmp_path / "saved"
    tokens, _ = ask(model, saved)
    for options in (
        {"kv_type": "q8_0"},
        {"rope_scaling": "linear", "rope_factor": 2.0},
        {"backend": "torch"},
    ):
        assert ask(model, saved, **options)[1] == 0
    stat = model.stat()
    write_tiny(model, CONFIG, random_arrays(CONFIG, seed=7))
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a copy that keeps times would
    assert ask(model, saved)[1] == 0
    write_tiny(model, CONFIG)
    assert ask(model, saved) == (tokens, 48)


def test_a_digest_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Catches a list of digests that lets another model's pages in."""
    model, saved = write_tiny(tmp_path / "tiny.gguf", CONFIG), tmp_path / "saved"
    ask(model, saved)
    (saved / "models.json").chmod(0o666)
    with pytest.raises(ConfigError, match="must not be writable by other users"):
        ask(model, saved)


def test_a_budget_without_a_directory_is_refused(tmp_path: Path) -> None:
    """Catches an option that has no effect."""
    with pytest.raises(ConfigError, match="--prefix-dir"):
        LLM(write_tiny(tmp_path / "tiny.gguf", CONFIG), prefix_bytes=1 << 20)
