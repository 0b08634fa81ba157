"""Mixtures of experts under Triton's interpreter: against the reference, and to the bit by batch."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.cache import KVLayer
from kukri.kernels.expert_choice import NO_EXPERT
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.reference import ReferenceBackend, ReferenceOps
from kukri.kernels.specs import Routing
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import Experts, Vector
from tests.kernels.gpu.device import DEVICE, IS_INTERPRETED
from tests.kernels.gpu.test_gpu_linear import bits
from tests.kernels.small_programs import exact_rows, f32_weight, plain_batch, weight
from tests.lazy_imports import lazy_imports
from tests.quick import quick

with lazy_imports():
    import torch

    from kukri.kernels.gpu import experts as experts_of
    from kukri.kernels.gpu.backend import GpuBackend

OPS = ReferenceOps(PagedKV([KVLayer(1, 16)], 1))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that nobody wrote is full of NaN, or of numbers of experts that there are not."""

    def full(*shape, dtype, device):
        return torch.full(*shape, float("nan") if dtype.is_floating_point else 113, dtype=dtype)

    monkeypatch.setattr("torch.empty", full)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("n_experts", "n_used"), [(11, 3), (5, 5), (32, 1)])
def test_the_router_chooses_the_references_experts(n_experts, n_used, normalized):
    """The last of equal logits, experts out of order, another sum, NaN that leads outside or next to."""
    logits = np.random.default_rng(1).standard_normal((7, n_experts)).astype(np.float32).round(1)
    logits[1, 1:], logits[2] = -np.inf, 1.0
    logits[3, 2], logits[4, 0] = np.nan, np.inf
    routing = Routing(n_experts, n_used, normalized)
    wide = torch.as_tensor(np.pad(logits, ((0, 0), (0, 3)), constant_values=np.nan))[:, :n_experts]
    got = experts_of.route(wide, routing)
    with np.errstate(invalid="ignore"):
        want = OPS.route(logits, routing)
    sound = [0, 1, 2, 5, 6]
    np.testing.assert_allclose(got.weights.numpy()[sound], want.weights[sound], rtol=1e-6)
    np.testing.assert_array_equal(got.experts.numpy()[sound], want.experts[sound])
    for row in (3, 4):
        used = got.experts.numpy()[row]
        assert sorted({*used.tolist()}) == used.tolist()
        assert used.max() < n_experts
        assert np.isnan(got.weights.numpy()[row, used]).all()


def mixture(seed, type_name, n_tokens, n_used=3, n_experts=5, n_in=96, n_ffn=37):
    """A mixture whose products have odd sizes; the last has whole blocks as inputs, of F32 rows after it."""
    rng = np.random.default_rng(seed)
    parts = [Experts(tuple(weight(rng, type_name, n, n_in) for _ in range(n_experts))) for n in (n_ffn, 27)]
    bias = Vector(rng.standard_normal(n_experts * 64, dtype=np.float32))
    down = Experts(tuple(weight(rng, type_name, 45, 64) for _ in range(n_experts)))
    rows, router = f32_weight(exact_rows(rng, n_tokens, n_in)), f32_weight(rng.standard_normal((5, n_in)))
    residual = f32_weight(rng.standard_normal((n_tokens, 45)))
    routing = Routing(n_experts, n_used, True)

    def program(ops, batch):
        x = ops.embed(rows, batch)
        routes = ops.route(ops.scale(ops.linear(x, [router]), 1e-3), routing, ("weights", None))
        y = ops.expert_linear(x, routes, parts, bias)
        y = ops.combine(
            ops.expert_linear(y, routes, [down]), routes, ops.embed(residual, batch), ("out", None)
        )
        return ops.logit_rows(y, batch)

    return program


def run(backend, program, n_tokens, on_tap=None):
    limits, taps = StepLimits(64, 1, 64, 4), frozenset(["weights", "out"] if on_tap else [])
    compiled = backend.compile(program, backend.new_cache([KVLayer(1, 32)], 4), limits, taps)
    return compiled(plain_batch(n_tokens), on_tap).numpy().copy(), compiled


