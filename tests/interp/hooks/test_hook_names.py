"""Names, shapes and values against TransformerLens, by the facts of names.json."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kukri.errors import HookError
from kukri.interp.hooks.hook_names import full_name
from tests.interp.tl_models import ENCODERS, FACTS, IDS, NAMES, probe, session
from tests.lazy_imports import lazy_imports
from tests.models import made_models, tiny_models

with lazy_imports():
    import torch

EXPECTED = json.loads(FACTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*NAMES, *ENCODERS])
def test_every_name_has_the_shape_and_the_value_of_transformer_lens(name):
    """A name that is missing, heads side by side, a norm's weight where it does not belong, a wrong mask."""
    _, cache = session(name).run_with_cache(IDS)
    assert len(EXPECTED[name]) > 80
    for key, (shape, expected) in EXPECTED[name].items():
        value = cache[key]
        assert list(value.shape) == shape, key
        assert probe(value) == pytest.approx(expected, abs=2e-4 * max(1.0, abs(expected))), key


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "phi", "deepseek_v2", "nemotron_h_moe"])
def test_the_cpu_backend_agrees(name):
    """A tap of the CPU backend that shows a buffer before or after its time."""
    _, expected = session(name).run_with_cache(IDS)
    _, cache = session(name, "cpu").run_with_cache(IDS)
    assert list(cache) == list(expected)
    for key in expected:
        want = np.maximum(expected[key], -1e4)  # masked scores are as low as numbers go
        scale = max(1.0, float(np.abs(want[want > -1e4]).max()))
        np.testing.assert_allclose(np.maximum(cache[key], -1e4), want, atol=6e-3 * scale, err_msg=key)


@pytest.mark.parametrize("name", ["smollm3", "starcoder2", "deepseek_v2"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_reading_changes_no_bit(name, backend):
    """Taps, or scores computed next to the kernel, that change what they show."""
    own = session(name, backend)
    plain = own.run_with_hooks(IDS)
    logits, _ = own.run_with_cache(IDS)
    np.testing.assert_array_equal(logits, plain)
    seen = own.run_with_hooks(IDS, [("blocks.1.attn.hook_pattern", lambda x, hook: None)])
    np.testing.assert_array_equal(seen, plain)


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite"])
def test_patterns_of_latent_attention_are_transformers(name):
    """Scores of absorbed heads in another scale, or of another head's keys."""
    own, hf = session(name), made_models.make(name)[0]
    _, cache = own.run_with_cache(IDS)
    with torch.no_grad():
        attentions = hf(torch.from_numpy(IDS.astype(np.int64)), output_attentions=True).attentions
    for layer, wanted in enumerate(attentions):
        found = cache[f"blocks.{layer}.attn.hook_pattern"]
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
        assert cache[f"blocks.{layer}.attn.hook_z"].shape == (1, tiny_models.N_TOKENS, tiny_models.HEADS, 16)
    assert own.weights.W_O.shape == (4, tiny_models.HEADS, 16, tiny_models.D)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("q", 3), "blocks.3.attn.hook_q"),
        (("resid_pre", -1), "blocks.3.hook_resid_pre"),
        (("scale", 2, "ln1"), "blocks.2.ln1.hook_scale"),
        (("attn", 1), "blocks.1.attn.hook_pattern"),
        (("post", 1), "blocks.1.mlp.hook_post"),
        (("mlp_out", 0), "blocks.0.hook_mlp_out"),
        ("k3", "blocks.3.attn.hook_k"),
        ("scale1ln2", "blocks.1.ln2.hook_scale"),
        ("embed", "hook_embed"),
        ("normalized", "ln_final.hook_normalized"),
        ("blocks.0.hook_out", "blocks.0.hook_out"),
    ],
)
def test_short_names(key, name):
    """A short name that leads elsewhere than in TransformerLens."""
    assert full_name(key, 4) == name
    assert name in session("llama").points


def test_unknown_names_say_which_are_near():
    """A misspelt name that captures nothing."""
    with pytest.raises(
        HookError, match=r"'blocks.0.hook_residpre' was not found: did you mean blocks.0.hook_resid_pre"
    ):
        session("llama").run_with_cache([5, 6], "blocks.0.hook_residpre")


@pytest.mark.parametrize("name", ["smollm3", "phi", "phi3", "starcoder2"])
def test_weights_make_what_they_are_named_for(name):
    """A transposed weight, heads in another order, the bias of another matrix, gate and up exchanged."""
    own = session(name)
    _, cache = own.run_with_cache(IDS)
    w, n_kv = own.weights, tiny_models.TINY[name].n_kv_heads
    assert w.W_Q.shape == (4, 4, 64, 16)
    assert w.W_K.shape == w.W_V.shape == (4, n_kv, 64, 16)
    assert w.W_O.shape == (4, 4, 16, 64)
    assert w.W_out.shape == (4, 96, 64)
    assert (w.W_E.shape, w.W_U.shape, w.b_U.shape) == ((80, 64), (64, 80), (80,))
    for layer in (0, 3):
        normed = cache[f"blocks.{layer}.ln1.hook_out"]
        for x in "qkv":
            made = np.einsum("btd,hdk->bthk", normed, w.layer(f"W_{x.upper()}", layer))
            np.testing.assert_allclose(made + w.layer(f"b_{x.upper()}", layer), cache[x, layer], atol=1e-4)
        mixed = np.einsum("bthk,hkd->btd", cache["z", layer], w.W_O[layer]) + w.b_O[layer]
        np.testing.assert_allclose(mixed, cache["attn_out", layer], atol=1e-4)
        read = cache[f"blocks.{layer}.mlp.hook_in"]
        up = "pre_linear" if ("pre_linear", layer) in cache else "pre"
        np.testing.assert_allclose(read @ w.W_in[layer] + w.b_in[layer], cache[up, layer], atol=1e-4)
        if up == "pre_linear":
            np.testing.assert_allclose(
                read @ w.layer("W_gate", layer) + w.b_gate[layer], cache["pre", layer], atol=1e-4
            )
        out = cache["post", layer] @ w.W_out[layer] + w.b_out[layer]
        np.testing.assert_allclose(out, cache["mlp_out", layer], atol=1e-4)
    logits = cache["unembed.hook_in"] @ w.W_U + w.b_U
    np.testing.assert_allclose(logits, cache["unembed.hook_out"], atol=1e-4)
    with pytest.raises(AttributeError, match="W_X"):
        _ = w.W_X
