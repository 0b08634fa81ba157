"""The matrix products of the CPU backend against their definition, for every weight type.

Inputs come in through an F32 embedding, results go out through `logit_rows`, buffers start as NaN. The file
also runs under other CPU names (test_cpu_lowerings.py), so that each int8 dot product is covered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.kernels.quantize import quantize
from kukri.kernels.weight_handles import Vector, Weight
from kukri.quant.blocks import dequantize
from kukri.quant.per_token import linear_per_token, quantize_tokens
from kukri.quant.types import QUANT_TYPES
from tests.kernels.small_programs import (
    QUANTIZED,
    RELATIVE,
    TYPES,
    assert_close,
    both,
    exact_rows,
    f32_weight,
    plain_batch,
    run,
    weight,
)
from tests.quick import COMMON, quick
from tests.random_blocks import HALVES, random_rows, set_scales


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 8, 9, 63, 65, 130])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_at_every_token_count(backend, type_name, n_tokens):
    """Would catch a wrong tail: 1, 2, 4 and 8 tokens take different code, panels hold 8, claims 128."""
    rng = np.random.default_rng(n_tokens)
    w = weight(rng, type_name, 80, 96)
    x = exact_rows(rng, n_tokens, w.shape[1])
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want)


def _as_int16(x, is_weight=False):
    """(whole numbers [rows, blocks, 64], their scales [rows, blocks]) of rows of floats."""
    blocks = np.pad(x, [(0, 0), (0, -x.shape[1] % 64)]).reshape(len(x), -1, 64)
    largest = np.abs(blocks).max(axis=2)
    if is_weight:
        scales = np.exp2(np.floor(np.log2(largest)) - 11).astype(np.float32)
        return np.rint(blocks / scales[..., None]).astype(np.int64), scales
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, 8191 / largest.astype(np.float64), 0).astype(np.float32)
    scales = (largest * (1 / 8191)).astype(np.float32)
    return np.rint(blocks * inverse[..., None]).astype(np.int64), scales


@pytest.mark.parametrize(
    ("n_tokens", "n_in"), [(1, 64), (2, 16), (3, 80), (5, 208), (8, 128), (9, 48), (65, 96), (130, 272)]
)
@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_floats_multiplied_as_int16(backend, type_name, n_tokens, n_in):
    """Would catch another rounding than the one that is stated, a last block that is not filled, tails."""
    rng = np.random.default_rng(n_tokens)
    w = replace(weight(rng, type_name, 83, n_in), as_int16=True)
    x = rng.standard_normal((n_tokens, n_in)).astype(np.float32)
    x[-1] = 0
    got, exact = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    (a, of_x), (b, of_w) = _as_int16(x), _as_int16(dequantize(w.data, w.type), is_weight=True)
    want = np.einsum("tkj,rkj,tk,rk->tr", a, b, of_x.astype(np.float64), of_w.astype(np.float64))
    assert_close(got, want)
    assert_close(got, exact, 1e-3)


def test_int16_sums_do_not_overflow(backend):
    """Would catch whole numbers too large for 64 products of one sign."""
    two = np.full((16, 128), -2 + 2**-10, np.float16)  # 4095.5 whole ones
    w = Weight(two.view(np.uint8), QUANT_TYPES["F16"], two.shape, as_int16=True)
    x = f32_weight(np.full((9, 128), 7.0))
    program = lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(x, batch), (w,)), batch)  # noqa: E731
    np.testing.assert_allclose(run(backend, program, plain_batch(9)), 128 * 7 * (-2 + 2**-10), rtol=3e-4)


@pytest.mark.parametrize("n_out", [1, 3, 15, 16, 17, 63, 65, 1000])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_at_every_width(backend, type_name, n_out):
    """Would catch rows lost or doubled where a weight does not fill its last tile of 16 rows."""
    rng = np.random.default_rng(n_out)
    w = weight(rng, type_name, n_out, 64)
    x = exact_rows(rng, 5, w.shape[1])
    bias = Vector(rng.standard_normal(n_out).astype(np.float32))
    residual = rng.standard_normal((5, n_out)).astype(np.float32)

    def program(ops, batch):
        added = ops.embed(f32_weight(residual), batch)
        return ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,), bias, added), batch)

    assert_close(*both(backend, program, plain_batch(5)))


@pytest.mark.parametrize(
    "names", [("Q4_1", "Q4_1", "Q8_0"), ("Q8_0", "F16", "F32"), ("Q4_0", "Q4_0", "Q4_0")]
)
def test_weights_side_by_side(backend, names):
    """Would catch columns overwritten where types mix or a part ends inside a tile."""
    rng = np.random.default_rng(1)
    x = exact_rows(rng, 9, 64)
    parts = tuple(weight(rng, name, n, 64) for name, n in zip(names, (24, 40, 7), strict=True))
    bias = Vector(rng.standard_normal(71).astype(np.float32))

    def program(ops, batch):
        return ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), parts, bias), batch)

    assert_close(*both(backend, program, plain_batch(9)))


@pytest.mark.parametrize("sizes", [(24, 24), (17, 31), (8, 8)])
def test_a_tile_that_starts_inside_another_ends_in_its_row(backend, sizes):
    """Would catch the last tile of one type written over the first columns of the next token."""
    rng = np.random.default_rng(2)
    x, width = exact_rows(rng, 9, 64), sum(sizes)
    parts = tuple(weight(rng, name, n, 64) for name, n in zip(("Q4_1", "Q8_0"), sizes, strict=True))
    bias = Vector(rng.standard_normal(width).astype(np.float32))
    residual = rng.standard_normal((9, width)).astype(np.float32)

    def program(ops, batch):
        added = ops.embed(f32_weight(residual), batch)
        return ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), parts, bias, added), batch)

    assert_close(*both(backend, program, plain_batch(9)))


def per_token(w):
    return Weight(w.stored, w.type, w.shape, w.name, per_token=True)


def shifted_rows(rng, n_rows, n):
    """Rows of another mean and size each, so that zero points matter."""
    x = rng.standard_normal((n_rows, n)) + rng.uniform(-3, 3, (n_rows, 1))
    return (x * np.exp2(rng.integers(-9, 9, (n_rows, 1)))).astype(np.float32)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 8, 9, 63, 130])
@pytest.mark.parametrize("n_out", [1, 17, 80])
def test_one_scale_a_token_is_its_definition(backend, n_out, n_tokens):
    """Would catch a quant off by one step, a zero point or row sum of another row, a tile's tail missed."""
    rng = np.random.default_rng(n_tokens)
    w = per_token(weight(rng, "Q4_0", n_out, 96))
    x = shifted_rows(rng, n_tokens, 96)
    got = run(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    want = linear_per_token(x, w.data)
    assert np.isfinite(got).all()
    # both terms may be many times their difference
    sizes = np.abs(x).max(axis=1, keepdims=True) * np.abs(dequantize(w.data, w.type)).sum(axis=1)
    assert (np.abs(got - want) <= RELATIVE * sizes).all()


def test_one_scale_a_token_beside_others(backend):
    """Would catch a bias, residual or column of a neighbour lost, and types that it is not for."""
    rng = np.random.default_rng(3)
    x = exact_rows(rng, 9, 64)
    parts = tuple(weight(rng, name, n, 64) for name, n in (("Q4_0", 32), ("Q4_0", 16), ("Q8_0", 15)))
    mixed = (per_token(parts[0]), per_token(parts[1]), per_token(parts[2]))
    bias = Vector(rng.standard_normal(63).astype(np.float32))
    residual = rng.standard_normal((9, 63)).astype(np.float32)

    def program(ops, batch):
        added = ops.embed(f32_weight(residual), batch)
        rows = ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), mixed, bias, added), batch)
        assert rows.width == 63
        return rows

    def heads(ops, batch):
        return ops.linear(ops.logit_rows(ops.embed(f32_weight(x), batch), batch), mixed[:2])

    got, head = run(backend, program, plain_batch(9)), run(backend, heads, plain_batch(9))
    int4 = np.hstack([linear_per_token(x, part.data) for part in parts[:2]])
    int8 = x.astype(np.float64) @ dequantize(parts[2].data, parts[2].type).T
    np.testing.assert_allclose(
        got, np.hstack([int4, int8]) + bias.data + residual, atol=2e-5 * np.abs(got).max()
    )
    np.testing.assert_allclose(head, int4, atol=2e-5 * np.abs(head).max())


