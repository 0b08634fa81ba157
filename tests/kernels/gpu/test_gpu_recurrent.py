"""Recurrent layers under Triton's interpreter: against the reference, and to the bit by any steps."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.cache import StateLayer
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import ConvSpec, DeltaSpec, ScanSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Vector, Weight
from kukri.quant.types import QUANT_TYPES
from tests.kernels.gpu.device import DEVICE
from tests.lazy_imports import lazy_imports

with lazy_imports():
    from kukri.kernels.gpu.backend import GpuBackend

N_SLOTS, MOST = 7, 16


def vector(rng, n):
    return Vector(rng.standard_normal(n, dtype=np.float32))


def conv(rng, n=70, n_taps=4):
    spec = ConvSpec(0, n_taps, vector(rng, n * n_taps), vector(rng, n), True)
    return n, lambda ops, x, batch: ops.conv(x, spec, batch), StateLayer((("conv", (n_taps - 1, n)),))


def plain_conv(rng, n=33, n_taps=3):
    spec = ConvSpec(0, n_taps, vector(rng, n * n_taps))
    return n, lambda ops, x, batch: ops.conv(x, spec, batch), StateLayer((("conv", (n_taps - 1, n)),))


def scan(rng, n_heads=6, n_groups=2, n=12, d=20):
    a = Vector(-np.exp(rng.standard_normal(n_heads)).astype(np.float32))
    spec = ScanSpec(0, n_heads, n_groups, n, d, a, vector(rng, n_heads), vector(rng, n_heads), (0.01, 2.0))
    widths = (n_heads * d, n_groups * n, n_groups * n, n_heads)
    program = lambda ops, x, batch: ops.scan(*ops.split(x, widths), spec, batch)  # noqa: E731
    return sum(widths), program, StateLayer((("scan", (n_heads, n, d)),))


def delta(rng, n_heads=4, n_groups=2, n=12, d=20, are_tiled=False):
    a = Vector(-np.exp(rng.standard_normal(n_heads)).astype(np.float32))
    spec = DeltaSpec(0, n_heads, n_groups, n, d, a, vector(rng, n_heads), are_tiled)
    widths = (n_groups * n, n_groups * n, n_heads * d, n_heads, n_heads)

    def program(ops, x, batch):
        q, k, *rest = ops.split(x, widths)
        return ops.delta_rule(ops.scale(q, 0.2), ops.scale(k, 0.2), *rest, spec, batch)

    return sum(widths), program, StateLayer((("delta", (n_heads, n, d)),))


CASES = {"conv": conv, "plain conv": plain_conv, "scan": scan, "delta": delta}
CASES["delta, tiled"] = lambda rng: delta(rng, are_tiled=True)


class Runs:
    """Sequences of tokens, by slot, that go through a layer on a backend in any steps."""

    def __init__(self, backend, case):
        rng = np.random.default_rng(0)
        width, program, layer = CASES[case](rng)
        rows = rng.standard_normal((MOST, width), dtype=np.float32)
        table = Weight(rows.view(np.uint8), QUANT_TYPES["F32"], rows.shape)

        def whole(ops, batch):
            return ops.logit_rows(program(ops, ops.embed(table, batch), batch), batch)

        self.cache = backend.new_cache([layer], 4, N_SLOTS)
        for array in self.cache.states[0].values():
            array[:] = np.nan  # a slot may hold anything before its sequence begins
        self.program = backend.compile(whole, self.cache, StepLimits(2 * MOST, 4, 2 * MOST, 4))

    def step(self, pieces, saves=()):
        """Outputs of (slot, start, stop) pieces, tokens that stand for themselves; saves of (row, slot)."""
        tokens = np.concatenate([np.arange(start, stop) for _, start, stop in pieces]).astype(np.int32)
        marks = np.full(len(tokens), -1, np.int32)
        for row, slot in saves:
            marks[row] = slot
        rows, zeros = np.arange(len(tokens), dtype=np.int32), np.zeros((len(pieces), 4), np.int32)
        starts = np.cumsum([0, *(stop - start for _, start, stop in pieces)], dtype=np.int32)
        stops, slots = (np.array([piece[i] for piece in pieces], np.int32) for i in (2, 0))
        batch = ForwardBatch(
            tokens, tokens, rows, starts, stops, zeros, rows, state_slots=slots, state_saves=marks
        )
        return self.program(batch).numpy().copy()

    def slots(self, *numbers):
        return [np.array(array)[list(numbers)] for array in self.cache.states[0].values()]


@pytest.mark.full(only=["scan", "delta, tiled"])
@pytest.mark.representative(5)
@pytest.mark.parametrize("case", CASES)
def test_recurrent_layers(case):
    """A tap, head or group next to its own, a state that is not zero at first, saved a token early or late;
    a result that depends on chunks or neighbours: one sequence whole and saved on the way, another in pieces.
    """
    backend = GpuBackend(DEVICE)
    mine, reference = Runs(backend, case), Runs(ReferenceBackend(), case)
    pieces, saves = [(1, 0, 11), (0, 0, 3)], [(0, 2), (1, 6), (9, 4), (12, 5)]
    got, want = mine.step(pieces, saves), reference.step(pieces, saves)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    for a, b in zip(mine.slots(0, 1, 2, 4, 5, 6), reference.slots(0, 1, 2, 4, 5, 6), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
    assert all(np.isnan(array).all() for array in mine.slots(3))
    again = [mine.step([(3, 0, 2)]), mine.step([(2, 1, 2), (3, 2, 3)])[1:], mine.step([(3, 3, 11)])]
    np.testing.assert_array_equal(np.concatenate(again), got[:11])
    np.testing.assert_array_equal(mine.step([(4, 10, 11)]), got[10:11])  # after token 9
    assert backend.is_batch_invariant
    assert mine.program._ops.is_capturable
