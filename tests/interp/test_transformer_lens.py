"""Edits and methods of the cache beside TransformerLens, if installed: `pytest -m slow tests/interp`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tl_models import IDS, bridge, session

pytestmark = pytest.mark.slow
pytest.importorskip("transformer_lens")


@pytest.fixture(scope="module", params=["smollm3", "qwen3", "phi", "phi3"])
def pair(request):
    with torch.no_grad():
        yield session(request.param), bridge(request.param)


def test_edits(pair):
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
        if point.layer not in (1, None):
            continue
        expected = theirs.run_with_hooks(ids.clone(), fwd_hooks=[(name, edit)]).numpy()
        np.testing.assert_allclose(own.run_with_hooks(IDS, [(name, edit)]), expected, atol=1e-3, err_msg=name)
        n_edited += 1
    assert n_edited > 20


def test_the_methods_of_the_cache(pair):
    """A stack in another order, labels of other layers, a scale of another norm."""
    own, theirs = pair
    _, cache = own.run_with_cache(IDS)
    _, their_cache = theirs.run_with_cache(torch.from_numpy(IDS).long())
    has_mid = "blocks.0.hook_resid_mid" in cache
    for method, arguments in [
        ("accumulated_resid", {}),
        ("accumulated_resid", {"layer": 2, "incl_mid": has_mid, "apply_ln": True}),
        ("accumulated_resid", {"apply_ln": True, "pos_slice": -1}),
        ("decompose_resid", {}),
        ("decompose_resid", {"layer": 2, "mode": "attn", "apply_ln": True, "pos_slice": -1}),
        ("stack_head_results", {"layer": 3, "incl_remainder": True, "apply_ln": True, "pos_slice": -1}),
        ("get_full_resid_decomposition", {"expand_neurons": False}),
    ]:
        expected, their_labels = getattr(their_cache, method)(**arguments, return_labels=True)
        arguments.pop("expand_neurons", None)
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
