"""The ops that NumPy and PyTorch share, against plain Python floats: no backend judges another here."""

from __future__ import annotations

from cmath import exp as turn
from dataclasses import replace
from itertools import chain
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.interp.tapes.frozen_tape import FrozenTape, ReplayedTape
from kukri.interp.tapes.tape import Matrices, Tape, Variable
from kukri.kernels.activations import NUMPY, activate
from kukri.kernels.array_ops import DERIVATIVES, ArrayOps
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.op_set import Ops, StageOps
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.reference import ReferenceOps
from kukri.kernels.specs import AttentionSpec, ConvSpec
from kukri.kernels.weight_handles import RopeFrequencies, Vector
from tests.kernels.small_programs import f32_weight
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.kernels.pytorch import TorchBackend
    from kukri.kernels.pytorch.cache import TensorCache
    from kukri.kernels.pytorch.ops import TorchOps

LAYOUT = [KVLayer(1, 16), StateLayer((("conv", (2, 4)),))]
SPEC = AttentionSpec(0, 2, 1, 4, 1.0)
TAPPED = frozenset(["hook_embed"])
SHARED = {name for name in vars(ArrayOps) if name in vars(StageOps) | vars(Ops) and not name.startswith("_")}


def drawn(n_rows, width, seed=0):
    return np.random.default_rng(seed).standard_normal((n_rows, width)).astype(np.float32).tolist()


class OnNumPy:
    """The reference backend's ops on a step of two sequences, of 3 and 2 tokens."""

    def __init__(self):
        self.ops = ReferenceOps(PagedKV(LAYOUT, 4, 4), TAPPED)
        self.host = SimpleNamespace(
            n_tokens=5,
            query_start=np.int32([0, 3, 5]),
            context_len=np.int32([3, 6]),
            positions=np.int32([0, 1, 2, 4, 5]),
            rope_positions=None,
            logit_rows=np.int32([4, 2, 0]),
            state_slots=np.int32([3, 1]),
            state_saves=np.full(5, -1, np.int32),
            activations=np.float32(drawn(5, 6)),
        )
        self.batch = self.host

    def value(self, rows):
        return np.array(rows, np.float32)

    def rows(self, x):
        return x.tolist()


class OnPyTorch(OnNumPy):
    """The torch backend's ops on the same step."""

    def __init__(self):
        super().__init__()
        constants = TorchBackend("cpu").constants
        self.ops = TorchOps(constants, TensorCache(LAYOUT, 4, 4, "f32", constants.device), TAPPED)
        positions, logit_rows = (torch.from_numpy(x) for x in (self.host.positions, self.host.logit_rows))
        self.batch = SimpleNamespace(
            host=self.host, rope_positions=positions, max_position=5, logit_rows=logit_rows
        )

    def value(self, rows):
        return torch.tensor(rows)


@pytest.fixture(params=[OnNumPy, OnPyTorch])
def on(request):
    return request.param()


def close(got, want):
    assert [len(row) for row in got] == [len(row) for row in want]
    assert [*chain(*got)] == pytest.approx([*chain(*want)], rel=1e-5, abs=1e-6)


def test_every_shared_op_is_compared():
    """Catches an op that both backends share and nothing else judges."""
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert tested >= SHARED - {"map"}  # test_activations.py has its rows
    assert DERIVATIVES.keys() <= SHARED


def test_add(on):
    """Catches a difference in its place."""
    x, y = drawn(5, 6), drawn(5, 6, 1)
    want = [[a + b for a, b in zip(*rows)] for rows in zip(x, y)]
    close(on.rows(on.ops.add(on.value(x), on.value(y))), want)


def test_scale(on):
    """Catches a factor that is lost, or applied twice."""
    x = drawn(5, 6)
    close(on.rows(on.ops.scale(on.value(x), -1.5)), [[-1.5 * a for a in row] for row in x])


def test_split(on):
    """Catches parts that begin where another part begins."""
    x = drawn(5, 6)
    parts = on.ops.split(on.value(x), (1, 3, 2))
    for part, (start, stop) in zip(parts, ((0, 1), (1, 4), (4, 6)), strict=True):
        close(on.rows(part), [row[start:stop] for row in x])


def test_head_columns(on):
    """Catches columns of the row in place of each head's."""
    x = drawn(5, 8)
    close(on.rows(on.ops.head_columns(on.value(x), 2, 1, 3)), [[*row[1:3], *row[5:7]] for row in x])


def test_join_heads(on):
    """Catches parts side by side in place of head by head."""
    x, y = drawn(5, 4), drawn(5, 6, 1)
    want = [[*a[:2], *b[:3], *a[2:], *b[3:]] for a, b in zip(x, y)]
    close(on.rows(on.ops.join_heads([on.value(x), on.value(y)], 2)), want)


