"""Int8 activations with one scale a token: the definition against PyTorch's."""

from __future__ import annotations

import numpy as np

from benchmarks.int4 import q4_0_quants
from kukri.kernels.quantize import quantize
from kukri.quant.blocks import dequantize
from kukri.quant.per_token import linear_per_token, quantize_tokens, row_sums
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

Q4_0 = QUANT_TYPES["Q4_0"]


def activations(n: int) -> np.ndarray:
    """Rows around 0, above it, below it, of tiny and of huge numbers, and of zeros."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((6, n)).astype(np.float32)
    x[1], x[2] = np.abs(x[1]) + 3, -np.abs(x[2])
    x[3], x[4], x[5] = x[3] * 1e-20, x[4] * 1e20, 0
    return x


def test_quants_are_those_of_pytorch() -> None:
    """A zero point that is off by one, a range without 0, scales of another number of steps."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (registers the ops)

    x = activations(333)
    q, scale, zero = quantize_tokens(x)
    ops = torch.ops.quantized_decomposed
    scales, zeros = ops.choose_qparams_per_token_asymmetric(torch.from_numpy(x), torch.int8)
    usual = [0, 1, 2, 4]  # PyTorch lets no scale fall below float32's epsilon
    np.testing.assert_allclose(scale[usual], scales.numpy()[usual, 0], rtol=1e-6)
    np.testing.assert_array_equal(zero[usual], zeros.numpy()[usual, 0])
    assert np.abs(scale[:, None] * (q - zero[:, None]) - x).max(axis=1)[3] < 1e-20 * 8 / 255
    assert (np.abs(scale[:, None] * (q - zero[:, None]) - x) <= 0.51 * scale[:, None]).all()


def test_products_are_those_of_the_formula() -> None:
    """A zero point applied twice or not at all; sums that a row's product with it does not fit."""
    rng = np.random.default_rng(6)
    rows = quantize(rng.standard_normal((48, 320)).astype(np.float32), Q4_0)
    x = activations(320)
    weights = dequantize(rows, Q4_0).astype(np.float64)
    q, scale, zero = quantize_tokens(x)
    folded = scale[:, None] * (q.astype(np.float64) @ weights.T - zero[:, None] * row_sums(rows))
    got = linear_per_token(x, rows)
    np.testing.assert_allclose(folded, got, atol=1e-5 * np.abs(got).max(axis=1, keepdims=True).max())
    want = x.astype(np.float64) @ weights.T
    size = np.sqrt((want**2).mean(axis=1))
    error = np.sqrt(((got - want) ** 2).mean(axis=1))
    assert (error[:5] < 0.02 * size[:5]).all()
    assert not got[5].any()


def test_rows_with_nan_or_infinity_say_so() -> None:
    """A broken activation that becomes some finite number; a neighbour that it spoils."""
    x = activations(64)
    x[0, 3], x[1, 4] = np.nan, np.inf
    scale = quantize_tokens(x)[1]
    assert np.isnan(scale).tolist() == [True, True, False, False, False, False]


def test_quants_come_apart_as_they_were_put_together() -> None:
    """PyTorch given other weights than kukri."""
    rows = quantize(np.random.default_rng(7).standard_normal((5, 96)).astype(np.float32), Q4_0)
    quants, scales = q4_0_quants(rows)
    read = (quants.astype(np.float32) - 8) * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(read, dequantize(rows, Q4_0))
