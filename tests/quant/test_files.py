"""Files of each weight type: the reference backend runs them all, a backend without kernels says so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import MissingKernelError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.cpu.pack.layouts import LAYOUTS
from kukri.quant.blocks import BLOCKS
from kukri.quant.types import PACKED, QUANT_TYPES
from tests.random_blocks import dequantized_by_gguf, random_rows
from tests.tiny_gguf import tiny_config, write_tiny

NAMES = [type.name for type in PACKED]
# inputs of every matrix are a multiple of 256, the block size of K-quants
CONFIG = replace(tiny_config(), d_model=256, n_heads=16, n_kv_heads=4, d_ffn=256)
PROMPT = [72, 101, 108, 108, 111]


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A model with every matrix in one type, and the same model dequantized to F32 by the `gguf` package."""
    path, f32_path = folder / f"{name}.gguf", folder / f"{name}-as-F32.gguf"
    rng = np.random.default_rng(5)
    f32 = QUANT_TYPES["F32"]
    with GGUFFile(write_tiny(folder / "F32.gguf", CONFIG)) as file:
        tensors = {key: (t.type, np.array(file.data(key)), t.shape) for key, t in file.tensors.items()}
        metadata = dict(file.metadata)
    f32_tensors = dict(tensors)
    for key, (_, _, shape) in tensors.items():
        if len(shape) == 2:
            rows = random_rows(rng, name, shape)
            tensors[key] = (QUANT_TYPES[name], rows, shape)
            f32_tensors[key] = (f32, dequantized_by_gguf(rows, name).view(np.uint8), shape)
    write_gguf(path, metadata, tensors)
    write_gguf(f32_path, metadata, f32_tensors)
    return path, f32_path


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_backend_runs_every_type(name, tmp_path):
    """A type that dequantizes but does not load, or whose rows are cut or ordered otherwise."""
    path, f32_path = write_pair(tmp_path, name)
    with LLM(path, backend="reference") as ours, LLM(f32_path, backend="reference") as expected:
        logits = ours.logits(PROMPT)
        assert np.isfinite(logits).all()
        assert np.ptp(logits) > 1
        np.testing.assert_array_equal(logits, expected.logits(PROMPT))


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_backend_names_a_type_without_kernels(name, tmp_path, monkeypatch):
    """A KeyError inside a plan, or a refusal that does not say which types do run."""
    monkeypatch.delitem(LAYOUTS, QUANT_TYPES[name].tiles.name, raising=False)
    path, _ = write_pair(tmp_path, name)
    listed = re.escape(", ".join(BLOCKS))
    with pytest.raises(
        MissingKernelError, match=rf"{name} \(.+\.weight\) is not supported by the CPU backend: use {listed}"
    ):
        LLM(path, backend="cpu")


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K"])
def test_types_that_do_not_run_are_refused_at_load(name, tmp_path):
    """A file of a known but unsupported type that fails at its first token, or is misread."""
    type = QUANT_TYPES[name]
    with GGUFFile(write_tiny(tmp_path / "F32.gguf", CONFIG)) as file:
        tensors = {key: (t.type, np.array(file.data(key)), t.shape) for key, t in file.tensors.items()}
        metadata = dict(file.metadata)
    shape = tensors["blk.1.ffn_up.weight"][2]
    rows = np.zeros((shape[0], type.row_bytes(shape[1])), np.uint8)
    tensors["blk.1.ffn_up.weight"] = (type, rows, shape)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(
        UnsupportedError, match=rf"'blk.1.ffn_up.weight' must be of type {', '.join(BLOCKS)}, not {name}"
    ):
        LLM(tmp_path / "model.gguf", backend="reference")
