"""Activations next to transformers': of float weights with float32 arithmetic, and of a real packed model.

`pytest -m slow tests/interp/test_packed.py` runs the latter: SmolLM2-135M in Q4_1, dequantized for
transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fidelity import judge_model
from kukri import LLM
from tests.interp import tl_models
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    import transformers

TEXT = "When Mary and John went to the store, John gave a drink to"


def scaled_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest number; keys that are not seen do not count."""
    seen = expected > -1e30
    return float(np.abs(np.where(seen, found - expected, 0)).max() / np.abs(expected[seen]).max())


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "gemma3_text"])
@pytest.mark.parametrize(
    ("backend", "kv_type", "limit"), [("torch", None, 2e-5), ("cpu", "f32", 2e-5), ("cpu", None, 5e-3)]
)
def test_float_weights(name, backend, kv_type, limit):
    """Arithmetic that rounds: on the CPU keys and values to float16 alone, on PyTorch nothing."""
    _, expected = tl_models.session(name).run_with_cache(tl_models.IDS)
    _, found = tl_models.session(name, backend, kv_type).run_with_cache(tl_models.IDS)
    for key in expected:
        if expected[key].dtype == np.float32:
            assert scaled_difference(found[key], expected[key]) < limit, key


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "limit"), [("torch", 1e-4), ("reference", 1e-4), ("cpu", 0.1)])
def test_packed_weights_are_transformers(smollm2_path, backend, limit):
    """A name that shows another value on packed weights than the same model has dequantized.

    The CPU backend rounds inputs to 8 bits: one layer's attention differs by 5.5%.
    """
    hf = judge_model(transformers, torch, smollm2_path)
    kept = {}
    for i, layer in enumerate(hf.model.layers):
        for module, key in (("self_attn.o_proj", "attn.hook_z"), ("mlp.down_proj", "mlp.hook_post")):
            part = layer.get_submodule(module)
            part.register_forward_pre_hook(
                lambda _, args, key=f"blocks.{i}.{key}": kept.update({key: args[0].detach().numpy()})
            )
    with LLM(smollm2_path, backend=backend, max_context=256) as llm, torch.no_grad():
        ids = torch.tensor([llm.tokenizer.encode(TEXT)])
        output = hf(ids, output_hidden_states=True)
        # the last of them is after the final norm
        kept |= {f"blocks.{i}.hook_resid_pre": x.numpy() for i, x in enumerate(output.hidden_states[:-1])}
        logits, cache = llm.run_with_cache(TEXT, names=list(kept))
    assert len(kept) == 90
    kept["logits"] = output.logits.numpy()
    for key, expected in kept.items():
        found = logits if key == "logits" else cache[key]
        difference = np.linalg.norm(found.reshape(expected.shape) - expected) / np.linalg.norm(expected)
        assert difference < limit, (key, difference)
