"""Llama against transformers on tiny random models: logits and the residual stream before each block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri.config import LayerConfig, RopeConfig
from kukri.errors import FormatError, UnsupportedError, UnusedTensorError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.kernels.backend import Backend
from kukri.kernels.quantize import quantize
from kukri.kernels.rope_rows import RopeRows
from kukri.models import load_model
from kukri.models.layers import LayerNorm
from kukri.models.llama import Block, Llama
from kukri.models.rope import rope_frequencies
from kukri.models.trace import Trace
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import Driver, TorchSource, hf_forward, make_pair, random_ids
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch

# Two orders of float32 sums: 60 to 100 terms each, through 2 or 3 layers. Values are of size 1 to 7.
TOLERANCE = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "gqa1": {"n_heads": 4, "n_kv_heads": 4},
    "gqa3-head64": {"n_heads": 3, "n_kv_heads": 1, "d_head": 64, "tied": False, "n_layers": 3},
    "gqa4-head32": {"n_heads": 4, "n_kv_heads": 1, "d_head": 32, "theta": 100000.0},
    "biases": {"n_heads": 4, "n_kv_heads": 2, "bias": True, "tied": False},
}


def residual_recorder(n_layers: int) -> tuple[dict[str, list], list[np.ndarray]]:
    """Hooks on each block's hook_resid_pre, and the list they append copies to."""
    seen: list[np.ndarray] = []
    hook = lambda name, x: seen.append(x.copy())  # noqa: E731
    return {f"blocks.{i}.hook_resid_pre": [hook] for i in range(n_layers)}, seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_tokens", [1, 3, 65])
def test_logits_and_residuals_match_transformers(shape: str, n_tokens: int, reference: Backend) -> None:
    """Any mistake in the arithmetic of a layer; the residuals say which, where logits would wash it out."""
    hf, config, source = make_pair(**SHAPES[shape])
    model = load_model(source, config)
    ids = random_ids(n_tokens, config.n_vocab)
    want_logits, want_residuals = hf_forward(hf, ids)
    hooks, residuals = residual_recorder(config.n_layers)
    got_logits = Driver(model, reference, hooks).run(ids, [n_tokens])
    assert len(residuals) == len(want_residuals) == config.n_layers
    for got, want in zip(residuals, want_residuals):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got_logits, want_logits, atol=TOLERANCE, rtol=0)


