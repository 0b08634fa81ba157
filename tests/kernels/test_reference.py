"""The reference ops against torch, and its own promises: chunking changes nothing, hooks are checked."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kukri.errors import CapacityError, HookError, ShapeError
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.quantize import quantize
from kukri.kernels.reference import ReferenceBackend, ReferenceOps
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hooks
from kukri.kernels.weight_handles import RopeFrequencies, Vector, Weight
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

RANDOM = np.random.default_rng(0)
# float32 sums of up to 576 terms in two orders
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def weight(matrix: np.ndarray, type_name: str = "F32") -> Weight:
    kind = QUANT_TYPES[type_name]
    return Weight(quantize(matrix, kind), kind, matrix.shape)


def make_batch(
    sequences: list[tuple[int, int]], n_pages: int, seed: int = 0
) -> tuple[ForwardBatch, np.ndarray]:
    """A batch of sequences (tokens already cached, new tokens) on shuffled pages, and its page table."""
    free = np.random.default_rng(seed).permutation(n_pages).tolist()
    max_pages = max(-(-(old + new) // PAGE_TOKENS) for old, new in sequences) + 1
    table = np.zeros((len(sequences), max_pages), np.int32)
    positions, slots, query_start, context_len = [], [], [0], []
    for s, (old, new) in enumerate(sequences):
        for i in range(-(-(old + new) // PAGE_TOKENS)):
            table[s, i] = free.pop()
        for p in range(old, old + new):
            positions.append(p)
            slots.append(table[s, p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS)
        query_start.append(query_start[-1] + new)
        context_len.append(old + new)
    t = len(positions)
    arrays = [np.array(a, np.int32) for a in (positions, slots, query_start, context_len)]
    return ForwardBatch(np.zeros(t, np.int32), *arrays, table, np.arange(t, dtype=np.int32)), table


def ops_without_cache() -> ReferenceOps:
    return ReferenceOps(PagedKV([KVLayer(1, 16)], 1))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_linear_is_the_product_with_dequantized_weights(type_name: str) -> None:
    """A transposed weight, or weights placed side by side in the wrong order."""
    matrices = [normal(n, 64) for n in (33, 16, 1)]
    weights = [weight(m, type_name) for m in matrices]
    x, bias, residual = normal(5, 64), normal(50), normal(5, 50)
    dense = np.concatenate([dequantize(w.data, w.type) for w in weights])
    got = ops_without_cache().linear(x, weights, Vector(bias), residual)
    want = x.astype(np.float64) @ dense.astype(np.float64).T + bias + residual
    np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("n_rows", [1, 3, 16, 65])
def test_linear_of_a_row_does_not_depend_on_the_others(n_rows: int) -> None:
    """A matrix product whose sums change order with the number of rows: chunking would change logits."""
    ops, w, x = ops_without_cache(), weight(normal(577, 575)), normal(65, 575)
    whole = ops.linear(x, [w])
    parts = [ops.linear(x[i : i + n_rows], [w]) for i in range(0, 65, n_rows)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rms_norm_and_swiglu_match_torch() -> None:
    """eps outside of the root, a mean over the wrong axis, gate and up exchanged, exp that overflows."""
    ops, x, w = ops_without_cache(), normal(7, 48) * 1e-2, normal(48)
    want = torch.nn.functional.rms_norm(torch.from_numpy(x), (48,), torch.from_numpy(w), 1e-3)
    np.testing.assert_allclose(ops.rms_norm(x, Vector(w), 1e-3), want.numpy(), **CLOSE)
    gate, up = normal(7, 48) * 4, normal(7, 48)
    gate[0, 0] = -200.0
    want = torch.nn.functional.silu(torch.from_numpy(gate)) * torch.from_numpy(up)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(ops.map("gated_silu", up, gate), want.numpy(), **CLOSE)


def test_head_norm_and_layer_norm_match_torch() -> None:
    """A mean over all heads at once, a biased mean or variance."""
    ops, x, w, bias = ops_without_cache(), normal(7, 48) + 0.5, normal(48), normal(48)
    t = torch.from_numpy
    heads = torch.nn.functional.rms_norm(t(x).reshape(7, 3, 16), (16,), t(w[:16]), 1e-3)
    np.testing.assert_allclose(ops.head_norm(x, Vector(w[:16]), 1e-3), heads.reshape(7, 48).numpy(), **CLOSE)
    want = torch.nn.functional.layer_norm(t(x), (48,), t(w), t(bias), 1e-3)
    np.testing.assert_allclose(ops.layer_norm(x, Vector(w), Vector(bias), 1e-3), want.numpy(), **CLOSE)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_rotates_pairs_as_complex_numbers(rotary_dim: int) -> None:
    """A wrong sign, interleaved pairs, or the dimensions beyond rotary_dim touched."""
    spec = AttentionSpec(0, 3, 1, 16, 1.0)
    frequencies = 1000.0 ** (-np.arange(rotary_dim // 2) / 5)
    rope = RopeFrequencies(tuple(frequencies), 100)
    batch, _ = make_batch([(50, 4), (3, 2)], 16)
    q, k = normal(6, 48), normal(6, 16)
    before = q.copy()
    got_q, got_k = ops_without_cache().rope(q, k, rope, spec, batch)
    half = rotary_dim // 2
    for x, got in ((q, got_q), (k, got_k)):
        heads, rotated = x.reshape(6, -1, 16), got.reshape(6, -1, 16)
        turned = (heads[..., :half] + 1j * heads[..., half:rotary_dim]) * np.exp(
            1j * batch.positions[:, None, None] * frequencies
        )
        np.testing.assert_allclose(rotated[..., :half], turned.real, atol=2e-5)
        np.testing.assert_allclose(rotated[..., half:rotary_dim], turned.imag, atol=2e-5)
        np.testing.assert_array_equal(rotated[..., rotary_dim:], heads[..., rotary_dim:])
    np.testing.assert_array_equal(q, before)


def test_rope_refuses_a_position_beyond_its_context() -> None:
    """Garbage angles read beyond the last row."""
    rope, spec = RopeFrequencies((1.0,) * 8, 500), AttentionSpec(0, 1, 1, 16, 1.0)
    last, _ = make_batch([(499, 1)], 64)
    beyond, _ = make_batch([(500, 1)], 64)
    ops_without_cache().rope(normal(1, 16), normal(1, 16), rope, spec, last)
    with pytest.raises(ShapeError, match="position 500"):
        ops_without_cache().rope(normal(1, 16), normal(1, 16), rope, spec, beyond)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_attention_to_later_tokens_matches_torch(window: int | None) -> None:
    """Causality left in, a window of one side, and a neighbour's keys."""
    spec = AttentionSpec(0, 2, 2, 16, 0.3, window, is_causal=False)
    lengths = [(0, 37), (0, 1), (0, 20)]
    batch, _ = make_batch(lengths, 24)
    q, k, v = (normal(58, 32) for _ in range(3))
    got = ReferenceOps(PagedKV([KVLayer(2, 16)], 24, kv_type="f32")).attention(q, k, v, spec, batch)
    for start, stop in pairwise(batch.query_start):
        parts = (torch.from_numpy(x[start:stop]).reshape(-1, 2, 16).transpose(0, 1) for x in (q, k, v))
        at = torch.arange(stop - start)
        visible = (at[:, None] - at).abs() < (window or 1 << 30)
        want = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=visible, scale=0.3)
        np.testing.assert_allclose(got[start:stop], want.transpose(0, 1).reshape(-1, 32).numpy(), **CLOSE)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 5, 17])
