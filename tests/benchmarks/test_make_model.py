"""The maker of models of random weights: files that run, and look as they claim."""

from __future__ import annotations

import subprocess
import sys
from math import prod

import gguf
import numpy as np
import pytest

from benchmarks.make_model import DEVIATION, SHAPES, make_model, random_rows, tensor_shapes
from kukri import LLM, SamplingParams
from kukri.formats.gguf.reader import GGUFFile
from kukri.quant.blocks import WRITTEN, dequantize
from kukri.quant.types import QUANT_TYPES

TEXT = "the quick brown fox jumps over 13 lazy dögs"


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "Q8_K"])
def test_rows_are_finite_and_of_the_deviation_asked_for(name):
    """Scales that overflow, minimums that shift every weight, so that activations grow."""
    rows = random_rows(np.random.default_rng(5), QUANT_TYPES[name], (64, 1024))
    weights = dequantize(rows, QUANT_TYPES[name])
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(DEVIATION, rel=0.05)
    assert abs(weights.mean()) < 0.12 * DEVIATION


@pytest.mark.parametrize("mix", ["Q4_K_M", "F16"])
def test_the_file_runs(mix, tmp_path):
    """A file that does not load, a vocabulary that text cannot be written in, logits that are all alike."""
    path = tmp_path / "m.gguf"
    make_model(path, SHAPES["tiny"], mix, "tiny")
    with LLM(path, max_context=64, backend="reference") as llm:
        ids = llm.tokenizer.encode(TEXT)
        assert llm.tokenizer.decode(ids) == TEXT
        assert len(ids) < len(TEXT)
        logits = llm.logits(ids)
        assert np.isfinite(logits).all()
        assert 0.01 < logits.std() < 100
        assert len(llm.generate(TEXT, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4
        assert [layer.use_rope for layer in llm.config.layers] == [True, True, True, False]
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["token_embd.weight"] == {"Q4_K_M": "Q6_K", "F16": "F16"}[mix]
    assert types["blk.1.attn_q.weight"] == {"Q4_K_M": "Q4_K", "F16": "F16"}[mix]


def test_the_program(tmp_path):
    """A program that does not start, or writes another shape than it was asked for."""
    path = tmp_path / "m.gguf"
    command = [sys.executable, "-m", "benchmarks.make_model", "tiny", str(path), "--type", "Q8_0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{path}: ")
    with GGUFFile(path) as file:
        assert file.metadata["smollm3.block_count"] == SHAPES["tiny"].n_layers
        assert file.tensors["token_embd.weight"].type.name == "Q8_0"


def test_the_3b_shape_is_that_of_smollm3():
    """A file that measures some other model."""
    shape = SHAPES["smollm3-3b"]
    assert (shape.d_model, shape.d_ffn, shape.n_layers) == (2048, 11008, 36)
    assert (shape.n_heads, shape.n_kv_heads, shape.d_head, shape.n_vocab) == (16, 4, 128, 128256)


def test_the_shape_of_qwen2_5_has_the_weights_of_the_model():
    """A missing bias, another width: the checkpoint has 494,032,768 parameters."""
    shapes = tensor_shapes(SHAPES["qwen2.5-0.5b"])
    assert sum(prod(dims) for dims in shapes.values()) == 494_032_768
    assert shapes["blk.0.attn_k.bias"] == (128,)


def test_the_shapes_of_mixtures_are_those_of_the_models():
    """Experts, groups or shared experts of other sizes: 35B has 40 layers and a head, Nano 52 layers."""
    shapes = tensor_shapes(SHAPES["qwen3.5-35b-a3b-4l"])
    of_layers = sum(prod(dims) for name, dims in shapes.items() if name.startswith("blk."))
    head = 2048 * 248_320
    assert 10 * of_layers + 2 * head == pytest.approx(35.1e9, rel=0.02)
    shapes = tensor_shapes(SHAPES["nemotron-3-nano-6l"])
    sizes = [sum(prod(d) for name, d in shapes.items() if name.startswith(f"blk.{i}.")) for i in range(6)]
    assert 23 * (sizes[0] + sizes[1]) + 6 * sizes[5] + 2 * 2688 * 131_072 == pytest.approx(31.6e9, rel=0.02)
