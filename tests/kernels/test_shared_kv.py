"""Layers that read another layer's keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import RopeFrequencies
from tests.kernels.small_programs import assert_close, f32_weight, plain_batch, round_reference_queries

N, HEADS, GROUPS = 21, 4, 2
ROPE = RopeFrequencies((1.0, 0.5, 0.25, 0.0), 64)


def program_of(d_head, rng):
    """A layer with keys and values, and two that read them: with a rotation and without."""
    q0, k, v, q1, q2 = (
        f32_weight(rng.standard_normal((N, n * d_head))) for n in (HEADS, GROUPS, GROUPS, HEADS, HEADS)
    )
    qkv = f32_weight(np.concatenate([w.data.view(np.float32) for w in (q0, k, v)], axis=1))
    sizes = (HEADS * d_head, GROUPS * d_head, GROUPS * d_head)

    def program(ops, batch):
        specs = [AttentionSpec(i, HEADS, GROUPS, d_head, 0.3, reads=0 if i else None) for i in range(3)]
        q, *kv = ops.split(ops.embed(qkv, batch), sizes)
        q, k = ops.rope(q, kv[0], ROPE, specs[0], batch)
        y = ops.attention(q, k, kv[1], specs[0], batch)
        q, none = ops.rope(ops.embed(q1, batch), None, ROPE, specs[1], batch)
        assert none is None
        y = ops.add(ops.attention(q, None, None, specs[1], batch), y)
        y = ops.add(ops.attention(ops.embed(q2, batch), None, None, specs[2], batch), y)
        return ops.logit_rows(y, batch)

    return program


def results(backend, program, kv_type, d_head):
    layout = [KVLayer(GROUPS, d_head), KVLayer(0, d_head), KVLayer(0, d_head)]
    cache = backend.new_cache(layout, 8, kv_type=kv_type)
    compiled = backend.compile(program, cache, StepLimits(N, 2, N, 8))
    return [compiled(batch).numpy().copy() for batch in steps()]


def steps():
    """A prompt, then two tokens one after another."""
    whole = plain_batch(N)
    for start, stop in ((0, N - 2), (N - 2, N - 1), (N - 1, N)):
        yield type(whole)(
            token_ids=whole.token_ids[start:stop],
            positions=whole.positions[start:stop],
            slots=whole.slots[start:stop],
            query_start=np.array([0, stop - start], np.int32),
            context_len=np.array([stop], np.int32),
            page_table=np.arange(8, dtype=np.int32)[None],
            logit_rows=np.arange(stop - start, dtype=np.int32),
        )


@pytest.mark.parametrize(("kv_type", "d_head"), [("f16", 16), ("f16", 24), ("q8_0", 32), ("q4", 16)])
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_layer_reads_the_keys_of_another(name, kv_type, d_head, monkeypatch):
    """Keys stored over those of the other layer, queries of q4 that are not rotated as its keys are, a
    rotation lost without keys, or the reading layer's own cache read."""
    if (name, kv_type) == ("cpu", "q8_0"):
        round_reference_queries(monkeypatch)
    program = program_of(d_head, np.random.default_rng(1))
    want = results(ReferenceBackend(), program, kv_type, d_head)
    backend = make_backend(name)
    for got, expected in zip(results(backend, program, kv_type, d_head), want, strict=True):
        assert_close(got, expected, 5e-3)
