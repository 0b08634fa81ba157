"""Ops of recurrent layers against the reference: any cut into steps, neighbours, saved states."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import ConvSpec, DeltaSpec, ScanSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Vector
from tests.kernels.small_programs import assert_close, f32_weight, plain_batch, run
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from torch.nn import functional as F

N_SLOTS, MOST = 9, 150


def vector(rng, n, scale=1.0):
    return Vector((scale * rng.standard_normal(n)).astype(np.float32))


def conv(rng, n=80, n_taps=4, is_activated=True, has_bias=True):
    """(width of the input, program, the layer)."""
    spec = ConvSpec(0, n_taps, vector(rng, n * n_taps), vector(rng, n) if has_bias else None, is_activated)
    return n, lambda ops, x, batch: ops.conv(x, spec, batch), StateLayer((("conv", (n_taps - 1, n)),))


def scan(rng, n_heads=6, n_groups=2, n=24, d=80):
    a = Vector(-np.exp(rng.standard_normal(n_heads)).astype(np.float32))
    spec = ScanSpec(0, n_heads, n_groups, n, d, a, vector(rng, n_heads), vector(rng, n_heads), (0.01, 2.0))
    widths = (n_heads * d, n_groups * n, n_groups * n, n_heads)

    def program(ops, x, batch):
        return ops.scan(*ops.split(x, widths), spec, batch)

    return sum(widths), program, StateLayer((("scan", (n_heads, n, d)),))


def delta(rng, n_heads=4, n_groups=2, n=20, d=80, are_tiled=False):
    a = Vector(-np.exp(rng.standard_normal(n_heads)).astype(np.float32))
    spec = DeltaSpec(0, n_heads, n_groups, n, d, a, vector(rng, n_heads), are_tiled)
    widths = (n_groups * n, n_groups * n, n_heads * d, n_heads, n_heads)

    def program(ops, x, batch):
        q, k, *rest = ops.split(x, widths)
        return ops.delta_rule(ops.scale(q, 0.2), ops.scale(k, 0.2), *rest, spec, batch)

    return sum(widths), program, StateLayer((("delta", (n_heads, n, d)),))


CASES = {
    "conv": conv,
    "conv-3": lambda rng: conv(rng, 48, 3, False, False),
    "scan": scan,
    "scan-1-group": lambda rng: scan(rng, 3, 1, 16, 64),
    "delta": delta,
    "delta-tiled": lambda rng: delta(rng, are_tiled=True),
    "delta-equal": lambda rng: delta(rng, 3, 3, 32, 32),
    "conv-odd": lambda rng: conv(rng, 37),
    "scan-odd": lambda rng: scan(rng, 6, 2, 5, 19),
    "delta-odd": lambda rng: delta(rng, 4, 2, 7, 21),
}


class Runs:
    """Sequences of tokens, by number, that go through a layer on a backend in any steps."""

    def __init__(self, backend, case, seed=0):
        rng = np.random.default_rng(seed)
        width, program, layer = CASES[case](rng)
        weight = f32_weight(rng.standard_normal((MOST, width)))

        def whole(ops, batch):
            return ops.logit_rows(program(ops, ops.embed(weight, batch), batch), batch)

        self.cache = backend.new_cache([layer, KVLayer(1, 16)], 64, N_SLOTS)
        for array in self.cache.states[0].values():
            array[:] = np.nan  # a slot may hold anything before its sequence begins
        self.program = backend.compile(whole, self.cache, StepLimits(MOST, 4, MOST, 16))

    def step(self, pieces, saves=()):
        """Outputs of (slot, start, stop) pieces, tokens that stand for themselves; saves of (row, slot)."""
        lengths = [stop - start for _, start, stop in pieces]
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in pieces]).astype(np.int32)
        marks = np.full(len(positions), -1, np.int32)
        for row, slot in saves:
            marks[row] = slot
        batch = ForwardBatch(
            positions,
            positions,
            np.arange(len(positions), dtype=np.int32),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array([stop for _, _, stop in pieces], np.int32),
            np.zeros((len(pieces), -(-MOST // PAGE_TOKENS)), np.int32),
            np.arange(len(positions), dtype=np.int32),
            state_slots=np.array([slot for slot, _, _ in pieces], np.int32),
            state_saves=marks,
        )
        return self.program(batch).numpy().copy()


@pytest.mark.parametrize(("n", "n_taps", "n_after"), [(80, 3, 1), (48, 5, 2), (16, 4, 3)])
def test_convolutions_both_ways(backend, n, n_taps, n_after):
    """A neighbour's inputs, a tap on the other side, a token that nobody sees and that counts."""
    rng = np.random.default_rng(n)
    spec = ConvSpec(0, n_taps, vector(rng, n * n_taps), vector(rng, n), n_after=n_after)
    lengths, contexts = [5, 1, 40, 2], [3, 1, 40, 2]
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    x, n_tokens = rng.standard_normal((ends[-1], n)).astype(np.float32), int(ends[-1])
    rows, steps = f32_weight(x), np.arange(n_tokens, dtype=np.int32)
    table = np.zeros((4, -(-MOST // PAGE_TOKENS)), np.int32)
    batch = ForwardBatch(steps, steps, steps, ends, np.array(contexts, np.int32), table, steps)

    def program(ops, batch):
        return ops.logit_rows(ops.conv(ops.embed(rows, batch), spec, batch), batch)

    want = np.zeros_like(x)
    taps = torch.from_numpy(spec.taps.data.reshape(n_taps, n).T[:, None].copy())
    for start, n_seen in zip(ends, contexts):
        seen = torch.nn.functional.pad(
            torch.from_numpy(x[start : start + n_seen].T.copy()), (n_taps - 1 - n_after, n_after)
        )
        made = torch.nn.functional.conv1d(seen[None], taps, torch.from_numpy(spec.bias.data), groups=n)
        want[start : start + n_seen] = made[0].T.numpy()
    for each in (ReferenceBackend(), backend, make_backend("torch")):
        cache = each.new_cache([KVLayer(1, 16)], 64, N_SLOTS)
        limits = StepLimits(MOST, 4, MOST, 16, free_contexts=True)
        assert_close(each.compile(program, cache, limits)(batch).numpy(), want, 1e-5)


def test_convolutions_over_a_grid(backend):
    """A row of the grid that is taken for another, and an edge that sees the next row's other end."""
    rng, (height, width, n, side) = np.random.default_rng(0), (6, 7, 48, 3)
    taps = vector(rng, n * side * side)
    spec = ConvSpec(0, side, taps, n_after=side // 2, n_lines=side)
    x = rng.standard_normal((height * width, n)).astype(np.float32)
    steps, ends = np.arange(len(x), dtype=np.int32), np.arange(0, len(x) + 1, width, dtype=np.int32)
    table = np.zeros((height, 1), np.int32)
    rows, batch = f32_weight(x), ForwardBatch(steps, steps, steps, ends, np.diff(ends), table, steps)

    def program(ops, batch):
        return ops.logit_rows(ops.conv(ops.embed(rows, batch), spec, batch), batch)

    grid = torch.from_numpy(x.reshape(height, width, n)).permute(2, 0, 1)
    kernel = torch.from_numpy(taps.data.reshape(side, side, n)).permute(2, 0, 1)[:, None]
    want = torch.nn.functional.conv2d(grid[None], kernel, padding=side // 2, groups=n)[0]
    for each in (ReferenceBackend(), backend, make_backend("torch")):
        cache = each.new_cache([KVLayer(1, 16)], 64, N_SLOTS)
        limits = StepLimits(MOST, height, MOST, 16, free_contexts=True)
        made = each.compile(program, cache, limits)(batch).numpy()
        assert_close(made, want.permute(1, 2, 0).reshape(-1, n).numpy(), 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_ops_are_the_reference(backend, case):
    """A tap, head or group next to its own; a state that is not zero at first; a gate of another head."""
    got, want = (Runs(b, case).step([(3, 0, 100)]) for b in (backend, ReferenceBackend()))
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_steps_and_neighbours_change_no_bit(backend, kind, case):
    """A chunk that begins again, a neighbour's state, sums in another order for one token than for many."""
    runs = Runs(backend if kind == "cpu" else ReferenceBackend(), case)
    want = runs.step([(1, 0, 100)])
    for cuts in ([1, 8, 9, 73], [64], [2, 3, 99]):
        cuts = [0, *cuts, 100]
        parts = [runs.step([(0, 0, 9), (2, a, b)])[9:] if a < 20 else runs.step([(2, a, b)])
                 for a, b in pairwise(cuts)]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate(parts), want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_saved_states_continue_to_the_bit(backend, kind, case):
    """A state saved a token early or late, or a piece of it; a save that changes the rest."""
    runs = Runs(backend if kind == "cpu" else ReferenceBackend(), case)
    want = runs.step([(1, 0, 100)])
    got = runs.step([(7, 0, 5), (0, 0, 100)], [(5 + 0, 2), (5 + 1, 3), (5 + 69, 4), (5 + 99, 5)])
    np.testing.assert_array_equal(got[5:], want)
    for slot, n in ((2, 1), (3, 2), (4, 70)):
        np.testing.assert_array_equal(runs.step([(slot, n, 100)]), want[n:])
    after = runs.step([(0, 100, 110)])
    np.testing.assert_array_equal(runs.step([(5, 100, 110)]), after)
    runs.step([(6, 0, 30)])
    runs.cache.copy_state(6, 8)
    np.testing.assert_array_equal(runs.step([(8, 30, 40)]), runs.step([(6, 30, 40)]))


@pytest.mark.parametrize("by", ["itself", "sigmoid", "silu"])
@pytest.mark.parametrize("n_tokens", [1, 3, 20])
def test_gated_multiplies_by_the_gates_activation(backend, by, n_tokens):
    """x and gate in each other's place, or the columns of one read for the other's."""
    x = f32_weight(np.random.default_rng(n_tokens).standard_normal((n_tokens, 240)) * 3)

    def program(ops, batch):
        gate, _, values = ops.split(ops.embed(x, batch), (96, 48, 96))
        return ops.logit_rows(ops.map(f"gated_{by}", ops.scale(values, 1.5), gate), batch)

    got, want = (run(b, program, plain_batch(n_tokens)) for b in (backend, ReferenceBackend()))
    assert_close(got, want, 1e-6)
    numbers = torch.from_numpy(x.data.view(np.float32))
    gate = {"itself": lambda g: g, "sigmoid": torch.sigmoid, "silu": F.silu}[by](numbers[:, :96])
    np.testing.assert_allclose(want, (1.5 * numbers[:, 144:] * gate).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_slots_outside_the_cache_are_refused(backend, kind):
    """A write next to the states."""
    runs = Runs(backend if kind == "cpu" else make_backend("torch"), "conv")
    for slot, save in ((N_SLOTS, -1), (-1, -1), (0, N_SLOTS), (0, -2)):
        with pytest.raises(ShapeError, match="a state outside the cache"):
            runs.step([(slot, 0, 3)], [(1, save)])


@pytest.mark.parametrize("case", CASES)
def test_torch_is_the_reference(case):
    """The same mistakes on tensors."""
    tensors, reference = Runs(make_backend("torch"), case), Runs(ReferenceBackend(), case)
    for pieces, saves in (
        ([(1, 0, 50), (0, 0, 3)], [(30, 2), (51, 5)]),
        ([(2, 31, 50), (5, 2, 3), (1, 50, 60)], ()),
    ):
        assert_close(tensors.step(pieces, saves), reference.step(pieces, saves), 2e-5)
