"""Attention to a q8_0 cache by whole numbers, held against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.kv_types import KV_BLOCK
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.specs import AttentionSpec
from tests.kernels.small_programs import assert_close, attention_case, f32_weight, run
from tests.quick import quick

CHUNK = 64


def cached(cache, batch, s, n_context):
    """A sequence's numbers in float64: keys, their scales, values, their scales [n, G, K or K/32]."""
    pages = batch.page_table[s, : -(-n_context // PAGE_TOKENS)]
    keys, values = cache.keys[0][pages], cache.values[0][pages]

    def tokens(array, order):  # [P, …] to [n, G, …]
        array = array.transpose(order)
        return array.reshape(-1, *array.shape[2:])[:n_context].astype(np.float64)

    k = tokens(keys["quants"], (0, 4, 1, 2, 3))  # [n, G, K/32, 32]
    k_scales = tokens(keys["scales"], (0, 3, 1, 2))
    v = tokens(values["quants"], (0, 2, 1, 3))
    v_scales = tokens(values["scales"], (0, 3, 1, 2))
    return k, k_scales, v.reshape(k.shape), v_scales


def attended(q, k, k_scales, v, v_scales, first, last):
    """One query head [K] over keys first to last of its key head: chunk by chunk, in float64 but for q."""
    blocks = q.astype(np.float32).reshape(-1, KV_BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    numbers = np.rint(blocks * (np.float32(127) / largest)).astype(np.float64)
    scores = np.einsum("bd,nbd,nb,b->n", numbers, k, k_scales, largest[:, 0] / 127.0)
    tops, sums, parts = [], [], []
    for start in range(first // CHUNK * CHUNK, last + 1, CHUNK):
        seen = slice(max(start, first), min(start + CHUNK, last + 1))
        tops.append(scores[seen].max())
        e = np.exp(scores[seen] - tops[-1])
        sums.append(e.sum())
        weights = e[:, None] * v_scales[seen]  # [n, K/32]
        total = weights.sum(axis=0)
        whole = np.rint(weights * (32767 / total))
        parts.append(np.einsum("nb,nbd->bd", whole, v[seen]) * (total / 32767)[:, None])
    share = np.exp(np.array(tops) - max(tops))
    return (np.einsum("c,cbd->bd", share, parts) / (share @ sums)).reshape(-1)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("group", "d_head"),
    quick([(3, 64), (1, 32), (4, 96), (7, 64), (2, 256)], kept=[(3, 64), (1, 32), (2, 256)]),
)
def test_whole_numbers_are_those_of_the_definition(backend, group, d_head, window, scale):
    """Would catch a query that is not rounded, or by a neighbour's scale, weights rounded by the sum of other
    keys than those a row sees, scales of another block, and pairs of keys mixed up. Weights are alike, or one
    is nearly their sum, by `scale`."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 230, 130, 64), (1, 1, 40, 130, 3)
    _, batch, past = attention_case(rng, group, 2, d_head, window, contexts, n_new, "q8_0")
    spec = AttentionSpec(0, 2 * group, 2, d_head, scale * d_head**-0.5, window)
    sizes = (2 * group * d_head, 2 * d_head, 2 * d_head)
    x = rng.standard_normal((batch.n_tokens, sum(sizes))).astype(np.float32)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(f32_weight(x), batch), sizes)
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    got = run(backend, program, batch, past, max_sequences=5)
    queries = (x[:, : sizes[0]] * np.float32(spec.scale)).reshape(batch.n_tokens, 2, group, d_head)
    want = np.empty_like(got).reshape(queries.shape)
    for s, n_context in enumerate(contexts):
        numbers = cached(past, batch, s, n_context)
        for t in range(batch.query_start[s], batch.query_start[s + 1]):
            last = int(batch.positions[t])
            first = 0 if window is None else max(0, last + 1 - window)
            for g in range(2):
                head = [array[:, g] for array in numbers]
                want[t, g] = [attended(q, *head, first, last) for q in queries[t, g]]
    assert_close(got, want.reshape(got.shape), relative=6e-5)  # two weights may be rounded to another number
