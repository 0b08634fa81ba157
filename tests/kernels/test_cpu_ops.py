"""Every op of the CPU backend but the matrix product against its definition, the reference backend.

Inputs come in through an F32 embedding, results go out through `logit_rows`, buffers start as NaN. The file
also runs under other CPU names (test_cpu_lowerings.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kukri.errors import CapacityError, MissingKernelError, ShapeError, UnsupportedError
from kukri.kernels.cache import KVLayer
from kukri.kernels.constants import RopeFrequencies, Vector
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.run import abi
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec, ConvSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.quant.types import RUN
from tests.kernels.small_programs import (
    ATTENTION_ERROR,
    assert_close,
    attention_case,
    both,
    copy_of,
    f32_weight,
    plain_batch,
    run,
    weight,
)
from tests.quick import quick


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
        return ops.softcap(logits, 30.0)

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
        return ops.logit_rows(ops.relu_squared(ops.embed(x, batch)), batch)

    assert_close(*both(backend, squared, plain_batch(n_tokens)), relative=1e-6)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040])
def test_xielu(backend, n_tokens, width):
    """Would catch factors swapped, and a side that is not 0 on the other."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 10.0 ** rng.integers(-3, 2, (1, width)))

    def activated(ops, batch):
        return ops.logit_rows(ops.xielu(ops.embed(x, batch), 0.75, 1.25), batch)

    got, want = both(backend, activated, plain_batch(n_tokens))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-7)  # exp(x) - 1 of small x


