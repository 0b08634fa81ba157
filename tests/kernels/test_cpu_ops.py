"""Ops of the CPU backend, but products and attention, against their definition, the reference backend.

Inputs come in through an F32 embedding, results go out through `logit_rows`, buffers start as NaN. The file
also runs under other CPU names (test_cpu_lowerings.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import CapacityError, ShapeError
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import RopeFrequencies, Vector
from kukri.quant.types import RUN
from tests.kernels.small_programs import (
    assert_close,
    both,
    f32_weight,
    plain_batch,
    run,
    weight,
)
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch


@pytest.mark.parametrize("type_name", RUN)
def test_embedding(backend, type_name):
    """Would catch rows read in another order than the file's, or rounded in another place."""
    w = weight(np.random.default_rng(6), type_name, 12, 64)
    got, want = both(backend, lambda ops, batch: ops.logit_rows(ops.embed(w, batch), batch), plain_batch(12))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 65])
@pytest.mark.parametrize("width", [16, 48, 96, 5, 100])
def test_rms_norm(backend, n_tokens, width):
    """Would catch a wrong mean at widths that are not powers of two, and eps in the wrong place."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 1e-2)
    scale = rng.standard_normal(width).astype(np.float32)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.rms_norm(ops.embed(x, batch), Vector(scale), 1e-4), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want)


@pytest.mark.parametrize("n_tokens", [1, 9, 65])
@pytest.mark.parametrize("width", [16, 48, 96, 5, 100])
@pytest.mark.parametrize("after", ["rms_norm", "scale", ""])
def test_add(backend, n_tokens, width, after):
    """Would catch a factor on the residual, a residual of another row, and a fused op that forgets to add."""
    rng = np.random.default_rng(width)
    rows, scale = f32_weight(rng.standard_normal((n_tokens, 2 * width))), rng.standard_normal(width)
    norm = Vector(scale.astype(np.float32))

    def program(ops, batch):
        x, residual = ops.split(ops.embed(rows, batch), (width, width))
        made = {"rms_norm": lambda: ops.rms_norm(x, norm, 1e-4), "scale": lambda: ops.scale(x, 0.3)}
        return ops.logit_rows(ops.add(made.get(after, lambda: x)(), residual), batch)

    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040, 1043])
def test_scale(backend, n_tokens, width):
    """Would catch lost columns (work is cut every 512, and a vocabulary may be no multiple of 16)."""
    rng = np.random.default_rng(width)
    rows, head = f32_weight(rng.standard_normal((n_tokens, 16))), f32_weight(rng.standard_normal((width, 16)))

    def program(ops, batch):
        return ops.scale(ops.linear(ops.logit_rows(ops.embed(rows, batch), batch), (head,)), 1 / 3)

    assert_close(*both(backend, program, plain_batch(n_tokens)), relative=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040, 1043])
def test_softcap(backend, n_tokens, width):
    """Would catch lost columns, a tanh that is off near 0 or in a tail, and NaN that becomes a number."""
    rng = np.random.default_rng(width)
    rows = f32_weight(np.eye(16)[rng.integers(0, 16, n_tokens)])  # so that a logit is an entry of the head
    head = rng.standard_normal((width, 16))
    head *= 10.0 ** rng.integers(-3, 4, (width, 1))
    head[-1] = np.nan

    def program(ops, batch):
        logits = ops.linear(ops.logit_rows(ops.embed(rows, batch), batch), (f32_weight(head),))
        return ops.map("softcap", logits, a=30.0)

    got, want = both(backend, program, plain_batch(n_tokens))
    assert np.isnan(got[:, -1]).all()
    assert np.abs(want[:, :-1]).max() > 29.9
    assert_close(got[:, :-1], want[:, :-1], relative=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040])
def test_squared_relu(backend, n_tokens, width):
    """Would catch squares of negative numbers, and lost columns."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 10.0 ** rng.integers(-3, 2, (1, width)))

    def squared(ops, batch):
        return ops.logit_rows(ops.map("relu_squared", ops.embed(x, batch)), batch)

    assert_close(*both(backend, squared, plain_batch(n_tokens)), relative=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040])
def test_xielu(backend, n_tokens, width):
    """Would catch factors swapped, and a side that is not 0 on the other."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 10.0 ** rng.integers(-3, 2, (1, width)))

    def activated(ops, batch):
        return ops.logit_rows(ops.map("xielu", ops.embed(x, batch), None, 0.75, 1.25), batch)

    got, want = both(backend, activated, plain_batch(n_tokens))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-7)  # exp(x) - 1 of small x


@pytest.mark.parametrize("bounds", [(-0.3, 0.7), (-np.inf, 0.1), (0.2, np.inf), (-5.0, -1.0)])
@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040, 1043])
def test_clamp(backend, width, n_tokens, bounds):
    """Would catch bounds swapped or of a lost sign, lost columns, and an infinite bound that makes NaN."""
    x = f32_weight(np.random.default_rng(width).standard_normal((n_tokens, width)))

    def clamped(ops, batch):
        return ops.logit_rows(ops.map("clamp", ops.embed(x, batch), None, *bounds), batch)

    got, want = both(backend, clamped, plain_batch(n_tokens))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("n_tokens", [1, 3, 65])
@pytest.mark.parametrize("width", [16, 96, 1040, 50, 1043])
def test_gated_activations(backend, kind, n_tokens, width):
    """Would catch lost columns (work is cut every 512) and an inexact exponential in either tail."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, 2 * width)) * 20)

    def program(ops, batch):
        gate, up = ops.split(ops.embed(x, batch), (width, width))
        return ops.logit_rows(ops.map(f"gated_{kind}", up, gate), batch)

    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("n_tokens", [1, 3, 9, 65])
