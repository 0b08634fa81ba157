"""Adapters' low-rank updates on every backend: their arithmetic, and the independence of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import LowRank, Vector, Weight
from tests.kernels.small_programs import assert_close, exact_rows, f32_weight, weight

N_IN, N_OUTS, D = 64, (32, 24, 40), 96
LENGTHS = (1, 9, 3, 1, 7, 2)
SLOTS = (1, 0, -1, 2, 1, -1)


def named(made: Weight, name: str) -> Weight:
    return replace(made, name=name)


def update(rng, type_name, n_out, n_in, rank, scale=0.7):
    return LowRank(weight(rng, type_name, rank, n_in), weight(rng, type_name, n_out, rank), scale)


def case(seed=0, type_name="F32", rank=8):
    """(a program of two products, the adapters of its slots, one that lacks a matrix); see SLOTS."""
    rng = np.random.default_rng(seed)
    x = f32_weight(exact_rows(rng, sum(LENGTHS), N_IN))
    matrices = [named(weight(rng, "Q8_0", n, N_IN), f"in.{i}") for i, n in enumerate(N_OUTS)]
    out = named(weight(rng, "F32", D, sum(N_OUTS)), "out")
    start = f32_weight(rng.standard_normal((sum(LENGTHS), D)))
    bias = Vector(rng.standard_normal(sum(N_OUTS)).astype(np.float32))
    other = "F16" if type_name == "F32" else "F32"
    adapters = [
        {w.name: update(rng, kind, *w.shape, r, scale) for w in (*matrices, out)}
        for kind, r, scale in ((type_name, rank, 0.7), (other, 17, -2.0), (type_name, 5, 1.5))
    ]
    del adapters[2]["in.1"]

    def program(ops, batch):
        y = ops.linear(ops.embed(x, batch), matrices, bias, tap=("inner", None))
        y = ops.linear(y, [out], None, ops.embed(start, batch), ("outer", None))
        rows = ops.logit_rows(y, batch)
        return ops.linear(rows, [named(f32_weight(np.eye(D)), "head")])

    head = update(rng, type_name, D, D, 3)
    adapters[0]["head"] = head
    return program, adapters


def batch_of(sequences, slots):
    """A step of some sequences of the texts; their last token and their first want logits, in this order."""
    starts = np.cumsum([0, *LENGTHS])
    ids = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in sequences]).astype(np.int32)
    lengths = [LENGTHS[s] for s in sequences]
    query_start = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    pages = np.arange(len(sequences), dtype=np.int32)
    rows = np.concatenate([query_start[1:] - 1, query_start[:-1]]).astype(np.int32)
    return ForwardBatch(
        ids,
        positions,
        np.repeat(16 * pages, lengths).astype(np.int32) + positions,
        query_start,
        np.array(lengths, np.int32),
        pages[:, None].copy(),
        rows,
        adapters=None if slots is None else np.array(slots, np.int32),
    )


def run(backend, program, adapters, batch, taps=()):
    """(the result, the taps' values)."""
    seen = {}
    limits = StepLimits(40, 8, 40, 1)
    cache = backend.new_cache([KVLayer(1, 16)], 8)
    compiled = backend.compile(program, cache, limits, frozenset(taps), adapters)
    if hasattr(compiled, "plan"):
        compiled.plan.memory.view(np.float32)[:] = np.nan
    result = compiled(batch, lambda name, x: seen.update({name: x.copy()})).numpy().copy()
    return result, seen


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_updates_of_every_type_and_rank(backend, type_name: str, rank: int) -> None:
    """A rank that is no whole tile, a matrix that ends within one, another's adapter, a lost scale."""
    program, adapters = case(1, type_name, rank)
    batch = batch_of(range(6), SLOTS)
    got, seen = run(backend, program, adapters, batch, ["inner", "outer"])
    want, expected = run(ReferenceBackend(), program, adapters, batch, ["inner", "outer"])
    assert_close(got, want, relative=1e-5)
    for name in ("inner", "outer"):
        assert_close(seen[name], expected[name], relative=1e-5)
    plain, _ = run(ReferenceBackend(), program, (), batch)
    assert np.abs(want - plain).max() > 1e-2 * np.abs(plain).max(), "the premise: adapters change something"


def test_the_reference_is_the_formula() -> None:
    """The definition itself: W + scale * B A in place of W."""
    rng = np.random.default_rng(2)
    w, x = rng.standard_normal((24, 16)), rng.standard_normal((sum(LENGTHS), 16))
    a, b = rng.standard_normal((4, 16)), rng.standard_normal((24, 4))
    made = LowRank(f32_weight(a), f32_weight(b), 0.25)
    matrix, rows = named(f32_weight(w), "w"), f32_weight(x)
    batch = batch_of(range(6), (0, -1, 0, -1, -1, 0))
    got, _ = run(
        ReferenceBackend(),
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(rows, batch), [matrix]), batch),
        [{"w": made}],
        batch,
    )
    has_one = np.repeat([True, False, True, False, False, True], LENGTHS)
    want = np.where(has_one[:, None], x @ (w + 0.25 * b @ a).T, x @ w.T)
    np.testing.assert_allclose(got, want[batch.logit_rows], atol=1e-4)