@pytest.mark.parametrize("bounds", [(-0.3, 0.7), (-np.inf, 0.1), (0.2, np.inf), (-5.0, -1.0)])
@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("width", [16, 1040, 1043])
def test_clamp(backend, width, n_tokens, bounds):
    """Would catch bounds swapped or of a lost sign, lost columns, and an infinite bound that makes NaN."""
    x = f32_weight(np.random.default_rng(width).standard_normal((n_tokens, width)))

    def clamped(ops, batch):
        return ops.logit_rows(ops.clamp(ops.embed(x, batch), *bounds), batch)

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
        return ops.logit_rows(ops.gated(up, gate, kind), batch)

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
            lambda ops, batch: ops.logit_rows(ops.gelu(ops.embed(x, batch)), batch),
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
        return ops.logit_rows(ops.gelu(ops.embed(x, batch), is_exact=True), batch)

    def tanh(ops, batch):
        return ops.logit_rows(ops.tanh(ops.embed(x, batch)), batch)

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
            return ops.gated(up, gate, "gelu")
        return ops.gelu(gate) if "gelu" in kind else ops.gated(up, gate, "silu")

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


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kv_type"),
    [
        *((1, 3, 16, "f16"), (3, 2, 64, "f16"), (4, 1, 32, "f16"), (12, 1, 16, "f16")),
        *((3, 2, 64, "q8_0"), (3, 2, 64, "f32"), (3, 2, 64, "q4"), (1, 2, 80, "q4")),
        *quick([(8, 2, 48, "f16"), (4, 1, 96, "q8_0"), (2, 1, 48, "f32")], kept=[]),
    ],
)
def test_attention(backend, group, n_kv_heads, d_head, kv_type, window):
    """Would catch a mask that forgets the cache, heads of the wrong group, pages mixed up, a lost window,
    a scale of another token or block."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 200, 130, 64), (1, 1, 20, 130, 3)
    program, batch, past = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type)
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], max_sequences=5)
    want = run(ReferenceBackend(), program, batch, caches[1], max_sequences=5)
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])
    np.testing.assert_array_equal(caches[0].keys[0], caches[1].keys[0])
    np.testing.assert_array_equal(caches[0].values[0], caches[1].values[0])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "reach"),
    quick([(1, 3, 300), (3, 2, 5), (20, 1, 50)], kept=[(1, 3, 300), (3, 2, 5)]),
)
def test_attention_with_biases_by_distance(backend, group, n_kv_heads, reach, is_causal):
    """Would catch another head's bias, a distance off by one or of the other sign, one that is read beyond
    the table, and biases on the past or on later tokens alone."""
    contexts = (1, 70, 200, 130, 64)
    n_new = (1, 1, 20, 130, 3) if is_causal else contexts
    case = (group, n_kv_heads, 16, None, contexts, n_new)
    program, batch, past = attention_case(np.random.default_rng(5), *case, is_causal=is_causal, reach=reach)
    got = run(backend, program, batch, copy_of(past), max_sequences=5)
    want = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=5)
    assert_close(got, want, relative=1e-5)


@pytest.mark.parametrize("kv_type", quick(["f16", "q8_0", "f32"], kept=["f16"]))
def test_attention_with_a_softcap(backend, kv_type):
    """Would catch a cap after the mask, on partial results alone, or of scores before their scale."""
    case = (3, 2, 64, 100, (1, 70, 200, 130, 64), (1, 1, 20, 130, 3), kv_type)
    program, batch, past = attention_case(np.random.default_rng(5), *case, softcap=0.5)
    plain, _, _ = attention_case(np.random.default_rng(5), *case)
    got = run(backend, program, batch, copy_of(past), max_sequences=5)
    want, without = (
        run(ReferenceBackend(), p, batch, copy_of(past), max_sequences=5) for p in (program, plain)
    )
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])
    assert np.abs(got - without).max() > 0.05


@pytest.mark.parametrize("window", [None, 1, 9, 65])
@pytest.mark.parametrize(
    ("group", "d_head", "kv_type"), [(1, 16, "f16"), (4, 32, "f16"), (4, 96, "q8_0"), (1, 80, "q4")]
)
def test_attention_to_later_tokens(backend, group, d_head, kv_type, window):
    """Would catch texts that are read causally, a neighbour's or the page's last keys, a window's other side,
    and chunks of a long text that its first tokens do not reach."""
    rng = np.random.default_rng(group)
    lengths = (1, 70, 3, 150, 64)
    program, batch, past = attention_case(
        rng, group, 2, d_head, window, lengths, lengths, kv_type, is_causal=False
    )
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], max_sequences=5)
    want = run(ReferenceBackend(), program, batch, caches[1], max_sequences=5)
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])


@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_clamped_swiglu(backend, n_tokens):
    """Would catch a clamp on the wrong side, of gate from below, or left out; alpha on up."""
    x = f32_weight(np.random.default_rng(n_tokens).standard_normal((n_tokens, 192)) * 6)

    def program(ops, batch):
        gate, up = ops.split(ops.embed(x, batch), (96, 96))
        return ops.logit_rows(ops.clamped_swiglu(gate, up, 1.702, 7.0), batch)

    got, want = both(backend, program, plain_batch(n_tokens))
    assert_close(got, want)
    gate, up = (torch.from_numpy(part) for part in np.split(x.data.view(np.float32), 2, axis=1))
    glu = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))  # as transformers has it
    np.testing.assert_allclose(want, ((up.clamp(-7, 7) + 1) * glu).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(("group", "n_kv_heads", "d_head"), [(1, 3, 16), (3, 2, 64), (8, 2, 48)])
def test_attention_with_sinks(backend, group, n_kv_heads, d_head, window):
    """A sink of another head, or one that counts once for each chunk of a long context."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 200, 130, 64), (1, 1, 20, 130, 3)
    sinks = rng.standard_normal(group * n_kv_heads) * 4
    results = []
    for values in (sinks, None):
        rng = np.random.default_rng(group)
        case = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, sinks=values)
        program, batch, past = case
        got = run(backend, program, batch, copy_of(past), max_sequences=5)
        want = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=5)
        assert_close(got, want, relative=1e-5)
        results.append(got)
    assert np.abs(results[0] - results[1]).max() > 0.1