@pytest.mark.parametrize("d_head", [16, 48, 128, 8, 24])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_head_norm(backend, n_tokens, d_head, part):
    """Would catch a mean over all heads, a head left out, and columns next to them overwritten."""
    rng = np.random.default_rng(d_head)
    x = f32_weight(rng.standard_normal((n_tokens, 5 * d_head)) * 1e-2)
    scale = rng.standard_normal(d_head).astype(np.float32)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(x, batch), (3 * d_head, d_head, d_head))
        parts = {
            "q": ops.head_norm(q, Vector(scale), 1e-4),
            "k": ops.head_norm(k, Vector(scale * 2), 1e-4),
            "v": v,
        }
        return ops.logit_rows(parts[part], batch)

    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 65])
@pytest.mark.parametrize("width", [16, 48, 96, 5, 100])
def test_layer_norm(backend, n_tokens, width):
    """Would catch a variance about zero, a mean over padding, and eps or the bias in the wrong place."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 1e-2 + 0.05)
    scale, bias = rng.standard_normal((2, width)).astype(np.float32)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(
            ops.layer_norm(ops.embed(x, batch), Vector(scale), Vector(bias), 1e-4), batch
        ),
        plain_batch(n_tokens),
    )
    assert_close(got, want, 1e-5)  # x - mean loses two bits where the mean is five deviations away


@pytest.mark.parametrize("n_tokens", [1, 3, 65])
@pytest.mark.parametrize("width", [16, 96, 1040, 50, 1043])
def test_gelu(backend, n_tokens, width):
    """Would catch lost columns (work is cut every 512), the exact form, and NaN from exp in either tail."""
    x = f32_weight(np.random.default_rng(width).standard_normal((n_tokens, width)) * 8)
    assert_close(
        *both(
            backend,
            lambda ops, batch: ops.logit_rows(ops.map("gelu", ops.embed(x, batch)), batch),
            plain_batch(n_tokens),
        )
    )


@pytest.mark.parametrize("n_tokens", [1, 65])
@pytest.mark.parametrize("width", [16, 1040, 5, 1043])
def test_exact_gelu_and_tanh(backend, n_tokens, width):
    """Would catch the form by tanh, an error function that is wrong in a tail, and lost columns."""
    values = np.random.default_rng(width).standard_normal((n_tokens, width)) * 8
    values[0, :4] = 0, -0.0, 60, -60
    x = f32_weight(values)

    def gelu(ops, batch):
        return ops.logit_rows(ops.map("gelu_exact", ops.embed(x, batch)), batch)

    def tanh(ops, batch):
        return ops.logit_rows(ops.map("tanh", ops.embed(x, batch)), batch)

    got, want = both(backend, gelu, plain_batch(n_tokens))
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=2e-6)  # the formula's 1.5e-7, times x
    got, want = both(backend, tanh, plain_batch(n_tokens))
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-7)


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q8_0"])
def test_embeddings_of_positions_and_types(backend, type_name):
    """Would catch rows by another number of the token, and a residual that is lost or added twice."""
    rng = np.random.default_rng(6)
    tokens, positions, types = (weight(rng, type_name, n, 64) for n in (12, 12, 3))

    def program(ops, batch):
        x = ops.embed(positions, batch, "positions", ops.embed(tokens, batch))
        return ops.logit_rows(ops.embed(types, batch, "token_types", x), batch)

    def short(ops, batch):  # 3 positions
        return ops.logit_rows(ops.embed(types, batch, "positions", ops.embed(tokens, batch)), batch)

    step = plain_batch(12)
    typed = replace(step, token_ids=step.token_ids[::-1].copy(), token_types=step.token_ids % 3)
    for batch in (step, typed):
        got, want = both(backend, program, batch)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert np.abs(got - both(backend, program, step)[0]).max() > 1e-2
    wrong = replace(step, token_types=np.full(12, 3, np.int32))
    with pytest.raises(ShapeError, match="token type"):
        run(backend, program, wrong)
    with pytest.raises(ShapeError, match="context longer"):
        run(backend, short, step)


@pytest.mark.parametrize("kind", ["silu, rms", "gelu, layer", "silu, added", "geglu, rms"])
def test_fused_and_separate_quantization_agree(backend, kind):
    """Would catch a producer whose int8 panels differ from quantizing its float result."""
    rng = np.random.default_rng(7)
    x, w = f32_weight(rng.standard_normal((9, 128))), weight(rng, "Q4_1", 32, 64)
    norm, bias = map(Vector, rng.standard_normal((2, 64)).astype(np.float32))

    def activate(ops, gate, up):
        if "geglu" in kind:
            return ops.map("gated_gelu", up, gate)
        return ops.map("gelu", gate) if "gelu" in kind else ops.map("gated_silu", up, gate)

    def normalize(ops, x):
        if "layer" in kind:
            return ops.layer_norm(x, norm, bias, 1e-5)
        normed = ops.tap("t3", None, ops.rms_norm(x, norm, 1e-5))
        return ops.add(normed, x) if "added" in kind else normed

    def program(listen):
        def program(ops, batch):
            gate, up = ops.split(ops.embed(x, batch), (64, 64))
            hidden = ops.tap("t1", None, activate(ops, gate, up))
            hidden = ops.linear(hidden, (weight(np.random.default_rng(8), "Q4_0", 64, 64),))
            normed = ops.tap("t2", None, normalize(ops, hidden))
            return ops.logit_rows(ops.linear(normed, (w,)), batch)

        taps = frozenset({"t1", "t2", "t3"} if listen else ())
        compiled = backend.compile(program, PagedKV([KVLayer(1, 16)], 32), StepLimits(16, 1, 16, 8), taps)
        compiled.plan.memory.view(np.float32)[:] = np.nan
        return compiled(plain_batch(9), lambda name, x: None).numpy().copy()

    np.testing.assert_array_equal(program(True), program(False))


@pytest.mark.parametrize(("rotary", "d_head"), [(64, 64), (32, 64), (16, 16), (24, 48), (24, 24), (8, 8)])
def test_rope(backend, rotary, d_head):
    """Would catch interleaved pairs, a rotation past rotary_dim, and widths that are not vectors."""
    rng = np.random.default_rng(rotary)
    spec = AttentionSpec(0, 3, 1, d_head, 1.0)
    rope = RopeFrequencies(tuple(1 / 10000 ** (np.arange(0, rotary, 2) / rotary)), 256)
    x = f32_weight(rng.standard_normal((9, 4 * d_head)))

    def program(ops, batch):
        q, k = ops.split(ops.embed(x, batch), (3 * d_head, d_head))
        q, k = ops.rope(q, k, rope, spec, batch)
        return ops.logit_rows(q, batch)

    assert_close(*both(backend, program, plain_batch(9)))


@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_clamped_swiglu(backend, n_tokens):
    """Would catch a clamp on the wrong side, of gate from below, or left out; alpha on up."""
    x = f32_weight(np.random.default_rng(n_tokens).standard_normal((n_tokens, 192)) * 6)

    def program(ops, batch):
        gate, up = ops.split(ops.embed(x, batch), (96, 96))
        return ops.logit_rows(ops.map("clamped_swiglu", up, gate, 1.702, 7.0), batch)

    got, want = both(backend, program, plain_batch(n_tokens))
    assert_close(got, want)
    gate, up = (torch.from_numpy(part) for part in np.split(x.data.view(np.float32), 2, axis=1))
    glu = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))  # as transformers has it
    np.testing.assert_allclose(want, ((up.clamp(-7, 7) + 1) * glu).numpy(), rtol=1e-5, atol=1e-6)


def corrupt(batch, name, value):
    arrays = {f: a.copy() for f, a in vars(batch).items() if isinstance(a, np.ndarray)}
    arrays[name].reshape(-1)[-1] = value
    return ForwardBatch(**arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", 12),
        ("token_ids", -1),
        ("slots", 32 * PAGE_TOKENS),
        ("positions", 2),
        ("query_start", 3),
        ("context_len", 3),
        ("context_len", 10_000),
        ("page_table", 32),
        ("page_table", -1),
        ("logit_rows", 4),
    ],
)
def test_bad_indices_never_reach_a_kernel(backend, name, value):
    """Would catch an index that reads or writes outside its array: kernels do not check."""
    spec = AttentionSpec(0, 1, 1, 16, 1.0)
    rows = f32_weight(np.zeros((12, 48)))

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(rows, batch), (16, 16, 16))
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    with pytest.raises(ShapeError):
        run(backend, program, corrupt(plain_batch(4), name, value))


def test_limits_are_checked(backend):
    """Would catch a step that overruns the buffers made for the limits."""
    rows = f32_weight(np.zeros((40, 16)))
    compiled = backend.compile(
        lambda ops, batch: ops.logit_rows(ops.embed(rows, batch), batch),
        PagedKV([KVLayer(1, 16)], 8),
        StepLimits(16, 1, 4, 8),
    )
    with pytest.raises(CapacityError):
        compiled(plain_batch(17))
    with pytest.raises(CapacityError):
        compiled(plain_batch(8))
