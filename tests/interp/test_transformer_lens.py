"""Edits and methods of the cache next to TransformerLens, if installed: `pytest -m slow tests/interp`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.interp import transformer_lens_bridge
from kukri import LLM
from kukri.terminal.convert import quantized_file
from tests.interp.tl_models import IDS, bridge, session, with_batch
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

pytestmark = pytest.mark.slow
pytest.importorskip("transformer_lens")


@pytest.fixture(scope="module", params=["smollm3", "qwen3", "phi", "phi3", "olmoe", "lfm2"])
def pair(request):
    with torch.no_grad():
        yield session(request.param), bridge(request.param)


def test_edits_by_hooks_change_what_they_do_in_transformer_lens(pair):
    """An edit that is another's: of the stream instead of a norm's input, of all heads, before a rotation."""
    own, theirs = pair
    ids = torch.from_numpy(IDS).long()

    def edit(value, hook):
        value[:, 2:9] = value[:, 2:9] * 0.5 + 0.1
        return value

    fired = theirs.run_with_cache(ids)[1]
    n_edited = 0
    for name, point in own.points.items():
        if not point.edit_tap or point.form == "normalized" or name not in fired:
            continue
        if point.layer not in (1, None) or with_batch(name, fired[name]) is not fired[name]:
            continue  # TransformerLens flattens batch and position of routers
        expected = theirs.run_with_hooks(ids.clone(), fwd_hooks=[(name, edit)]).numpy()
        np.testing.assert_allclose(own.run_with_hooks(IDS, [(name, edit)]), expected, atol=1e-3, err_msg=name)
        n_edited += 1
    assert n_edited > 20


def test_a_cache_of_transformer_lens(pair):
    """Arrays under other names, or a batch that their methods take for positions."""
    own, theirs = pair
    cache = own.run_with_cache(IDS)[1]
    made = cache.to_transformer_lens(theirs)
    fired = theirs.run_with_cache(torch.from_numpy(IDS).long())[1]
    assert isinstance(made, type(fired))
    np.testing.assert_array_equal(made["resid_post", 1].numpy(), cache["resid_post", 1])
    np.testing.assert_allclose(
        made.accumulated_resid(incl_mid=False).numpy(), cache.accumulated_resid(incl_mid=False), atol=1e-5
    )


def test_inputs_of_single_heads(pair):
    """An input after the norm, and an edit that changes another head."""
    own, theirs = pair
    if not own.trace.heads.get(1):
        pytest.skip("a layer without attention")
    theirs.set_use_split_qkv_input(True)
    ids = torch.from_numpy(IDS).long()

    def edit(value, hook):
        value[:, 2:9, 1] = value[:, 2:9, 1] * 0.5 + 0.1
        return value

    try:
        _, fired = theirs.run_with_cache(ids)
        for x in "qkv":
            name = f"blocks.1.attn.hook_{x}_input"
            _, cache = own.run_with_cache(IDS, [name])
            np.testing.assert_allclose(cache[name], fired[name].numpy(), atol=1e-4)
            expected = theirs.run_with_hooks(ids.clone(), fwd_hooks=[(name, edit)]).numpy()
            np.testing.assert_allclose(own.run_with_hooks(IDS, [(name, edit)]), expected, atol=1e-3)
    finally:
        theirs.set_use_split_qkv_input(False)
    theirs.set_use_attn_in(True)
    try:
        name = "blocks.1.hook_attn_in"
        expected = theirs.run_with_hooks(ids.clone(), fwd_hooks=[(name, edit)]).numpy()
        np.testing.assert_allclose(own.run_with_hooks(IDS, [(name, edit)]), expected, atol=1e-3)
    finally:
        theirs.set_use_attn_in(False)


def test_the_methods_of_the_cache(pair):
    """A stack in another order, labels of other layers, a scale of another norm."""
    own, theirs = pair
    _, cache = own.run_with_cache(IDS)
    _, their_cache = theirs.run_with_cache(torch.from_numpy(IDS).long())
    if "blocks.0.hook_attn_out" not in their_cache:
        pytest.skip("TransformerLens decomposes no hybrids")
    has_mid = "blocks.0.hook_resid_mid" in cache
    of_neurons = [
        ("stack_neuron_results", {"layer": 2, "pos_slice": -1, "incl_remainder": True, "apply_ln": True}),
        ("get_full_resid_decomposition", {"layer": 2, "pos_slice": -1, "expand_neurons": True}),
    ]
    for method, arguments in [
        ("accumulated_resid", {}),
        ("accumulated_resid", {"layer": 2, "incl_mid": has_mid, "apply_ln": True}),
        ("accumulated_resid", {"apply_ln": True, "pos_slice": -1}),
        ("decompose_resid", {}),
        ("decompose_resid", {"layer": 2, "mode": "attn", "apply_ln": True, "pos_slice": -1}),
        ("stack_head_results", {"layer": 3, "incl_remainder": True, "apply_ln": True, "pos_slice": -1}),
        ("get_full_resid_decomposition", {"expand_neurons": False}),
        *((method, arguments) for method, arguments in of_neurons if "blocks.0.mlp.out.hook_in" in cache),
    ]:
        expected, their_labels = getattr(their_cache, method)(**arguments, return_labels=True)
        found, labels = getattr(cache, method)(**arguments, return_labels=True)
        assert labels == their_labels, method
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-3, err_msg=method)


def test_attributions_are_those_of_folded_norms():
    """Directions without the final norm's weight, which attribute to what the model does not do."""
    with torch.no_grad():
        own, theirs = session("qwen3"), bridge("qwen3")
        theirs.enable_compatibility_mode()
        _, cache = own.run_with_cache(IDS)
        _, their_cache = theirs.run_with_cache(torch.from_numpy(IDS).long())
        stack = their_cache.accumulated_resid(pos_slice=-1)
        expected = their_cache.logit_attrs(
            stack, torch.tensor([7]), incorrect_tokens=torch.tensor([9]), pos_slice=-1
        )
        found = cache.logit_attrs(
            cache.accumulated_resid(pos_slice=-1), np.array([7]), np.array([9]), pos_slice=-1
        )
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)
        np.testing.assert_allclose(found[-1], expected.numpy()[-1], atol=1e-3)