def test_repeat(on):
    """Catches rows repeated in place of columns, and columns in turns."""
    x = drawn(5, 4)
    close(on.rows(on.ops.repeat(on.value(x), 3)), [[a for a in row for _ in range(3)] for row in x])


def test_head_norm(on):
    """Catches a norm of all heads at once."""
    x, weight = drawn(5, 8), [0.5, 2.0, -1.0, 3.0]
    want = []
    for row in x:
        roots = [sqrt(sum(a * a for a in row[i : i + 4]) / 4 + 1e-3) for i in (0, 4)]
        want.append([a / roots[i // 4] * weight[i % 4] for i, a in enumerate(row)])
    close(on.rows(on.ops.head_norm(on.value(x), Vector(np.float32(weight)), 1e-3)), want)


def test_linear(on):
    """Catches a matrix that is not transposed, weights in another order, and a tap after the residual."""
    x, matrices, bias, residual = (
        drawn(5, 4),
        [drawn(2, 4, 1), drawn(3, 4, 2)],
        drawn(1, 5, 3),
        drawn(5, 5, 4),
    )
    products = [
        [sum(a * b for a, b in zip(row, column)) + c for column, c in zip(chain(*matrices), bias[0])]
        for row in x
    ]
    seen = []
    on.ops.on_tap = lambda name, value: seen.append((name, value.tolist()))
    got = on.ops.linear(
        on.value(x),
        [f32_weight(np.float32(matrix)) for matrix in matrices],
        Vector(np.float32(bias[0])),
        on.value(residual),
        ("hook_embed", None),
    )
    close(on.rows(got), [[a + b for a, b in zip(*rows)] for rows in zip(products, residual)])
    ((name, shown),) = seen
    assert name == "hook_embed"
    close(shown, products)


@pytest.mark.parametrize("rotary_dim", [4, 2])
def test_rotate(on, rotary_dim):
    """Catches a wrong sign, neighbours in place of halves, and dimensions beyond rotary_dim that turn."""
    x, inverse = drawn(5, 8), (1.0, 0.3)[: rotary_dim // 2]
    rope, half = RopeFrequencies(inverse, 16), rotary_dim // 2
    want = []
    for position, row in zip((0, 1, 2, 4, 5), x):
        made = [*row]
        for head in (0, 4):
            for i, frequency in enumerate(inverse):
                z = complex(row[head + i], row[head + half + i]) * turn(1j * position * frequency)
                made[head + i], made[head + half + i] = z.real, z.imag
        want.append(made)
    close(on.rows(on.ops.rotate(on.value(x), rope, SPEC, on.batch)), want)


def test_rope(on):
    """Catches keys that turn by other angles than queries, and a layer without keys that fails."""
    q, k, rope = on.value(drawn(5, 8)), on.value(drawn(5, 4, 1)), RopeFrequencies((1.0, 0.3), 16)
    turned = [on.ops.rotate(x, rope, SPEC, on.batch) for x in (q, k)]
    for got, want in zip(on.ops.rope(q, k, rope, SPEC, on.batch), turned):
        close(on.rows(got), on.rows(want))
    assert on.ops.rope(q, None, rope, SPEC, on.batch)[1] is None


def convolved(rows, taps, bias, n_before):
    """Rows outside count as zeros."""
    return [
        [
            bias[c] + sum(taps[i][c] * rows[t + i - n_before][c] for i in range(len(taps))
                          if 0 <= t + i - n_before < len(rows))
            for c in range(4)
        ]
        for t in range(len(rows))
    ]  # fmt: skip


def test_conv(on):
    """Catches taps in the other order, a neighbour's rows, and a state that is lost or kept by another."""
    x, taps, bias = drawn(5, 4), drawn(3, 4, 1), drawn(1, 4, 2)[0]
    spec = ConvSpec(1, 3, Vector(np.float32(taps).reshape(-1)), Vector(np.float32(bias)))
    past = drawn(2, 4, 3)
    on.ops.cache.states[1]["conv"][1] = on.value(past)
    want = convolved(x[:3], taps, bias, 2) + convolved(past + x[3:], taps, bias, 2)[2:]
    close(on.rows(on.ops.conv(on.value(x), spec, on.batch)), want)
    close(on.rows(on.ops.cache.states[1]["conv"][3]), x[1:3])
    close(on.rows(on.ops.cache.states[1]["conv"][1]), x[3:])

    both_ways = replace(spec, n_after=1)
    on.host.context_len[:] = [3, 1]  # nobody sees the last token
    want = [*convolved(x[:3], taps, bias, 1), *convolved(x[3:4], taps, bias, 1), [0.0] * 4]
    close(on.rows(on.ops.conv(on.value(x), both_ways, on.batch)), want)

    lines = [drawn(3, 4, seed) for seed in (4, 5, 6)]  # for the sequence before, the own one and the next
    grid = replace(both_ways, n_lines=3, taps=Vector(np.float32(lines).reshape(-1)))
    on.host.context_len[:] = [3, 2]
    first, second = x[:3], [*x[3:], [0.0] * 4]  # whose third is outside
    want = [
        [sum(each) - bias[c] for c, each in enumerate(zip(own, other))]
        for own, other in (
            *zip(convolved(first, lines[1], bias, 1), convolved(second, lines[2], bias, 1)),
            *zip(convolved(second, lines[1], bias, 1)[:2], convolved(first, lines[0], bias, 1)),
        )
    ]
    close(on.rows(on.ops.conv(on.value(x), grid, on.batch)), want)


def test_activations(on):
    """Catches a width that is not checked, and a value whose edits change the batch."""
    made = on.ops.activations(on.batch, 6)
    close(on.rows(made), on.host.activations.tolist())
    made[:] = 0
    assert on.host.activations.any()
    with pytest.raises(ShapeError, match="of width 7"):
        on.ops.activations(on.batch, 7)


def test_logit_rows(on):
    """Catches rows in ascending order."""
    x = drawn(5, 6)
    close(on.rows(on.ops.logit_rows(on.value(x), on.batch)), [x[4], x[2], x[0]])


def test_tap(on):
    """Catches a listener that is not asked, or whose edit or new array is lost."""
    x = on.value(drawn(5, 6))
    assert on.ops.tap("hook_embed", None, x) is x
    on.ops.on_tap = lambda name, value: value * 2
    close(on.rows(on.ops.tap("hook_embed", None, x)), [[2 * a for a in row] for row in on.rows(x)])
    assert on.ops.tap("hook_resid_pre", 0, x) is x


@pytest.mark.parametrize("name", ["clamped_swiglu", "gated_relu_squared", "gated_gelu_exact"])
def test_a_frozen_tape_holds_gates(name):
    """Catches a gradient through a gate, and a value that a second run does not follow, clamped or not."""
    rng = np.random.default_rng(0)
    x, gate, way = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(3))

    def run(tape, x):
        inputs = Variable(x), Variable(gate)
        return tape.map(name, *inputs, 1.7, 1.5), *inputs

    first = FrozenTape(Matrices(), {}, [], [], {})
    made, value, frozen = run(first, x)
    np.testing.assert_allclose(made.x, activate(NUMPY, name, x, gate, 1.7, 1.5), rtol=1e-5, atol=1e-6)
    first.backward(made, np.ones_like(x))
    assert frozen.grad is None
    moved, *_ = run(ReplayedTape(first, lambda tap, x: x), x + way)
    np.testing.assert_allclose(moved.x - made.x, value.grad * way, rtol=1e-4, atol=1e-5)


def test_gradients_of_shared_ops_are_differences():
    """Catches a derivative that belongs to other columns, another part or another factor."""
    rng = np.random.default_rng(0)
    cases = {
        "add": lambda tape, x, y: tape.add(x, y),
        "scale": lambda tape, x, y: tape.scale(x, 0.3),
        "repeat": lambda tape, x, y: tape.repeat(x, 3),
        "head_columns": lambda tape, x, y: tape.head_columns(x, 2, 1, 3),
        "join_heads": lambda tape, x, y: tape.join_heads([x, y], 2),
        "split": lambda tape, x, y: tape.split(x, (3, 5))[1],
        "map": lambda tape, x, y: tape.map("clamped_swiglu", x, y, a=1.7, b=1.5),
    }
    assert cases.keys() >= DERIVATIVES.keys()
    for name, op in cases.items():
        arrays = [rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2)]
        tape, inputs = Tape(Matrices(), {}), [Variable(array) for array in arrays]
        result = op(tape, *inputs)
        weights = rng.standard_normal(result.x.shape).astype(np.float32)
        tape.backward(result, weights)
        for array, variable in zip(arrays, inputs):
            way = rng.standard_normal(array.shape).astype(np.float32)
            ends = []
            for step in (1e-2, -1e-2):
                moved = [Variable(a + step * way if a is array else a) for a in arrays]
                ends.append(float((op(Tape(Matrices(), {}), *moved).x * weights).sum()))
            slope = 0.0 if variable.grad is None else float((variable.grad * way).sum())
            assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(slope, rel=2e-2, abs=2e-3), name
