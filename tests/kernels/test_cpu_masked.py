"""Attention by a given mask, rotation by given positions: the CPU backend against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import RopeFrequencies
from tests.kernels.small_programs import assert_close, attention_case, copy_of, f32_weight, plain_batch


def run(backend, program, batch, cache, mask_heads):
    """The program's result on a backend whose buffers held NaN before."""
    limits = StepLimits(batch.n_tokens + 3, 1, batch.n_tokens + 3, 32, mask_heads)
    compiled = backend.compile(program, cache, limits)
    if isinstance(backend, CpuBackend):
        compiled.plan.memory.view(np.float32)[:] = np.nan
    return compiled(batch).numpy().copy()


def random_mask(rng, n_heads, n_tokens, n_context):
    """Added numbers, hidden keys, one token with lowest numbers alone, one that sees nothing."""
    mask = rng.standard_normal((n_heads, n_tokens, n_context)).astype(np.float32)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    mask[:, n_tokens // 2] = np.finfo(np.float32).min
    mask[:, n_tokens // 3] = -np.inf
    return mask


@pytest.mark.parametrize(("n_context", "n_new"), [(1, 1), (63, 63), (65, 1), (200, 20)])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "softcap"), [(1, 3, 16, None), (3, 2, 64, 0.7), (8, 1, 48, None)]
)
def test_masked_attention(backend, group, n_kv_heads, d_head, softcap, per_head, n_context, n_new):
    """Would catch a mask read at another token, head or key, causality that stays, a capped mask."""
    rng = np.random.default_rng(n_context)
    sizes = (group, n_kv_heads, d_head, 10, [n_context], [n_new])
    program, batch, past = attention_case(rng, *sizes, softcap=softcap)
    mask = random_mask(rng, group * n_kv_heads if per_head else 1, n_new, n_context)
    batch = replace(batch, mask=mask)
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], len(mask))
    want = run(ReferenceBackend(), program, batch, caches[1], len(mask))
    assert_close(got, want, relative=1e-5)
    np.testing.assert_array_equal(caches[0].keys[0], caches[1].keys[0])
    assert not got[n_new // 3].any()


def test_masked_attention_with_sinks(backend):
    """Sinks that count only without a mask, or make numbers of a token that sees nothing."""
    rng = np.random.default_rng(0)
    program, batch, past = attention_case(rng, 3, 2, 64, None, [70], [20], sinks=rng.standard_normal(6))
    batch = replace(batch, mask=random_mask(rng, 6, 20, 70))
    got = run(backend, program, batch, copy_of(past), 6)
    want = run(ReferenceBackend(), program, batch, copy_of(past), 6)
    assert_close(got, want, relative=1e-5)
    assert not got[20 // 3].any()


def test_masked_attention_ignores_what_lies_after_the_context(backend):
    """Would catch NaN of an earlier owner of the last page."""
    rng = np.random.default_rng(3)
    program, batch, past = attention_case(rng, 2, 2, 32, None, [37], [5])
    batch = replace(batch, mask=np.zeros((1, 5, 37), np.float32))
    dirty = copy_of(past)
    page = batch.page_table[0, 37 // PAGE_TOKENS]
    dirty.keys[0][page, :, :, 37 % PAGE_TOKENS :] = np.nan
    dirty.values[0][page, :, 37 % PAGE_TOKENS :] = np.nan
    want = run(backend, program, batch, copy_of(past), 1)
    np.testing.assert_array_equal(run(backend, program, batch, dirty, 1), want)


@pytest.mark.parametrize("make", [ReferenceBackend, lambda: CpuBackend(n_threads=1)])
def test_a_mask_comes_where_it_is_expected_and_nowhere_else(make):
    """Would catch a mask that is silently dropped, or read where there is none."""
    backend = make()
    rng = np.random.default_rng(3)
    program, batch, past = attention_case(rng, 2, 2, 32, None, [37], [5])
    for heads, mask in (
        (0, np.zeros((1, 5, 37), np.float32)),
        (1, None),
        (1, np.zeros((1, 5, 36), np.float32)),
        (1, np.zeros((4, 5, 37), np.float32)),
    ):
        with pytest.raises(ShapeError, match="mask"):
            run(backend, program, replace(batch, mask=mask), copy_of(past), heads)


def rope_of(max_context):
    return RopeFrequencies(tuple(10000.0 ** -(np.arange(8) / 8)), max_context)


def rotating(rope):
    """q rotated by the positions of the step, without attention."""
    rows = f32_weight(np.random.default_rng(1).standard_normal((12, 96)))
    spec = AttentionSpec(0, 4, 1, 16, 1.0)

    def program(ops, batch):
        q, k, _ = ops.split(ops.embed(rows, batch), (64, 16, 16))
        return ops.logit_rows(ops.rope(q, k, rope, spec, batch)[0], batch)

    return program


def test_rope_rotates_by_other_positions_where_the_batch_has_them(backend):
    """Would catch positions of an earlier step left in place, and those of the cache used for both."""
    program, cache = rotating(rope_of(64)), PagedKV([KVLayer(1, 16)], 4)
    plain = plain_batch(9)
    other = replace(plain, rope_positions=np.array([5, 63, 0, 1, 1, 30, 2, 9, 8], np.int32))
    compiled = backend.compile(program, cache, StepLimits(9, 1, 9, 4))
    reference = ReferenceBackend().compile(program, cache, StepLimits(9, 1, 9, 4))
    for batch in (plain, other, plain):
        assert_close(compiled(batch).numpy().copy(), reference(batch).numpy())


@pytest.mark.parametrize("position", [-1, 64])
def test_a_position_outside_the_context_never_reaches_a_kernel(backend, position):
    """Would catch a read outside the table of angles."""
    batch = replace(plain_batch(2), rope_positions=np.array([0, position], np.int32))
    compiled = backend.compile(rotating(rope_of(64)), PagedKV([KVLayer(1, 16)], 4), StepLimits(9, 1, 9, 4))
    with pytest.raises(ShapeError, match="rotate by outside"):
        compiled(batch)