def test_the_shapes_exercise_what_they_claim() -> None:
    """A tiny config that stopped being grouped, untied or biased, so that its parity would prove nothing."""
    configs = {name: make_pair(**kw)[1] for name, kw in SHAPES.items()}
    assert {c.n_heads // c.n_kv_heads for c in configs.values()} >= {1, 3, 4}
    assert {c.tie_embeddings for c in configs.values()} == {True, False}
    assert {c.d_head for c in configs.values()} >= {16, 64}
    _, _, biased = make_pair(**SHAPES["biases"])
    assert biased.has("model.layers.0.self_attn.q_proj.bias")
    assert not np.allclose(biased.arrays["model.norm.weight"], 1.0)


def test_logits_depend_on_position_and_on_every_earlier_token(reference: Backend) -> None:
    """Attention so flat, or RoPE so small, in the tiny models that losing either would pass."""
    _, config, source = make_pair()
    model = load_model(source, config)
    ids = random_ids(20, config.n_vocab)
    base = Driver(model, reference).run(ids, [20])[-1]
    for changed in ([ids[0] ^ 1, *ids[1:]], [ids[1], ids[0], *ids[2:]]):
        assert np.abs(Driver(model, reference).run(changed, [20])[-1] - base).max() > 100 * TOLERANCE


@pytest.mark.parametrize("shape", ["gqa3-head64", "gqa4-head32"])
@pytest.mark.parametrize("chunks", [[1], [7], [64], [3, 16, 1, 40]])
def test_chunking_a_prompt_changes_no_bit(shape: str, chunks: list[int], backend: Backend) -> None:
    """A mask or a sum that depends on how a prompt was cut, as in a causal mask of [t, t] after a cache."""
    _, config, source = make_pair(**SHAPES[shape])
    model = load_model(source, config)
    ids = random_ids(101, config.n_vocab)
    whole = Driver(model, backend, kv_type="f16").run(ids, [101])
    np.testing.assert_array_equal(Driver(model, backend, kv_type="f16").run(ids, chunks), whole)


def test_a_hook_that_only_looks_changes_no_bit(backend: Backend) -> None:
    """A plan cut at its taps that computes something else than the whole one."""
    _, config, source = make_pair()
    model = load_model(source, config)
    ids = random_ids(33, config.n_vocab)
    want = Driver(model, backend, kv_type="f16").run(ids, [20, 1])
    seen: set[str] = set()
    hooks = {name: [lambda n, x: seen.add(n)] for name in Trace(model).taps}
    got = Driver(model, backend, hooks, kv_type="f16").run(ids, [20, 1])
    np.testing.assert_array_equal(got, want)
    assert seen == set(Trace(model).taps)


@pytest.mark.parametrize(
    "name", ["hook_embed", "blocks.1.attn.hook_z", "blocks.1.attn.hook_v", "blocks.0.mlp.hook_post"]
)
def test_a_hook_that_edits_is_seen_downstream(name: str, backend: Backend, reference: Backend) -> None:
    """An edit lost because a backend had derived something from the value before the hook ran."""
    _, config, source = make_pair()
    model = load_model(source, config)
    ids = random_ids(18, config.n_vocab)

    def edit(hook_name: str, x: np.ndarray) -> np.ndarray:
        x[:, 3] = 0.5
        return x * np.float32(0.5)

    plain = Driver(model, reference).run(ids, [18])
    want = Driver(model, reference, {name: [edit]}).run(ids, [18])
    got = Driver(model, backend, {name: [edit]}, kv_type="f16").run(ids, [18])
    assert np.abs(want - plain).max() > 0.1
    np.testing.assert_allclose(got, want, atol=0.02)  # float16 keys and values


def test_nope_layers_do_not_rotate(reference: Backend) -> None:
    """RoPE applied on a NoPE layer, or skipped on the others (the flag is inverted in SmolLM3's config)."""
    _, config, source = make_pair(n_layers=2, layers=[LayerConfig(), LayerConfig(use_rope=False)])
    model = load_model(source, config)
    assert {f"blocks.{i}.attn.hook_rot_q" for i in range(2)} <= set(Trace(model).taps)
    ids = random_ids(9, config.n_vocab)
    hf = make_pair(n_layers=2)[0]
    attention = hf.model.layers[1].self_attn
    forward = attention.forward

    def without_rotation(*args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return forward(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    rotated, _ = hf_forward(hf, ids)
    attention.forward = without_rotation
    want, _ = hf_forward(hf, ids)
    got = Driver(model, reference).run(ids, [4])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    assert np.abs(rotated - want).max() > 100 * TOLERANCE


def test_layers_have_their_own_rope_and_scale(backend: Backend, reference: Backend) -> None:
    """One RoPE or one scale for all layers, and rows of cos and sin that are not there yet: the text is
    longer than what is computed at first."""
    own = RopeConfig(500.0, 16)
    layers = [LayerConfig(), LayerConfig(rope=own, attention_scale=0.4)]
    _, config, source = make_pair(max_context=512, layers=layers)
    model = load_model(source, config)
    ids = random_ids(400, config.n_vocab)
    hf = make_pair(max_context=512)[0]
    same, _ = hf_forward(hf, ids)
    attention = hf.model.layers[1].self_attn
    attention.scaling = 0.4
    rows = RopeRows(rope_frequencies(own, 512))
    rows.ensure(400)
    cos, sin = (torch.from_numpy(np.hstack([part, part])[None, :400]) for part in (rows.cos, rows.sin))
    forward = attention.forward
    attention.forward = lambda *args, position_embeddings, **kwargs: forward(
        *args, position_embeddings=(cos, sin), **kwargs
    )
    want, _ = hf_forward(hf, ids)
    got = Driver(model, reference, max_tokens=200).run(ids, [200, 50])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    assert np.abs(same - want).max() > 100 * TOLERANCE
    rounded = Driver(model, reference, kv_type="f16").run(ids, [200, 1])
    got = Driver(model, backend, kv_type="f16").run(ids, [200, 1])
    np.testing.assert_allclose(got, rounded, atol=0.02, rtol=0)  # float16 keys and values


def test_a_window_hides_older_tokens(backend: Backend) -> None:
    """A window ignored, off by one, or counted from the chunk. One layer: the last token then sees exactly
    the window, as if the older tokens had never been."""
    _, config, source = make_pair(n_layers=1, layers=[LayerConfig(window=5)])
    model = load_model(source, config)
    ids = random_ids(40, config.n_vocab)
    logits = Driver(model, backend, kv_type="f16").run(ids, [40])
    np.testing.assert_array_equal(Driver(model, backend, kv_type="f16").run(ids, [9, 3, 1]), logits)
    for position, changes in ((34, False), (35, True)):
        changed = [*ids]
        changed[position] ^= 1
        last = Driver(model, backend, kv_type="f16").run(changed, [40])[-1]
        assert (last != logits[-1]).any() == changes, position


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_gives_the_same_model(weight_type: str, tmp_path: Path, reference: Backend) -> None:
    """Rows of q and k in llama.cpp's order, transposed or misnamed tensors, another dequantization."""
    hf, config, source = make_pair(d_model=64, n_kv_heads=2, n_layers=2)
    kind = QUANT_TYPES[weight_type]
    rounded = {
        name: array if array.ndim == 1 else dequantize(quantize(array, kind), kind)
        for name, array in source.arrays.items()
    }
    assert weight_type == "F32" or any((rounded[n] != a).any() for n, a in source.arrays.items())
    hf.load_state_dict({name: torch.from_numpy(array) for name, array in rounded.items()}, strict=False)
    path = write_tiny(tmp_path / "tiny.gguf", config, source.arrays, weight_type)
    gguf = GGUFFile(path)
    read = model_config(gguf)
    assert replace(read, name="", norm_eps=1e-5) == config  # kept in float32
    model = load_model(GGUFWeights(gguf, read), read)
    ids = random_ids(33, config.n_vocab)
    want, _ = hf_forward(hf, ids)
    np.testing.assert_allclose(Driver(model, reference).run(ids, [33]), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("d_head", [16, 64, 128])
def test_rope_angles_are_transformers_own(theta: float, d_head: int) -> None:
    """Frequencies in another rounding: one unit in the last place is 5e-4 radians at position 8,192."""
    hf = make_pair(n_heads=1, n_kv_heads=1, d_head=d_head, theta=theta, max_context=8192)[0]
    table = RopeRows(rope_frequencies(RopeConfig(theta, d_head), 8192))
    table.ensure(8192)
    positions = torch.arange(8192)[None]
    cos, sin = hf.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    np.testing.assert_allclose(table.cos, cos[0, :, : d_head // 2].numpy(), atol=2e-7)
    np.testing.assert_allclose(table.sin, sin[0, :, : d_head // 2].numpy(), atol=2e-7)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once(tied: bool) -> None:
    """A tensor missing from the listing, or a tied matrix counted twice."""
    hf, config, source = make_pair(tied=tied, bias=True)
    model = load_model(source, config)
    assert model.n_parameters == sum(p.numel() for p in hf.parameters())
    assert {p.name for p in model.parameters} == set(source.arrays)
    listed = {p.name: p.shape for p in model.parameters}
    assert all(listed[name] == array.shape for name, array in source.arrays.items())
    assert sum(p.n_bytes for p in model.parameters) == 4 * model.n_parameters


def test_tap_names_are_those_of_a_step(reference: Backend) -> None:
    """A list of hooks that differs from what the model really calls."""
    _, config, source = make_pair()
    model = load_model(source, config)
    names = Trace(model).taps
    assert len(set(names)) == len(names)
    seen: list[str] = []
    Driver(model, reference, {name: [lambda n, x: seen.append(n)] for name in names}).run([1, 2], [2])
    assert seen == names


def test_a_checkpoint_must_fit_exactly() -> None:
    """A missing, superfluous or wrongly shaped tensor that goes unnoticed."""
    _, config, source = make_pair()
    missing = dict(source.arrays)
    del missing["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(FormatError, match="up_proj"):
        load_model(TorchSource({k: torch.from_numpy(v) for k, v in missing.items()}), config)
    extra = {k: torch.from_numpy(v) for k, v in source.arrays.items()} | {
        "model.extra.weight": torch.zeros(2)
    }
    with pytest.raises(UnusedTensorError, match="extra"):
        load_model(TorchSource(extra), config)


def test_an_unknown_architecture_lists_the_known() -> None:
    """A KeyError."""
    _, config, source = make_pair()
    with pytest.raises(UnsupportedError, match=r"'mamba'.*llama"):
        load_model(source, replace(config, architecture="mamba"))


def test_what_attention_and_the_mlp_add(backend: Backend) -> None:
    """A tap on a sum that already holds the residual, or another result once someone listens."""
    _, config, source = make_pair()
    model = load_model(source, config)
    ids = random_ids(20, config.n_vocab)
    seen: dict[str, np.ndarray] = {}
    names = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
    hooks = {f"blocks.1.hook_{n}": [lambda name, x: seen.update({name: x.copy()})] for n in names}
    Driver(model, backend, hooks, kv_type="f16").run(ids, [20])
    pre, attention, mid, mlp, post = (seen[f"blocks.1.hook_{n}"] for n in names)
    np.testing.assert_array_equal(pre + attention, mid)
    np.testing.assert_array_equal(mid + mlp, post)
    assert np.abs(attention).max() > 0.1
    zero = {
        f"blocks.{i}.hook_{n}": [lambda name, x: np.zeros_like(x)]
        for i in (0, 1)
        for n in ("attn_out", "mlp_out")
    }
    end: list[np.ndarray] = []
    zero["blocks.1.hook_resid_post"] = [lambda name, x: end.append(x.copy())]
    zero["hook_embed"] = [lambda name, x: end.append(x.copy())]
    Driver(model, backend, zero, kv_type="f16").run(ids, [20])
    np.testing.assert_array_equal(end[0], end[1])


def test_other_parts_are_those_that_a_model_has() -> None:
    """Catches a part under a misspelled name, which no layer would read, and a model that changes another."""
    other = Llama.of(block_type=Block.of(norm_type=LayerNorm))
    assert issubclass(other, Llama)
    assert Block.norm_type is not LayerNorm
    assert Llama.block_type is Block
    with pytest.raises(AttributeError, match="norm_tpye"):
        Block.of(norm_tpye=LayerNorm)