def test_attention_matches_torch_over_holes_and_offsets(group: int, window: int | None) -> None:
    """A [t, t] mask after a cache, heads matched to the wrong keys, a neighbour's pages read, a window off
    by one. Pages that belong to nobody hold NaN."""
    n_kv_heads, d_head, n_pages = 2, 16, 24
    spec = AttentionSpec(1, group * n_kv_heads, n_kv_heads, d_head, 0.3, window)
    lengths = [(37, 3), (0, 1), (63, 1), (0, 65), (15, 2)]
    batch, table = make_batch(lengths, n_pages)
    cache = PagedKV([KVLayer(n_kv_heads, d_head)] * 2, n_pages, kv_type="f32")
    cache.keys[1][:], cache.values[1][:] = np.nan, np.nan
    widths = (spec.n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head)
    contexts = [[normal(old + new, width) for width in widths] for old, new in lengths]
    for s, (old, _) in enumerate(lengths):  # what earlier steps stored, one slot at a time
        for p in range(old):
            page, offset = table[s, p // PAGE_TOKENS], p % PAGE_TOKENS
            cache.keys[1][page, :, :, offset] = contexts[s][1][p].reshape(n_kv_heads, d_head)
            cache.values[1][page, :, offset] = contexts[s][2][p].reshape(n_kv_heads, d_head)
    new_rows = [[part[old:] for part in context] for context, (old, _) in zip(contexts, lengths)]
    q, k, v = (np.concatenate([rows[i] for rows in new_rows]) for i in range(3))
    got = ReferenceOps(cache).attention(q, k, v, spec, batch)

    for s, (old, new) in enumerate(lengths):
        full_q, full_k, full_v = (
            torch.from_numpy(part).reshape(old + new, -1, d_head).transpose(0, 1) for part in contexts[s]
        )
        at = torch.arange(old + new)
        distance = at[:, None] - at[None, :]
        visible = (distance >= 0) & (distance < (window or 1 << 30))
        want = torch.nn.functional.scaled_dot_product_attention(
            full_q, full_k, full_v, attn_mask=visible, scale=0.3, enable_gqa=True
        )
        want = want.transpose(0, 1).reshape(old + new, -1)[old:].numpy()
        start = batch.query_start[s]
        np.testing.assert_allclose(got[start : start + new], want, **CLOSE)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_a_column_of_the_softmax(window: int | None) -> None:
    """A sink that weighs its own value, that belongs to another head, or that is scaled as scores are."""
    spec = AttentionSpec(0, 6, 2, 16, 0.3, window, sinks=Vector(normal(6) * 3))
    batch, _ = make_batch([(0, 20)], 4)
    q, k, v = normal(20, 96), normal(20, 32), normal(20, 32)
    got = ReferenceOps(PagedKV([KVLayer(2, 16)], 4, kv_type="f32")).attention(q, k, v, spec, batch)
    heads_q, heads_k, heads_v = (
        torch.from_numpy(x).reshape(20, -1, 16).transpose(0, 1).repeat_interleave(n, 0)
        for x, n in ((q, 1), (k, 3), (v, 3))
    )
    distance = torch.arange(20)[:, None] - torch.arange(20)
    hidden = (distance < 0) | (distance >= (window or 99))
    scores = (heads_q @ heads_k.transpose(1, 2) * 0.3).masked_fill(hidden, -torch.inf)
    assert spec.sinks is not None
    column = torch.from_numpy(spec.sinks.data)[:, None, None].expand(6, 20, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    want = (weights @ heads_v).transpose(0, 1).reshape(20, -1)
    np.testing.assert_allclose(got, want.numpy(), **CLOSE)


def test_the_cache_saturates_and_keeps_nan() -> None:
    """An infinity stored where a key is too large for float16; a NaN hidden from the logits that follow."""
    cache = PagedKV([KVLayer(1, 16)], 2)
    batch, table = make_batch([(0, 2)], 2)
    k, v = normal(2, 16), normal(2, 16)
    k[0, 3], v[0, 4], v[1, 5] = 1e6, -1e6, np.nan
    with np.errstate(invalid="ignore"):
        ReferenceOps(cache).attention(normal(2, 16), k, v, AttentionSpec(0, 1, 1, 16, 0.1), batch)
    page = table[0, 0]
    assert cache.keys[0][page, 0, 3, 0] == np.finfo(np.float16).max
    assert cache.values[0][page, 0, 0, 4] == np.finfo(np.float16).min
    assert np.isnan(cache.values[0][page, 0, 1, 5])


def test_embed_split_and_logit_rows() -> None:
    """Rows or columns taken from the wrong place."""
    table, ops = normal(10, 32), ops_without_cache()
    ids, rows = np.array([3, 9, 3], np.int32), np.array([2, 0], np.int32)
    batch = ForwardBatch(ids, ids, ids, ids, ids, ids, rows)
    x = ops.embed(weight(table), batch)
    np.testing.assert_array_equal(x, table[ids])
    np.testing.assert_array_equal(ops.logit_rows(x, batch), table[[3, 3]])
    a, b, c = ops.split(x, (16, 15, 1))
    np.testing.assert_array_equal(np.concatenate([a, b, c], axis=1), x)
    assert (a.shape, b.shape, c.shape) == ((3, 16), (3, 15), (3, 1))


def test_hooks_edit_in_place_and_replace_in_order() -> None:
    """A replacement dropped, or the second listener shown the value before the first."""

    def add_one(name: str, x: np.ndarray) -> None:
        x += 1

    def double(name: str, x: np.ndarray) -> np.ndarray:
        assert name == "blocks.3.hook_x"
        return x * 2

    hooks = Hooks()
    for hook in (add_one, double, add_one):
        hooks.add({"blocks.3.hook_x": hook})
    ops = ReferenceOps(PagedKV([KVLayer(1, 16)], 1), hooks.names)
    ops.on_tap = hooks
    np.testing.assert_array_equal(ops.tap("hook_x", 3, np.zeros((2, 4), np.float32)), np.full((2, 4), 3))
    untouched = np.zeros((2, 4), np.float32)
    assert ops.tap("hook_x", 2, untouched) is untouched


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (np.zeros((2, 5), np.float32), r"must return float32 \(2, 4\), not float32 \(2, 5\)"),
        (np.zeros((2, 4)), "must return float32.*not float64"),
        ([[0.0] * 4] * 2, "not list"),
        (ZeroDivisionError("oh"), "raised ZeroDivisionError: oh"),
    ],
)
def test_a_wrong_hook_is_named(returned: object, says: str) -> None:
    """An error deep in NumPy that does not say which hook was wrong."""

    def hook(name: str, x: np.ndarray) -> object:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(HookError, match=f"blocks.0.hook_resid_pre.*{says}"):
        Hooks({"blocks.0.hook_resid_pre": hook})("blocks.0.hook_resid_pre", np.zeros((2, 4), np.float32))  # type: ignore[dict-item]


def test_hooks_are_not_shown_arrays_without_rows() -> None:
    """A hook that takes a maximum fails on the logits of a step amid a prompt, of which there are none."""
    hooks = Hooks({"ln_final.hook_normalized": lambda name, x: x.max()})
    hooks("ln_final.hook_normalized", np.zeros((0, 4), np.float32))


def test_a_step_beyond_the_limits_is_refused() -> None:
    """A batch that another backend could not hold passes on the reference."""
    program = ReferenceBackend().compile(
        lambda ops, batch: None, PagedKV([KVLayer(1, 16)], 1), StepLimits(2, 1, 2, 8)
    )
    batch, _ = make_batch([(0, 3)], 4)
    with pytest.raises(CapacityError, match="a step of 3 tokens"):
        program(batch)
