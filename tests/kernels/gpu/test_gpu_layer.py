"""The persistent kernel under Triton's interpreter, as one program: to the bit what its five launches do."""

from __future__ import annotations

import pytest

from kukri.kernels.weight_handles import Weight
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.test_gpu_attention import Step, copied, same, same_caches
from tests.kernels.gpu.test_gpu_linear import QUANT_TYPES, np, random_rows
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from benchmarks.prototypes import persistent
    from kukri.kernels.gpu import attention
    from kukri.kernels.gpu.products import Output, linear_of, to_device
    from kukri.kernels.gpu.rows import Recipe


def matrix(seed, n_rows, n_columns, type_name="Q4_0"):
    type = QUANT_TYPES[type_name]
    data = random_rows(np.random.default_rng(seed), type_name, (n_rows, n_columns))
    return to_device([Weight(data, type, (n_rows, n_columns))], DEVICE)


@pytest.mark.full
def test_a_layer_is_its_five_launches():
    """A phase that reads another's rows, starts early or skips a tile; a residual or stride of another."""
    step = Step([40, 17], [1, 1], group=3, n_kv_heads=1, d_head=32)
    spec, d_model, d_ffn = step.spec, 96, 160
    width = 5 * 32
    x = torch.randn(2, d_model)
    weights = persistent.LayerMatrices(
        torch.randn(d_model),
        matrix(1, width, d_model),
        matrix(2, d_model, 3 * 32),
        torch.randn(d_model),
        matrix(3, 2 * d_ffn, d_model),
        matrix(4, d_model, d_ffn),
    )
    tensors = (*step.tensors(),)
    cache = copied(step.cache)
    got = persistent.layer(
        x, weights, 1e-5, step.rope, step.positions, step.slots, cache, *tensors, spec, n_programs=1
    )

    def product(recipe, one, residual=None):
        y = torch.full((2, one.n_rows), float("nan"))
        linear_of(recipe, one, Output(y, None, residual))
        return y

    qkv = product(Recipe("rms_norm", x, weights.norm, 1e-5), weights.qkv).split([96, 32, 32], 1)
    want_cache = copied(step.cache)
    new = attention.NewTokens(*qkv, step.rope, step.positions, step.slots)
    attended = attention.decode(new, want_cache, *tensors, spec).view(2, -1)
    between = product(Recipe("plain", attended, attended), weights.out, x)
    gate, up = product(Recipe("rms_norm", between, weights.mlp_norm, 1e-5), weights.gate_up).split(d_ffn, 1)
    want = product(Recipe("gated_silu", up, gate), weights.down, between)
    assert want.isfinite().all()
    same(got, want)
    same_caches(cache, want_cache)