def test_a_q8_0_cache_is_close_to_float16(backend):
    """Would catch quantization that is wrong in the same way on both backends."""
    logits = []
    for kv_type in ("f16", "q8_0"):
        rng = np.random.default_rng(3)
        program, batch, past = attention_case(rng, 3, 2, 64, None, (70, 130), (70, 130), kv_type)
        logits.append(run(backend, program, batch, past, max_sequences=2))
    error = np.abs(logits[0] - logits[1])
    assert 1e-4 < error.max() < 0.05
    with pytest.raises(UnsupportedError, match="head size"):
        PagedKV([KVLayer(1, 16)], 1, kv_type="q8_0")


def test_attention_ignores_what_lies_outside_the_context(backend):
    """Would catch reads of stale slots: they hold other requests' numbers, here the largest there are."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    used = {
        (int(batch.page_table[s, p // PAGE_TOKENS]), p % PAGE_TOKENS)
        for s in range(2)
        for p in range(batch.context_len[s])
    }
    for page in range(past.n_pages[0]):
        for offset in range(PAGE_TOKENS):
            if (page, offset) not in used:
                dirty.keys[0][page, :, :, offset] = 65504
                dirty.values[0][page, :, offset] = -65504
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


def test_the_cache_limits_numbers_and_keeps_nan(backend):
    """Would catch an inf that makes NaN of 0 * inf later, and a NaN hidden from the request that made it."""
    values = np.zeros((3, 320), np.float32)
    values[1, 192:256], values[1, 256:] = 1e30, -1e30
    values[2, 256:] = np.nan
    spec = AttentionSpec(0, 3, 1, 64, 1.0)
    cache = PagedKV([KVLayer(1, 64)], 2)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(f32_weight(values), batch), (192, 64, 64))
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    for n_tokens in (2, 3):
        got = run(backend, program, plain_batch(n_tokens), cache)
        assert np.isnan(got[-1]).all() == (n_tokens == 3)
    assert cache.keys[0].max() == 65504
    assert cache.values[0][0, 0, 1].min() == -65504


def test_nan_left_in_a_page_does_not_reach_the_next_owner(backend):
    """Would catch 0 * NaN: slots past a sequence's end may hold what a failed request left."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    for s, n_context in enumerate(batch.context_len):
        page, offset = batch.page_table[s, n_context // PAGE_TOKENS], n_context % PAGE_TOKENS
        dirty.keys[0][page, :, :, offset:] = np.nan
        dirty.values[0][page, :, offset:] = np.nan
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4"])
@pytest.mark.parametrize(
    ("contexts", "n_new"), [((300, 130, 40), (1, 1, 1)), ((300, 90), (33, 7)), ((301, 300, 299), (1, 1, 1))]
)
def test_pages_that_a_window_has_passed_may_hold_anything(backend, contexts, n_new, kv_type):
    """Would catch a key or value read before what the first new token sees: its page is another's."""
    for window in (1, 21, 64, 100):
        rng = np.random.default_rng(window)
        program, batch, past = attention_case(rng, 3, 2, 64, window, contexts, n_new, kv_type)
        seen = set()
        for s, n_context in enumerate(contexts):
            first = max(n_context - n_new[s] + 1 - window, 0) // PAGE_TOKENS
            seen |= set(batch.page_table[s, first : -(-n_context // PAGE_TOKENS)].tolist())
        passed = replace(batch, page_table=batch.page_table.copy())
        for s, n_context in enumerate(contexts):
            passed.page_table[s, : max(n_context - n_new[s] + 1 - window, 0) // PAGE_TOKENS] = 0
        dirty = copy_of(past)
        unseen = [page for page in range(past.n_pages[0]) if page not in seen]
        for memory in (*dirty._keys, *dirty._values):
            memory[unseen] = 0xFF  # NaN
        got = run(backend, program, passed, dirty)
        np.testing.assert_array_equal(got, run(backend, program, batch, copy_of(past)))
        assert np.isfinite(got).all()


def test_a_window_costs_no_more_in_a_long_context(backend):
    """Would catch work entries for chunks of keys that no token sees, by their number and keys: no clock."""
    counts = []
    for n_context, n_new in ((1024, 1), (16384, 1), (1024, 40), (16384, 40)):
        rng = np.random.default_rng(0)
        program, batch, past = attention_case(rng, 3, 2, 64, 512, (n_context,) * 2, (n_new,) * 2)
        compiled = backend.compile(program, past, StepLimits(80, 2, 80, n_context // PAGE_TOKENS))
        compiled(batch)
        header, *_, work, _ = compiled._batch._keep[-15:]
        n_work = int(header[abi.N_WORK // 8])
        entries = work.view(np.int64).reshape(-1, abi.WORK_BYTES // 8)[:n_work]
        chunks = entries[:, abi.WORK_CHUNK_STOP // 8] - entries[:, abi.WORK_CHUNK // 8]
        counts.append((n_work, int(chunks.sum())))
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert counts[0][1] <= 2 * 9


@pytest.mark.parametrize(("n_threads", "kv_type"), [(1, "f16"), (2, "f16"), (5, "f16"), (2, "q4")])
def test_results_do_not_depend_on_threads_or_batch_mates(n_threads, kv_type):
    """Would catch sums whose order follows the batch: a token alone and among others, to the bit."""
    rng = np.random.default_rng(10)
    program, batch, past = attention_case(rng, 3, 2, 64, None, (300, 290), (40, 1), kv_type)
    backend = CpuBackend(n_threads=n_threads)
    together = run(backend, program, batch, copy_of(past))
    cache = copy_of(past)
    for t in range(40):  # the first sequence token by token
        one = ForwardBatch(
            batch.token_ids[t : t + 1],
            batch.positions[t : t + 1],
            batch.slots[t : t + 1],
            np.array([0, 1], np.int32),
            batch.positions[t : t + 1] + 1,
            batch.page_table[:1],
            np.array([0], np.int32),
        )
        np.testing.assert_array_equal(run(backend, program, one, cache)[0], together[t])
    backend.close()


@pytest.mark.parametrize(
    ("group", "d_head", "kv_type", "window", "softcap", "reach"),
    [
        *((7, 64, "f16", None, None, 0), (3, 64, "f16", 100, 0.5, 0), (12, 16, "f16", 5, None, 0)),
        *((4, 96, "q8_0", None, None, 0), (3, 64, "q4", 70, None, 0), (2, 48, "f32", None, None, 0)),
        *((1, 16, "f16", None, None, 0), (2, 256, "f16", None, None, 0), (3, 16, "f16", 100, None, 60)),
    ],
)
def test_a_prompt_attends_as_its_tokens_alone(backend, group, d_head, kv_type, window, softcap, reach):
    """Would catch rows of a tile or of a vector given a neighbour's, tiles left out of which a row sees keys,
    and another order of sums than that of one token: results are equal to the bit."""
    rng = np.random.default_rng(group)
    sizes = (group, 2, d_head, window, (500, 37), (460, 33), kv_type, softcap)
    case = attention_case(rng, *sizes, reach=reach)
    program, batch, past = case
    want = run(ReferenceBackend(), program, batch, copy_of(past))
    together = run(backend, program, batch, past)
    assert_close(together, want, relative=ATTENTION_ERROR[kv_type])
    for t in (*range(0, 460, 37), 24, 23, 458, 459, 460, 461, 492):
        s = int(t >= 460)
        alone = replace(
            batch,
            token_ids=batch.token_ids[t : t + 1],
            positions=batch.positions[t : t + 1],
            slots=batch.slots[t : t + 1],
            query_start=np.array([0, 1], np.int32),
            context_len=batch.positions[t : t + 1] + 1,
            page_table=batch.page_table[s : s + 1],
            logit_rows=np.array([0], np.int32),
        )
        np.testing.assert_array_equal(run(backend, program, alone, past)[0], together[t])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("group", "d_head", "kv_type"),
    [(3, 64, "f16"), (4, 96, "q8_0"), (3, 64, "q4"), (1, 16, "f16"), (12, 16, "f16"), (2, 48, "f32")],
)
def test_sequences_that_share_a_prefix_attend_as_alone(backend, group, d_head, kv_type, window):
    """Would catch a token given a neighbour's keys or row, and bits that depend on sharing."""
    rng = np.random.default_rng(group)
    contexts = (400, 300, 330, 256, 290, 310, 200, 500, 64, 70, 1)
    shared_chunks = (4, 4, 4, 4, 4, 4, 2, 0, 1, 1, 0)
    case = attention_case(rng, group, 2, d_head, window, contexts, (1,) * len(contexts), kv_type)
    program, batch, past = case
    for s, n_chunks in enumerate(shared_chunks):
        batch.page_table[s, : 4 * n_chunks] = batch.page_table[0, : 4 * n_chunks]
    last = batch.page_table[range(len(contexts)), batch.positions // PAGE_TOKENS]
    batch.slots[:] = last * PAGE_TOKENS + batch.positions % PAGE_TOKENS  # 256 and 64 write to a shared page
    together = run(backend, program, batch, copy_of(past), max_sequences=len(contexts))
    reference = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=len(contexts))
    assert_close(together, reference, relative=ATTENTION_ERROR[kv_type])
    cache = copy_of(past)
    run(backend, program, batch, cache, max_sequences=len(contexts))  # for what is written to shared pages
    for s in range(len(contexts)):
        alone = replace(
            batch,
            token_ids=batch.token_ids[s : s + 1],
            positions=batch.positions[s : s + 1],
            slots=batch.slots[s : s + 1],
            query_start=np.array([0, 1], np.int32),
            context_len=batch.context_len[s : s + 1],
            page_table=batch.page_table[s : s + 1],
            logit_rows=np.array([0], np.int32),
        )
        np.testing.assert_array_equal(run(backend, program, alone, copy_of(cache))[0], together[s])


def test_a_shared_prefix_is_one_piece_of_work(backend):
    """Would catch sequences whose common pages are read for each of them, and a lone one made to share."""
    contexts = (300, 300, 300, 300, 290, 100)
    program, batch, past = attention_case(
        np.random.default_rng(3), 3, 2, 64, None, contexts, (1,) * len(contexts)
    )

    def n_entries(n_sharing):
        compiled = backend.compile(program, copy_of(past), StepLimits(16, 8, 16, batch.page_table.shape[1]))
        batch.page_table[:n_sharing, :16] = batch.page_table[0, :16]
        compiled(batch)
        return int(compiled._batch._headers[-1][abi.N_WORK // 8])

    n_tokens = abi.query_tokens(3)
    alone = 5 * 5 + 2
    assert n_entries(1) == alone
    assert n_entries(4) == alone - 4 * 4 + 4 * -(-4 // n_tokens)
    assert n_entries(5) == alone - 4 * 4 + 4 * -(
        -4 // n_tokens
    )  # one is left over: a row for three is no gain


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


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kv_type"),
    [(4, 2, 24, "f16"), (1, 3, 8, "f16"), (2, 2, 44, "f32"), (1, 1, 76, "q4")],
)
def test_attention_of_odd_heads(backend, group, n_kv_heads, d_head, kv_type, window):
    """Would catch a neighbour's columns in a head, a cache of another size, and columns that nobody wrote."""
    rng = np.random.default_rng(d_head)
    contexts, n_new = (1, 70, 130, 3), (1, 70, 130, 3)
    program, batch, past = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type)
    own = backend.new_cache([KVLayer(n_kv_heads, d_head)], past.n_pages, kv_type=kv_type)
    got = run(backend, program, batch, own)
    want = run(ReferenceBackend(), program, batch, past)
    assert_close(got, want, relative=0.3 if kv_type == "q4" else 1e-5)


def test_shapes_without_a_kernel_are_refused(backend):
    """Would catch widths that the vector loops would run past."""
    rows = f32_weight(np.zeros((4, 24)))
    spec = ConvSpec(0, 2, Vector(np.ones(48, np.float32)))

    def program(ops, batch):
        return ops.logit_rows(ops.conv(ops.embed(rows, batch), spec, batch), batch)

    with pytest.raises(MissingKernelError, match="multiples of 16"):
        run(backend, program, plain_batch(4))