def test_one_scale_a_token_of_odd_rows(backend):
    """Would catch division by an empty range, an inverse that overflows, and NaN that becomes a number."""
    w = per_token(weight(np.random.default_rng(4), "Q4_0", 16, 32))
    x = np.zeros((5, 32), np.float32)
    x[1], x[2, 3], x[3, 3] = 1e-40, np.nan, -np.inf
    x[4] = 2.5
    got = run(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(5),
    )
    assert not got[0].any()
    assert np.abs(got[1]).max() < 1e-30
    assert np.isnan(got[2:4]).all()
    np.testing.assert_allclose(got[4], linear_per_token(x[4:], w.data)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_activation_quantization_error_is_that_of_int8(backend, type_name):
    """Would catch lossy or biased activation quantization: rounding to 1/127 of a block's maximum is all."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((16, 512)).astype(np.float32)
    w = weight(rng, type_name, 256, 512)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(16),
    )
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    # uniform rounding error of step max/127 (max of 32 normals is about 2.1) over unit variance
    assert error < 2.1 / 127 / np.sqrt(12) * 1.3


@pytest.mark.parametrize("type_name", quick(QUANTIZED, COMMON))
def test_logit_rows_are_more_exact(backend, type_name):
    """Would catch logits that carry the error of one int8: a second term, or int16, takes it below 1e-4."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((16, 512)).astype(np.float32)
    w = weight(rng, type_name, 256, 512)
    got, want = both(
        backend,
        lambda ops, batch: ops.linear(ops.logit_rows(ops.embed(f32_weight(x), batch), batch), (w,)),
        plain_batch(16),
    )
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-4


@pytest.mark.parametrize("type_name", ["Q6_K", "Q8_0"])
def test_logit_rows_do_not_depend_on_their_number(backend, type_name):
    """Would catch terms that are summed in another order for one row than for the nine of two panels."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((9, 512)).astype(np.float32)
    w = weight(rng, type_name, 48, 512)

    def program(ops, batch):
        return ops.linear(ops.logit_rows(ops.embed(f32_weight(x), batch), batch), (w,))

    together = run(backend, program, plain_batch(9))
    for n_rows in (1, 2, 3, 5):
        np.testing.assert_array_equal(run(backend, program, plain_batch(9, n_rows)), together[:n_rows])


@pytest.mark.parametrize("per_token", [False, True])
def test_rows_stored_in_another_order(backend, per_token):
    """Catches tiles, or row sums, of the rows as they lie in the file."""
    rng = np.random.default_rng(11)
    stored, order = random_rows(rng, "Q4_0", (40, 64)), rng.permutation(40)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    results = [
        both(
            backend,
            lambda ops, batch, w=w: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
            plain_batch(3),
        )
        for w in (
            Weight(stored, QUANT_TYPES["Q4_0"], (40, 64), "turned", per_token, order),
            Weight(stored[order], QUANT_TYPES["Q4_0"], (40, 64), "copied", per_token),
        )
    ]
    np.testing.assert_array_equal(results[0], results[1])
    for wrong in (order[1:], np.zeros_like(order), order + 1):
        with pytest.raises(ShapeError, match="its order must have"):
            Weight(stored, QUANT_TYPES["Q4_0"], (40, 64), row_order=wrong)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_extreme_activations(backend, type_name):
    """Would catch 16-bit saturation of the AVX2 dot product and division by an all-zero block."""
    rng = np.random.default_rng(3)
    data = quantize(rng.choice([-1.0, 1.0], (32, 64)).astype(np.float32), QUANT_TYPES[type_name])
    w = Weight(data, QUANT_TYPES[type_name], (32, 64))
    x = np.full((4, 64), 127, np.float32)
    x[1], x[2], x[3] = -127, 0, rng.choice([-127, 127], 64)
    x[2, :32] = 1e-30
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(4),
    )
    assert_close(got, want)


def extreme_weight(rng, type_name):
    """Rows of 256 weights whose quants are all of the least or all of the largest, or alternate.

    The largest nibble is 15, five bits 31, six 63; of signed bytes the largest are 127 and -128.
    """
    type = QUANT_TYPES[type_name]
    rows = random_rows(rng, type_name, (17, 256))
    bits = np.resize(np.uint8([0xFF, 0x00, 0x7F, 0x80]), 17)[:, None, None]
    blocks = rows.reshape(17, -1, type.block_bytes)
    for byte in range(type.block_bytes):
        if not any(byte - at in (0, 1) for at in HALVES[type_name]):
            blocks[:, :, byte] = bits[:, :, 0]
    if not HALVES[type_name]:
        set_scales(blocks.reshape(-1, type.block_bytes), type_name, np.full((1, 1), 2.0**-4))
    return Weight(rows, type, (17, 256))


def extreme_rows(rng, n_rows):
    """Rows of 256 inputs that are the largest of their block: all, none or some of them negative, or few."""
    x = np.full((n_rows, 256), 127, np.float32)
    x[1::2] = -127
    x[2::4] = rng.choice([-127, 127], 256)
    x[3::4] = rng.choice([-127, -1, 0, 1, 127], 256)
    return f32_weight(x)


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_extreme_weights_with_extreme_activations(backend, type_name, n_tokens):
    """Would catch a run of products that is too long for the 16 bits in which AVX2 sums it."""
    rng = np.random.default_rng(n_tokens)
    w, x = extreme_weight(rng, type_name), extreme_rows(rng, n_tokens)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(x, batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want)


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_extreme_logit_rows(backend, type_name, n_tokens):
    """Would catch sums of int16 products that overflow, pairs that are crossed, a panel taken for another."""
    rng = np.random.default_rng(n_tokens)
    w, x = extreme_weight(rng, type_name), extreme_rows(rng, n_tokens)
    got, want = both(
        backend,
        lambda ops, batch: ops.linear(ops.logit_rows(ops.embed(x, batch), batch), (w,)),
        plain_batch(n_tokens),
    )
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 8])
def test_extreme_activations_with_one_scale_a_token(backend, n_tokens):
    """Would catch that these activations, unlike others, may be -128."""
    w = per_token(extreme_weight(np.random.default_rng(0), "Q4_0"))
    x = np.full((n_tokens, 256), -1, np.float32)
    assert (quantize_tokens(x)[0] == -128).all()
    x[1::2] = 1
    got = run(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    want = linear_per_token(x, w.data)
    sizes = np.abs(dequantize(w.data, w.type)).sum(axis=1)
    assert (np.abs(got - want) <= RELATIVE * sizes).all()


def test_rows_of_zeros_give_zeros(backend):
    """Would catch NaN from 0/0 in the scale of an empty block."""
    w = weight(np.random.default_rng(4), "Q4_1", 16, 32)
    zeros = f32_weight(np.zeros((2, 32)))
    got = run(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(zeros, batch), (w,)), batch),
        plain_batch(2),
    )
    assert not got.any()


def test_nan_goes_through(backend):
    """Would catch a NaN turned into a plausible number by int8 quantization: the engine must see it."""
    w = weight(np.random.default_rng(5), "Q8_0", 16, 64)
    rows = f32_weight(np.full((2, 64), np.nan))

    def program(ops, batch):
        x = ops.rms_norm(ops.embed(rows, batch), Vector(np.ones(64, np.float32)), 1e-5)
        return ops.logit_rows(ops.linear(x, (w,)), batch)

    assert np.isnan(run(backend, program, plain_batch(2))).all()
