"""Tensor names and `GGUFWeights`: what models get is what transformers gets from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kukri.errors import FormatError, UnsupportedError, UnusedTensorError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import gguf_name, hf_name
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.quantize import quantize
from kukri.models.rope import half_split_order
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES

N_LAYERS, D, F, V, HEADS, KV_HEADS, D_HEAD = 2, 64, 96, 40, 4, 2, 16
TYPES = ["Q4_1", "Q8_0", "Q4_0", "F16", "BF16", "F32"]
ATTENTION = "model.layers.1.self_attn"


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of an untied two-layer llama under its GGUF name."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (V, D),
        "output_norm.weight": (D,),
        "output.weight": (V, D),
    }
    for layer in range(N_LAYERS):
        for name, shape in {
            "attn_norm": (D,), "attn_q": (HEADS * D_HEAD, D), "attn_k": (KV_HEADS * D_HEAD, D),
            "attn_v": (KV_HEADS * D_HEAD, D), "attn_output": (D, HEADS * D_HEAD), "ffn_norm": (D,),
            "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
        }.items():  # fmt: skip
            found[f"blk.{layer}.{name}.weight"] = shape
    return found


def write_model(
    path: Path,
    extra: dict[str, tuple[int, ...]] | None = None,
    drop: str = "",
    keys: dict[str, Any] | None = None,
) -> None:
    """Random weights, matrices in every type in turn."""
    rng = np.random.default_rng(2)
    tensors = {}
    for i, (name, shape) in enumerate({**shapes(), **(extra or {})}.items()):
        if name != drop:
            type = QUANT_TYPES[TYPES[i % len(TYPES)] if len(shape) == 2 else "F32"]
            values = rng.standard_normal(shape).astype(np.float32)
            values = np.abs(values) if name.startswith("rope") else values
            tensors[name] = (type, quantize(values.reshape(-1, shape[-1]), type), shape)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": N_LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": D,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": D_HEAD,
        "llama.vocab_size": V,
    }
    write_gguf(path, {**metadata, **(keys or {})}, tensors)


@pytest.fixture
def source_of(tmp_path):
    """A function: arguments of `write_model` -> GGUFWeights."""

    def make(**changes: Any) -> GGUFWeights:
        write_model(tmp_path / "model.gguf", **changes)
        file = GGUFFile(tmp_path / "model.gguf")
        return GGUFWeights(file, model_config(file))

    return make


def take_all(source: GGUFWeights) -> dict[str, np.ndarray]:
    """Every tensor, dequantized, by canonical name."""
    taken = {}
    for stored_name, shape in shapes().items():
        name = hf_name(stored_name)
        assert source.has(name)
        if len(shape) == 2:
            weight = source.matrix(name, shape)
            assert (weight.name, weight.shape) == (name, shape)
            taken[name] = dequantize(weight.data, weight.type)
        else:
            taken[name] = source.vector(name, shape[0])
    return taken


def test_weights_are_those_that_transformers_loads(source_of, tmp_path):
    """q and k rows left interleaved, or permuted the wrong way; a name mapped to another tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = source_of()
    ours = take_all(source)
    source.done()
    # what `from_pretrained(gguf_file=...)` calls, without the `accelerate` package it asks for
    path = str(tmp_path / "model.gguf")
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"]))
    checkpoint = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    theirs = {name: tensor.float().numpy() for name, tensor in checkpoint["tensors"].items()}
    assert theirs.keys() == model.state_dict().keys()
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)
    raw = GGUFFile(tmp_path / "model.gguf").array("blk.1.attn_q.weight")
    assert not np.array_equal(ours[f"{ATTENTION}.q_proj.weight"], raw)  # the order does matter here