def test_gradients(pair):
    """A gradient by a name that means another value there."""
    from types import SimpleNamespace

    from kukri.interp import gradients

    own, theirs = pair
    kept = {}

    def keep(grad, hook):
        kept[hook.name] = np.array(grad[0] if isinstance(grad, tuple) else grad)

    names = [
        name
        for name, point in own.points.items()
        if point.form in ("plain", "heads") and point.tap == point.edit_tap and point.layer == 1
    ]
    # theirs of hook_resid_mid is of the norm's input, to which the residual connection adds nothing
    names = [n for n in names if n in theirs.hook_dict and not n.endswith("resid_mid")]
    with torch.enable_grad():
        theirs.reset_hooks()
        for name in names:
            theirs.add_hook(name, keep, dir="bwd")
        logits = theirs(torch.from_numpy(IDS).long())
        (logits[0, -1, 5] - logits[0, -1, 9]).backward()
        theirs.reset_hooks()
    _, _, grads = gradients.run_with_gradients(
        SimpleNamespace(interp=own), IDS, gradients.logit_difference(5, 9), names
    )
    assert len(kept) >= 8
    wrong = []
    for name, expected in kept.items():
        found = grads[name].reshape(expected.shape)
        if not np.allclose(found, expected, atol=1e-3 * np.abs(expected).max()):
            wrong.append((name, float(np.abs(found - expected).max() / np.abs(expected).max())))
    assert not wrong, wrong


@pytest.fixture(scope="module")
def real(smollm2_path, tmp_path_factory):
    """(a file of SmolLM2-135M's weights in float32, TransformerLens' activations of a text)."""
    path = tmp_path_factory.mktemp("real") / "f32.gguf"
    quantized_file(smollm2_path, path, "F32", None)
    ids = np.random.default_rng(0).integers(0, 49152, (1, 15))
    with torch.no_grad():
        logits, cache = transformer_lens_bridge(smollm2_path, 2).run_with_cache(torch.from_numpy(ids))
    return path, ids, {"logits": logits.numpy(), **{name: x.numpy() for name, x in cache.items()}}


@pytest.mark.parametrize(("backend", "kv_type"), [("reference", "f16"), ("cpu", "f32")])
def test_every_name_of_the_real_model(real, backend, kv_type):
    """A name, shape or value that only a model of thirty layers and nine heads shows to be wrong."""
    path, ids, expected = real
    with LLM(path, backend=backend, kv_type=kv_type, max_context=64) as llm:
        logits, cache = llm.run_with_cache(ids)
        found = {"logits": logits, **{name: cache[name] for name in cache}}
    assert len(expected) > 900
    assert not expected.keys() - found.keys()
    for name, want in expected.items():
        assert found[name].shape == want.shape, name
        seen = want > -1e30  # masked scores are as low as numbers go
        scale = max(1.0, float(np.abs(want[seen]).max()))
        np.testing.assert_allclose(
            np.where(seen, found[name], 0), np.where(seen, want, 0), atol=1e-4 * scale, err_msg=name
        )
