"""Small programs of a few ops, what they run on, and how results are compared."""

from __future__ import annotations

import inspect

import numpy as np

from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.op_set import Ops
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.quantize import quantize
from kukri.kernels.reference import ReferenceBackend, ReferenceOps
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Vector, Weight
from kukri.quant.types import PACKED, QUANT_TYPES
from tests.random_blocks import random_rows

# one type for each form of tiles: what else a type has is how its blocks are read
QUANTIZED = tuple({type.tiles.name: type.name for type in PACKED}.values())
TYPES = ("F32", "F16", "BF16", *QUANTIZED)

# Why these bounds: results differ by the order of float32 sums alone, a few ulp of the largest term.
RELATIVE = 3e-6


def check_ops(ops, but=frozenset()):
    """Asserts that a class has every op of the op set, with its parameters; `but` those that it need not."""
    wanted = {name for name in vars(Ops) if not name.startswith("_")} - but
    assert len(wanted) > 10
    for name in wanted:
        assert hasattr(ops, name), f"{ops.__name__} has no {name}"
        parameters = [*inspect.signature(getattr(Ops, name)).parameters]
        assert [*inspect.signature(getattr(ops, name)).parameters] == parameters, name


def weight(rng, type_name, n_out, n_in):
    """Random blocks of a type; `n_in` is rounded up to whole blocks."""
    type = QUANT_TYPES[type_name]
    n_in = -(-n_in // type.block_size) * type.block_size
    if type.block is not None:
        data = random_rows(rng, type_name, (n_out, n_in))
    else:
        data = quantize((rng.standard_normal((n_out, n_in)) * 0.1).astype(np.float32), type)
    return Weight(data, type, (n_out, n_in), f"test.{type_name}")


def f32_weight(array):
    array = np.ascontiguousarray(array, np.float32)
    return Weight(array.view(np.uint8), QUANT_TYPES["F32"], array.shape)


def exact_rows(rng, n_rows, n):
    """Rows that int8 per block of 32 holds without loss: whole numbers up to 127, a 127 in each block."""
    x = rng.integers(-127, 128, (n_rows, n // 32, 32)).astype(np.float32)
    x[..., 5] = 127
    return (x * np.exp2(rng.integers(-9, 3, (n_rows, n // 32, 1)))).reshape(n_rows, n).astype(np.float32)


def plain_batch(n_tokens, n_rows=None):
    """A step of one sequence without a cache."""
    ids = np.arange(n_tokens, dtype=np.int32)
    n_pages = -(-n_tokens // PAGE_TOKENS)
    return ForwardBatch(
        ids,
        ids,
        ids,
        np.array([0, n_tokens], np.int32),
        np.array([n_tokens], np.int32),
        np.arange(n_pages, dtype=np.int32)[None],
        ids if n_rows is None else ids[:n_rows],
    )


def run(backend, program, batch, cache=None, max_sequences=4):
    """The program's result on a backend whose buffers held NaN before."""
    cache = cache or backend.new_cache([KVLayer(1, 16)], 32)
    limits = StepLimits(max(batch.n_tokens, 8) + 3, max_sequences, max(batch.n_tokens, 8) + 3, 32)
    compiled = backend.compile(program, cache, limits)
    if isinstance(backend, CpuBackend):
        compiled.plan.memory.view(np.float32)[:] = np.nan
    return compiled(batch).numpy().copy()


def both(backend, program, batch):
    """(CPU, reference) results of one program."""
    return run(backend, program, batch), run(ReferenceBackend(), program, batch)


def assert_close(got, want, relative=RELATIVE):
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= relative * max(np.abs(want).max(), 1e-30)


def fill(array, rng):
    """Random numbers of any size in a cache; scales are at most 1 / 127."""
    if array.dtype.names:
        bits = np.iinfo(array.dtype["quants"].base)
        array["quants"] = rng.integers(max(bits.min, -127), bits.max, array["quants"].shape, endpoint=True)
        array["scales"] = rng.uniform(0, 1 / 127, array["scales"].shape)
    else:
        array[:] = rng.standard_normal(array.shape)


# How near the CPU attends to the reference, of the largest number. Weights of values of q8_0 are rounded to
# 1 / 32,767 of their sum.
ATTENTION_ERROR = {
    kv_type: 2e-4 if kv_type == "q8_0" else 1e-5 for kv_type, numbers in KV_TYPES.items() if numbers.encode
}


def rounded(q):
    """Queries that rounding to int8, 32 numbers at a time, leaves as they are."""
    blocks = q.reshape(*q.shape[:-1], -1, 32)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    return (np.rint(blocks / scales) * scales).reshape(q.shape)


def round_reference_queries(monkeypatch):
    """Makes the reference round queries, as the CPU does on a q8_0 cache."""
    attend = ReferenceOps._attend
    monkeypatch.setattr(
        ReferenceOps, "_attend", lambda self, q, spec, batch: attend(self, rounded(q), spec, batch)
    )


def attention_case(
    rng,
    group,
    n_kv_heads,
    d_head,
    window,
    contexts,
    n_new,
    kv_type="f16",
    softcap=None,
    is_causal=True,
    sinks=None,
    reach=0,
):
    """A program and a batch of several sequences, their pages scattered, on caches with the same past."""
    n_tokens = sum(n_new)
    width = (group + 2) * n_kv_heads * d_head
    numbers = rng.standard_normal((n_tokens, width))
    heads = (group * n_kv_heads, n_kv_heads, d_head)
    if kv_type == "q8_0":
        numbers[:, : heads[0] * d_head] = rounded(numbers[:, : heads[0] * d_head])
    x = f32_weight(numbers)
    sinks = None if sinks is None else Vector(np.asarray(sinks, np.float32))
    distances = Vector(rng.standard_normal(2 * reach * heads[0]).astype(np.float32)) if reach else None
    spec = AttentionSpec(0, *heads, d_head**-0.5, window, softcap, is_causal, sinks, distances=distances)
    n_pages = [-(-c // PAGE_TOKENS) for c in contexts]
    free = rng.permutation(sum(n_pages) + 5).astype(np.int32)  # pages with holes between them
    table = np.zeros((len(contexts), max(n_pages)), np.int32)
    for s, n in enumerate(n_pages):
        table[s, :n], free = free[:n], free[n:]
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, n_new, strict=True)])
    owner = np.repeat(np.arange(len(contexts)), n_new)
    slots = table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    batch = ForwardBatch(
        np.arange(n_tokens, dtype=np.int32),
        positions.astype(np.int32),
        slots.astype(np.int32),
        np.concatenate([[0], np.cumsum(n_new)]).astype(np.int32),
        np.array(contexts, np.int32),
        table,
        np.arange(n_tokens, dtype=np.int32),
    )
    past = PagedKV([KVLayer(n_kv_heads, d_head)], sum(n_pages) + 5, kv_type=kv_type)
    fill(past.keys[0], rng)
    fill(past.values[0], rng)

    def program(ops, batch):
        sizes = (group * n_kv_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head)
        q, k, v = ops.split(ops.embed(x, batch), sizes)
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    return program, batch, past


def copy_of(cache):
    new = PagedKV(cache.layout, cache.n_pages, kv_type=cache.kv_type)
    for layer, keys in cache.keys.items():
        new.keys[layer][:], new.values[layer][:] = keys, cache.values[layer]
    return new