def test_biases_of_q_and_k_follow_their_rows(source_of):
    """A bias left in interleaved order next to a matrix that is not."""
    sizes = {"attn_q": HEADS * D_HEAD, "attn_k": KV_HEADS * D_HEAD, "attn_v": KV_HEADS * D_HEAD}
    layers = range(N_LAYERS)
    source = source_of(extra={f"blk.{i}.{name}.bias": (n,) for name, n in sizes.items() for i in layers})
    file = source._gguf
    for part, size in zip("qkv", sizes.values()):
        assert source.has(f"{ATTENTION}.{part}_proj.bias")
        assert not source.has("model.layers.1.mlp.up_proj.bias")
        matrix = dequantize_matrix(source, f"{ATTENTION}.{part}_proj.weight", (size, D))
        stored = file.array(f"blk.1.attn_{part}.weight")
        rows = [int(np.flatnonzero((stored == row).all(axis=1))[0]) for row in matrix]
        bias = source.vector(f"{ATTENTION}.{part}_proj.bias", size)
        np.testing.assert_array_equal(bias, file.array(f"blk.1.attn_{part}.bias")[rows])


def dequantize_matrix(source: GGUFWeights, name: str, shape: tuple[int, int]) -> np.ndarray:
    weight = source.matrix(name, shape)
    return dequantize(weight.data, weight.type)


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_half_split_rotation_equals_interleaved_rotation(rotary_dim):
    """An order that is wrong when only a part of a head rotates: pairs (2i, 2i + 1) of the file's rows
    and (i, i + rotary_dim / 2) of ours must rotate alike."""
    rng = np.random.default_rng(4)
    rows, x = rng.standard_normal((2 * D_HEAD, 24)), rng.standard_normal(24)
    angles = 3 * 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    cos, sin = np.cos(angles), np.sin(angles)

    stored = (rows @ x).reshape(2, D_HEAD)
    even, odd = stored[:, 0:rotary_dim:2], stored[:, 1:rotary_dim:2]
    interleaved = [even * cos - odd * sin, even * sin + odd * cos, stored[:, rotary_dim:]]

    ours = (rows[half_split_order(2 * D_HEAD, D_HEAD, rotary_dim)] @ x).reshape(2, D_HEAD)
    half = rotary_dim // 2
    low, high = ours[:, :half], ours[:, half:rotary_dim]
    half_split = [low * cos - high * sin, low * sin + high * cos, ours[:, rotary_dim:]]
    for a, b in zip(interleaved, half_split):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_matrices_are_views_of_the_file(source_of):
    """A copy of every matrix at load, which doubles the memory of a model."""
    source = source_of()
    weight = source.matrix("model.embed_tokens.weight", (V, D))
    assert np.shares_memory(weight.data, source._gguf.data("token_embd.weight"))
    assert not weight.data.flags.writeable


def test_a_vector_may_be_stored_in_half_precision(tmp_path):
    """Norm weights of an F16 file read as float32 bytes."""
    path = tmp_path / "model.gguf"
    write_model(path)
    file = GGUFFile(path)
    tensors = {name: (t.type, file.data(name), t.shape) for name, t in file.tensors.items()}
    norm = np.linspace(0.5, 1.5, D, dtype=np.float16)
    tensors["output_norm.weight"] = (QUANT_TYPES["F16"], norm, (D,))
    write_gguf(tmp_path / "half.gguf", dict(file.metadata), tensors)
    half = GGUFFile(tmp_path / "half.gguf")
    vector = GGUFWeights(half, model_config(half)).vector("model.norm.weight", D)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, norm.astype(np.float32))


def test_missing_and_misshapen_tensors_are_named(source_of):
    """A KeyError, or a matrix read with rows of another width."""
    source = source_of(drop="blk.1.ffn_up.weight")
    with pytest.raises(FormatError, match=r"model.gguf, tensor 'blk.1.ffn_up.weight' is missing"):
        source.matrix("model.layers.1.mlp.up_proj.weight", (F, D))
    with pytest.raises(FormatError, match=r"'blk.0.ffn_up.weight' has shape \(96, 64\).*asks for \(64, 96\)"):
        source.matrix("model.layers.0.mlp.up_proj.weight", (D, F))
    with pytest.raises(FormatError, match=r"'output_norm.weight' has shape \(64,\).*\(65,\)"):
        source.vector("model.norm.weight", D + 1)