@pytest.mark.full
@pytest.mark.parametrize("type_name", quick(["Q8_0", "MXFP4", "F32", "F16", "BF16"], kept=["MXFP4", "F16"]))
def test_a_mixture(type_name):
    """An expert's rows given to another, a bias of another, a tile that mixes experts or is left out, rows
    of rows read as rows of tokens; a result that depends on the tokens next to it: 1, 8 and 21 of them.
    """
    is_exact = type_name == "F32" or (
        IS_INTERPRETED and "F16" in type_name
    )  # products of a device are of halves
    tolerance = 1e-6 if is_exact else 0.01  # int8 or bfloat16 between the products
    backend, program = GpuBackend(DEVICE), mixture(2, type_name, 21)
    got, compiled = run(backend, program, 21)
    want, _ = run(ReferenceBackend(), program, 21)
    assert np.isfinite(got).all()
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < tolerance
    for n in (1, 8):
        few, _ = run(backend, program, n)
        assert (bits(torch.as_tensor(few)) == bits(torch.as_tensor(got[:n]))).all()
    assert backend.is_batch_invariant
    assert compiled._ops.is_capturable


@pytest.mark.full(only=["70-*"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n_tokens", [3, 70])
def test_halves_by_expert(n_tokens, dtype):
    """Columns beyond the last step of 64, rows of an expert beyond its last tile or of its neighbour, a row
    without an expert that reads or writes beyond the matrices, a bias or token of another row.
    """
    n_experts, n_used, n_rows, n_columns = 5, 3, 37, 200
    torch.manual_seed(n_tokens)
    w = torch.randn(n_experts * n_rows, n_columns).to(getattr(torch, dtype))
    bias = torch.randn(n_experts * n_rows)
    logits = torch.randn(n_tokens, n_experts)
    logits[1] = torch.tensor([0, 1, float("-inf"), float("-inf"), float("-inf")])  # two experts, then none
    routes = experts_of.route(logits, Routing(n_experts, n_used, True))
    numbers = routes.experts.flatten()
    assert (numbers == NO_EXPERT).sum() == 1
    for n in (1, n_used):  # rows of tokens, rows of rows
        x = torch.randn(n_tokens * n, n_columns).to(w.dtype)
        got = experts_of.linear_float(x, routes, w, bias)
        for row, number in enumerate(numbers.tolist()):
            if number != NO_EXPERT:
                mine = slice(number * n_rows, (number + 1) * n_rows)
                want = w[mine].float() @ x[row * n // n_used].float() + bias[mine]
                torch.testing.assert_close(got[row], want, rtol=1e-5, atol=5e-5)


@pytest.mark.full(only=["Q8_0", "F32"])
@pytest.mark.parametrize("type_name", ["Q8_0", "F32", "F16"])
def test_hooks_on_weights(type_name):
    """An expert without a weight that is still used, another weight, a lost residual."""

    def edit(name, x):
        if name == "weights":
            x[:, 1:] = 0
            x[::2, 0] = 0  # tokens that use no expert

    program = mixture(3, type_name, 9)
    got, want = (run(backend, program, 9, edit)[0] for backend in (GpuBackend(DEVICE), ReferenceBackend()))
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.01


@pytest.mark.full
def test_float32_products():
    """Columns beyond the last step, rows beyond the last tile, a bias or residual of another row."""
    rng = np.random.default_rng(4)
    matrix, rows = f32_weight(rng.standard_normal((13, 300))), f32_weight(rng.standard_normal((9, 300)))
    bias, beside = Vector(rng.standard_normal(26, dtype=np.float32)), f32_weight(rng.standard_normal((9, 26)))

    def program(ops, batch):
        x = ops.embed(rows, batch)
        return ops.logit_rows(ops.linear(x, [matrix, matrix], bias, ops.embed(beside, batch)), batch)

    backend = GpuBackend(DEVICE)
    got, want = run(backend, program, 9)[0], run(ReferenceBackend(), program, 9)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(backend, program, 1)[0], got[:1])
    assert backend.is_batch_invariant