def test_a_sequence_is_alone_in_any_crowd(backend) -> None:
    """A result that depends on the adapters or rows next to it, to the bit."""
    program, adapters = case(3, "BF16")
    whole, _ = run(backend, program, adapters, batch_of(range(6), SLOTS))
    for s in range(6):
        alone, _ = run(backend, program, adapters, batch_of([s], [SLOTS[s]]))
        np.testing.assert_array_equal(alone, whole[[s, 6 + s]])
    order = [4, 0, 3, 1, 5, 2]  # runs of other rows
    sorted_, _ = run(backend, program, adapters, batch_of(order, [SLOTS[s] for s in order]))
    np.testing.assert_array_equal(sorted_[:6], whole[order])


def test_rows_without_an_adapter_are_as_without_adapters(backend) -> None:
    """A residual or bias that is added in another order next to updates; a tap that changes bits."""
    program, adapters = case(4)
    batch = batch_of(range(6), SLOTS)
    whole, _ = run(backend, program, adapters, batch)
    tapped, _ = run(backend, program, adapters, batch, ["inner", "outer"])
    np.testing.assert_array_equal(tapped, whole)
    plain, _ = run(backend, program, (), batch_of(range(6), None))
    without = [2, 5, 8, 11]  # first and last tokens of sequences 2 and 5
    np.testing.assert_array_equal(whole[without], plain[without])
    nobody, _ = run(backend, program, adapters, batch_of(range(6), None))
    np.testing.assert_array_equal(nobody, plain)


def test_programs_follow_each_other_in_one_memory(backend) -> None:
    """Runs of the step before; an adapter of a slot that has been given to another."""
    program, adapters = case(5)
    limits, cache = StepLimits(40, 8, 40, 1), backend.new_cache([KVLayer(1, 16)], 8)
    compiled = backend.compile(program, cache, limits, frozenset(), adapters)
    first = compiled(batch_of(range(6), SLOTS)).numpy().copy()
    compiled(batch_of([1, 2], [2, 2]))
    compiled(batch_of([5], [-1]))
    np.testing.assert_array_equal(compiled(batch_of(range(6), SLOTS)).numpy(), first)


@pytest.mark.parametrize("name", ["cpu", "reference", "torch"])
def test_a_slot_without_an_adapter_is_refused(backend, name: str) -> None:
    """A step that reads updates which are not there."""
    if name == "torch":
        pytest.importorskip("torch")
    other = backend if name == "cpu" else make_backend(name)
    program, adapters = case(6)
    for slot in (3, 4, -2):
        with pytest.raises(ShapeError, match=f"no adapter in slot {slot}"):
            run(other, program, [*adapters, None], batch_of([0, 1], [slot, 0]))


def test_on_pytorch() -> None:
    """Rows of another adapter, logit rows taken for tokens, a tap without the update."""
    pytest.importorskip("torch")
    program, adapters = case(7)
    batch = batch_of(range(6), SLOTS)
    got, seen = run(make_backend("torch"), program, adapters, batch, ["outer"])
    want, expected = run(ReferenceBackend(), program, adapters, batch, ["outer"])
    assert_close(got, want, 1e-5)
    assert_close(seen["outer"], expected["outer"], 1e-5)


def test_matrices_that_do_not_belong_together_are_refused() -> None:
    """A rank of A that is not B's; numbers in blocks."""
    rng = np.random.default_rng(8)
    with pytest.raises(ShapeError, match="must belong together"):
        LowRank(weight(rng, "F32", 4, 32), weight(rng, "F32", 16, 5), 1.0)
    with pytest.raises(ShapeError, match="must belong together"):
        LowRank(weight(rng, "Q8_0", 32, 32), weight(rng, "F32", 16, 32), 1.0)