def test_tensors_nobody_took_are_listed(source_of):
    """A tensor that changes the model's output ignored in silence."""
    source = source_of(extra={"blk.0.attn_q_norm.weight": (D_HEAD,), "mystery.weight": (3,)})
    take_all(source)
    with pytest.raises(
        UnusedTensorError, match=r"llama takes: 'blk.0.attn_q_norm.weight', 'mystery.weight'$"
    ):
        source.done()
    with pytest.raises(UnusedTensorError, match=r"and 13 more$"):
        source_of().done()


def test_rope_factors_are_taken_by_the_configuration(source_of):
    """A Llama 3 file refused for a tensor that no layer takes."""
    source = source_of(extra={"rope_freqs.weight": (D_HEAD // 2,)})
    take_all(source)
    source.done()


def test_types_that_do_not_run_are_named(tmp_path):
    """Blocks given to kernels that would read them as something else."""
    path = tmp_path / "model.gguf"
    write_model(path)
    file = GGUFFile(path)
    tensors = {name: (t.type, file.data(name), t.shape) for name, t in file.tensors.items()}
    rows = np.zeros((V, QUANT_TYPES["Q8_1"].row_bytes(D)), np.uint8)
    tensors["token_embd.weight"] = (QUANT_TYPES["Q8_1"], rows, (V, D))
    write_gguf(tmp_path / "other.gguf", dict(file.metadata), tensors)
    other = GGUFFile(tmp_path / "other.gguf")
    with pytest.raises(
        UnsupportedError, match=r"'token_embd.weight' must be of type F32, F16, .*IQ4_XS.*, not Q8_1"
    ):
        GGUFWeights(other, model_config(other)).matrix("model.embed_tokens.weight", (V, D))


def test_names_agree_with_the_gguf_package():
    """A tensor name that no converter writes, or one mapped to the wrong module."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, N_LAYERS)
    for stored_name in shapes():
        name = hf_name(stored_name)
        assert gguf_name(name) == stored_name
        assert table.get_name(name.removesuffix(".weight")) == stored_name.removesuffix(".weight")
    assert gguf_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("QWEN3", "model.layers.3.self_attn.q_norm.weight"),
        ("QWEN3", "model.layers.3.self_attn.k_norm.weight"),
        ("PHI3", "model.layers.3.self_attn.qkv_proj.weight"),
        ("PHI3", "model.layers.3.mlp.gate_up_proj.weight"),
        ("PHI2", "model.layers.3.self_attn.dense.bias"),
        ("PHI2", "model.layers.3.mlp.fc1.bias"),
        ("PHI2", "model.layers.3.mlp.fc2.weight"),
        ("PHI2", "model.final_layernorm.bias"),
        ("PHI2", "lm_head.bias"),
    ],
)
def test_names_of_other_architectures_agree_with_the_gguf_package(architecture, name):
    """A module of one architecture mapped to a name that its converter does not write."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 8)
    ours = {"PHI2": "phi"}.get(architecture, architecture.lower())
    assert gguf_name(name, ours) == table.get_name(name, try_suffixes=(".weight", ".bias"))


@pytest.mark.parametrize(
    "name", ["", "weight", "model.layers.x.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight",
             "model.layers.0.mlp.up_proj", "blk.0.attn_q.weight", "model.norm.scale", "mlp.up_proj.weight"]
)  # fmt: skip
def test_unknown_names_are_errors(name):
    """A name that is nearly right mapped to something."""
    with pytest.raises(UnsupportedError, match="is not supported"):
        gguf_name(name)


def test_every_weight_of_the_real_model_is_taken(smollm2_path):
    """Names or shapes that fit only the models of the tests."""
    file = GGUFFile(smollm2_path)
    source = GGUFWeights(file, model_config(file))
    n_parameters = 0
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2:
            n_parameters += int(np.prod(source.matrix(hf_name(name), tensor.shape).shape))
        else:
            n_parameters += source.vector(hf_name(name), tensor.shape[0]).size
    source.done()
    assert n_parameters == 134_515_008
