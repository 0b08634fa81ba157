"""A tiny Llama with large biases in its keys, and how far a cache of few bits is from exact keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kukri.kernels.backend import Backend
from kukri.models import Model, load_model
from kukri.models.layers import Attention
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import Driver, make_pair

with lazy_imports():
    import torch

SLOW = slice(11, 16)  # pairs of 32 dimensions that hardly rotate with a theta of a million


def biased_model(*, with_range: bool = True) -> Model:
    """A Llama with biases of some hundred in a few dimensions of keys, as Qwen2's are."""
    hf, config, source = make_pair(d_head=32, d_model=64, theta=1e6, max_context=1024, bias=True)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in hf.model.layers:
            pairs = layer.self_attn.k_proj.bias.view(2, 2, 16)
            pairs[:, :, SLOW] = 150 * torch.randn(2, 2, 5, generator=rng)
    with pytest.MonkeyPatch.context() as patched:
        if not with_range:
            patched.setattr(Attention, "_key_range", lambda self, config: None)
        return load_model(source, config)


def error(model: Model, backend: Backend, kv_type: Any, ids: Sequence[int], want: np.ndarray) -> float:
    """Of the mean logit."""
    got = Driver(model, backend, kv_type=kv_type).run(ids, [30, 1, 7])
    return float(np.abs(got - want).mean() / np.abs(want).mean())
