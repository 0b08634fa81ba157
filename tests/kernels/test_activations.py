"""Each row of the table of element-wise ops against plain Python floats, on NumPy and on PyTorch."""

from __future__ import annotations

from math import erf, exp, expm1, sqrt, tanh

import numpy as np
import pytest

from kukri.kernels.activations import ACTIVATIONS, NUMPY, activate, slopes
from kukri.models import keys
from tests.kernels.small_programs import assert_close, both, f32_weight, plain_batch
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from transformers import activations as hf_activations

    from kukri.kernels.cpu.codegen import elementwise
    from kukri.kernels.pytorch.ops import TensorFunctions


def sigmoid(x):
    return 1 / (1 + exp(-x))


FUNCTIONS = {
    "itself": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: x / 2 * (1 + erf(x / sqrt(2))),
}
# (x, other, a, b) -> y, of Python's floats
FLOATS = {
    **{name: lambda x, other, a, b, f=f: f(x) for name, f in FUNCTIONS.items()},
    **{f"gated_{name}": lambda x, other, a, b, f=f: x * f(other) for name, f in FUNCTIONS.items()},
    "xielu": lambda x, other, a, b: a * x * x if x > 0 else b * (expm1(x) - x),
    "softcap": lambda x, other, a, b: a * tanh(x / a),
    "clamp": lambda x, other, a, b: min(max(x, a), b),
    "clamped_swiglu": lambda x, other, a, b: (
        (max(min(x, b), -b) + 1) * min(other, b) * sigmoid(a * min(other, b))
    ),
}
NUMBERS = {"clamp": (-0.9, 1.1), "softcap": (0.7, 0.0)}
ROWS = [pytest.param(name, NUMBERS.get(name, (0.75, 1.25)), id=name) for name in ACTIVATIONS]


def drawn(seed, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal((5, 40)) * 3).astype(dtype)


def test_every_row_is_checked_and_has_a_function_of_vectors():
    """Catches a row that the CPU backend cannot run, or that nothing here compares."""
    assert ACTIVATIONS.keys() == FLOATS.keys() == elementwise._ELEMENTWISE.keys()


@pytest.mark.full
@pytest.mark.parametrize(("name", "numbers"), ROWS)
def test_a_function_of_vectors_is_the_formula(backend, name, numbers):
    """Catches a function of the CPU's kernels that no test of one activation compares."""
    x, other = (f32_weight(drawn(seed)) for seed in (0, 1))

    def program(ops, batch):
        return ops.logit_rows(ops.map(name, ops.embed(x, batch), ops.embed(other, batch), *numbers), batch)

    assert_close(*both(backend, program, plain_batch(5)), 1e-5)


@pytest.mark.parametrize(("name", "numbers"), ROWS)
def test_a_formula_on_arrays_and_tensors_is_that_of_floats(name, numbers):
    """Catches a sign, a bound or a constant that is wrong, gate and up exchanged, and float64 results."""
    x, other = drawn(0), drawn(1)
    if name.startswith("gated"):
        x /= 3  # a factor of the function's rounding
    floats = [FLOATS[name](*pair, *numbers) for pair in zip(x.ravel().tolist(), other.ravel().tolist())]
    want = np.reshape(floats, x.shape)
    got = activate(NUMPY, name, x, other, *numbers)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    tensors = torch.from_numpy(x), torch.from_numpy(other)
    got = activate(TensorFunctions(), name, *tensors, *numbers)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "numbers"), ROWS)
def test_slopes_are_differences_of_the_formula(name, numbers):
    """Catches a derivative of another formula, by the other input, or without the factor in front."""
    inputs, step = [drawn(0, np.float64), drawn(1, np.float64)], 1e-6
    for i, slope in enumerate(slopes(NUMPY, name, *inputs, *numbers)):
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * (i == j) for j, x in enumerate(inputs)]
            ends.append([FLOATS[name](*pair, *numbers) for pair in zip(*(x.ravel().tolist() for x in moved))])
        want = np.reshape(np.subtract(*ends) / (2 * step), inputs[0].shape)
        np.testing.assert_allclose(slope * np.ones_like(want), want, rtol=1e-5, atol=1e-5)


def test_an_op_that_reads_a_gate_is_a_line_in_x():
    """Catches a gate and a value that are exchanged: an attribution graph freezes the second input."""
    x, gate = np.clip(drawn(2), -1.2, 1.2), drawn(3)  # within the bounds of the clamped one
    for name in ACTIVATIONS:
        slope, *by_gate = slopes(NUMPY, name, x, gate, 0.75, 1.25)
        if by_gate:
            ends = [activate(NUMPY, name, at, gate, 0.75, 1.25) for at in (x, x / 2)]
            np.testing.assert_allclose(ends[0] - ends[1], x / 2 * slope, rtol=1e-4, atol=1e-5, err_msg=name)


def test_names_of_transformers():
    """Catches GELU by tanh in the place of the exact one, and xIELU with another part of it left out."""
    x = torch.from_numpy(drawn(4))
    for theirs, name in keys.ACTIVATIONS.items():
        got = activate(NUMPY, name, x.numpy())
        np.testing.assert_allclose(got, hf_activations.ACT2FN[theirs](x).numpy(), rtol=2e-6, atol=2e-6)
    want = hf_activations.XIELUActivation(0.75, 1.25, dtype=torch.float32)(x).detach().numpy()
    got = activate(NUMPY, "xielu", x.numpy(), None, 0.75, 1.25) + x.numpy() / 2
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6)


def test_an_exception_names_the_op():
    """Catches an error of NumPy or PyTorch that nobody can find: formulas are functions without a name."""
    with pytest.raises(ValueError, match="broadcast") as caught:
        activate(NUMPY, "gated_silu", drawn(0), np.zeros(7, np.float32))
    assert "element-wise op 'gated_silu'" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as missing:
        activate(NUMPY, "swish", drawn(0))
    assert "element-wise op 'swish'" in missing.value.__notes__[0]
