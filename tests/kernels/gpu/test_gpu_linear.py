"""Products with quantized matrices under Triton's interpreter, against dequantized weights."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import UnsupportedError
from kukri.kernels.weight_handles import Weight
from kukri.quant.blocks import dequantize
from kukri.quant.types import PACKED, QUANT_TYPES
from tests.kernels.gpu.device import DEVICE
from tests.lazy_imports import lazy_imports
from tests.quick import COMMON, quick
from tests.random_blocks import random_rows, set_scales

with lazy_imports():
    import torch

    from kukri.kernels.gpu.pack import pack
    from kukri.kernels.gpu.products import Output, linear, linear_float, linear_of, to_device
    from kukri.kernels.gpu.rows import Q8Rows, Recipe, quantize, quantized

N_ROWS = 37
TYPES = [type.name for type in PACKED]


# whose planes are like those of another type
LATER = ("Q2_0", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def case(type_name, n_tokens, n_columns=None, seed=0):
    """(packed matrix, weights float32, activations float32) with columns that are no multiple of lanes."""
    rng = np.random.default_rng(seed)
    type = QUANT_TYPES[type_name]
    n_columns = n_columns or (288 if type.block_size == 32 else 768)
    data = random_rows(rng, type_name, (N_ROWS, n_columns))
    matrix = to_device([Weight(data, type, (N_ROWS, n_columns))], DEVICE)
    x = rng.standard_normal((n_tokens, n_columns), dtype=np.float32)
    return matrix, dequantize(data, type), torch.as_tensor(x)


def rounded(rows, n_columns):
    """float64 [T, columns] that int8 rows stand for."""
    blocks = rows.quants.numpy().reshape(len(rows.quants), -1, 32) * rows.scales.numpy().T[..., None].astype(
        np.float64
    )
    return blocks.reshape(len(blocks), -1)[:, :n_columns]


def poisoned(*shape):
    return torch.full(shape, float("nan"))


def product(matrix, rows, **added):
    y = poisoned(len(rows.quants), matrix.n_rows)
    linear(rows, matrix, Output(y, **added))
    return y


def some(rows, part):
    planes = (rows.scales, rows.scaled_sums, rows.sums)
    return Q8Rows(rows.quants[part], *(plane[:, part].contiguous() for plane in planes))


def bits(x):
    return x.numpy().view(np.int32)


@pytest.mark.full(only=["Q3_K-11", "IQ4_XS-11", *(f"{name}-11" for name in LATER)])
@pytest.mark.parametrize("n_tokens", quick([1, 3, 11], kept=[11]))  # which others are equal to the bit
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_is_the_product_of_the_dequantized_matrix(type_name, n_tokens):
    """Catches a misplaced quant, high bit, scale or minimum, and rows or tokens beyond the last tile."""
    matrix, w, x = case(type_name, n_tokens)
    rows = quantize(x)
    got, want = product(matrix, rows).numpy(), rounded(rows, x.shape[1]) @ w.T.astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.full(only=["MXFP4", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("type_name", quick(TYPES, kept=COMMON))
def test_batch_does_not_matter(type_name, monkeypatch):
    """Catches an order of sums that depends on the batch: one token, eight, and a matrix product agree,
    whether a program has all sums of a row or one.
    """
    matrix, _, x = case(type_name, 9)
    rows = quantize(x)
    many = product(matrix, rows)  # int8 matrix product
    monkeypatch.setattr("kukri.kernels.gpu.tiles.SPLIT_PROGRAMS", 0)
    assert (bits(many) == bits(product(matrix, rows))).all()
    eight = product(matrix, some(rows, slice(0, 8)))
    one = product(matrix, some(rows, slice(7, 8)))
    assert (bits(many)[:8] == bits(eight)).all()
    assert (bits(eight)[7:] == bits(one)).all()


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_bias_and_residual(n_tokens):
    """Catches a bias by row of the batch, and a residual that is read after it was overwritten."""
    matrix, _, x = case("Q4_0", n_tokens)
    rows = quantize(x)
    bias, wide = torch.randn(N_ROWS), torch.randn(n_tokens, 2 * N_ROWS)
    residual = wide[:, N_ROWS:].clone()
    y = wide[:, N_ROWS:]  # columns of a wider tensor, which are their own residual
    linear(rows, matrix, Output(y, bias, y))
    torch.testing.assert_close(y, product(matrix, rows) + bias + residual, rtol=0, atol=0)


def recipe_of(kind, n_tokens, n_columns):
    """Rows to be computed, columns of a wider tensor with NaN next to them."""
    wide = torch.full((n_tokens, 2 * n_columns + 7), float("nan"))
    wide[:, : 2 * n_columns] = torch.randn(n_tokens, 2 * n_columns)
    x, gate = wide[:, :n_columns], wide[:, n_columns : 2 * n_columns]
    return Recipe(kind, x, {"rms_norm": torch.randn(n_columns), "plain": x}.get(kind, gate), 1e-5, 1.0)


KINDS = ("plain", "rms_norm", "gated_silu", "clamp")


@pytest.mark.full
@pytest.mark.parametrize(
    ("type_name", "n_columns", "kind"),
    [
        *quick([(name, None, KINDS[i % 4]) for i, name in enumerate(TYPES)], kept=[]),
        *(("Q4_0", 1120, kind) for kind in KINDS),
    ],
)
def test_quantizing_in_the_same_launch_changes_no_bit(type_name, n_columns, kind, monkeypatch):
    """Catches another order of sums or rounding in the norm, a row left out, columns after the first 1024."""
    monkeypatch.setattr("torch.empty", lambda *shape, dtype, device: torch.full(*shape, 113, dtype=dtype))
    n_tokens = {"plain": 1, "rms_norm": 3}.get(kind, 8)
    matrix, _, x = case(type_name, n_tokens, n_columns)
    recipe = recipe_of(kind, n_tokens, x.shape[1])
    rows, y = quantized(recipe), poisoned(n_tokens, N_ROWS)
    added = {"bias": torch.randn(N_ROWS), "residual": torch.randn(n_tokens, N_ROWS)}
    made = linear_of(recipe, matrix, Output(y, **added))
    for name in ("quants", "scales", "scaled_sums", "sums"):
        assert getattr(made, name).numpy().tobytes() == getattr(rows, name).numpy().tobytes()
    assert y.isfinite().all()
    assert (bits(y) == bits(product(matrix, rows, **added))).all()
    # a row of the batch, alone
    last = replace(recipe, x=recipe.x[-1:], other=recipe.other if kind == "rms_norm" else recipe.other[-1:])
    one = poisoned(1, N_ROWS)
    linear_of(last, matrix, Output(one, added["bias"], added["residual"][-1:]))
    assert (bits(one) == bits(y)[-1:]).all()


@pytest.mark.parametrize("n_tokens", [2, 9])
@pytest.mark.parametrize("n_columns", [32, 96, 544])
def test_odd_numbers_of_blocks(n_tokens, n_columns):
    """Catches padding that is not zero: a pair has a second block, eight sums have pairs beyond the row."""
    matrix, w, x = case("Q5_1", n_tokens, n_columns)
    rows = quantize(x)
    want = rounded(rows, n_columns) @ w.T.astype(np.float64)
    assert np.abs(product(matrix, rows).numpy() - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.full(only=LATER)
@pytest.mark.parametrize("type_name", TYPES)
def test_extreme_quants(type_name):
    """Catches integers that overflow or are rounded when they become floats: all bits of a block set."""
    type = QUANT_TYPES[type_name]
    _, w, _ = case(type_name, 1, 256)
    data = np.full((4, type.row_bytes(256)), 255, np.uint8)
    for value, row in zip((255, 127, 128, 0), data, strict=True):
        row[:] = value
    blocks = data.reshape(-1, type.block_bytes)
    set_scales(blocks, type_name, np.ones((len(blocks), 1)))  # with 2^127 in MXFP4 sums overflow
    w = dequantize(data, type).astype(np.float64)
    matrix = to_device([Weight(data, type, (4, 256))], DEVICE)
    rows = quantize(torch.as_tensor(np.repeat(np.float32([[127.0], [-127.0]]), 256, axis=1)))
    got, want = product(matrix, rows).numpy(), rounded(rows, 256) @ w.T
    # sums of 8 blocks are beyond 2^24, where float32 has no room for every whole number
    np.testing.assert_allclose(got, want, rtol=3e-7)


def test_packing_keeps_the_size():
    """Catches planes that take more memory than the file's bytes, or the CPU's tiles."""
    more = {"Q6_K": 1.01, "Q3_K": 1.06, "IQ1_TILES": 1.06, "IQ2_TILES": 1.06, "TQ2_0": 1.04}
    more |= dict.fromkeys(("Q1_0", "Q2_0"), 1.12)  # a float16 has a word
    for name in TYPES:
        type = QUANT_TYPES[name]
        (matrix,) = pack(Weight(random_rows(np.random.default_rng(1), name, (8, 512)), type, (8, 512)))
        n_bytes = sum(plane.nbytes for plane in matrix.planes)
        table = 16 if len(type.layout.values or ()) == 16 else 0
        assert n_bytes <= 8 * type.tiles.row_bytes(512) * more.get(type.tiles.name, 1) + table


def test_the_host_holds_some_rows_at_a_time():
    """Memory of a model, or of a whole matrix, while it is copied to a device; rows in another's place."""
    type, rng = QUANT_TYPES["Q8_0"], np.random.default_rng(0)
    weights = [Weight(random_rows(rng, "Q8_0", (n, 1024)), type, (n, 1024)) for n in (7000, 3000)]
    n_bytes = 10000 * type.row_bytes(1024)
    tracemalloc.start()
    try:
        to_device(weights, "meta")  # a device without memory
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * n_bytes  # pieces of 2^20 weights, a tenth of these
    last = to_device([Weight(weights[1].stored[-5:], type, (5, 1024))], DEVICE)
    assert torch.equal(to_device(weights, DEVICE).quants[-5:], last.quants)


def test_other_types_are_refused():
    """Catches a type that would be read as another."""
    weight = Weight(np.zeros((2, 512), np.uint8), QUANT_TYPES["F16"], (2, 256))
    with pytest.raises(UnsupportedError, match="F16"):
        next(pack(weight))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n_columns", [40, 200])
def test_float_weights(dtype, n_columns):
    """Catches lost columns beyond the last step of 64, and rows that depend on the number of tokens."""
    w, x = (torch.randn(n, n_columns).to(getattr(torch, dtype)) for n in (N_ROWS, 70))
    y, one = poisoned(70, N_ROWS), poisoned(1, N_ROWS)
    linear_float(x, w, Output(y))
    linear_float(x[3:4], w, Output(one))
    torch.testing.assert_close(y, x.float() @ w.float().T, rtol=1e-5, atol=2e-5)
    assert one.isfinite().all()
