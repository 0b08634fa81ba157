"""Every op of the CPU backend against its definition, the reference backend, by the same small programs.

Inputs come in through an F32 embedding, results go out through `logit_rows`, buffers start as NaN. The file
also runs under other CPU names (test_cpu_lowerings.py), so that each int8 dot product is covered.
"""

from __future__ import annotations

import numpy as np
import pytest
from random_blocks import HALVES, random_rows

from kukri.config import PAGE_TOKENS
from kukri.errors import CapacityError, MissingKernelError, ShapeError, UnsupportedError
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.types import AttentionSpec, ForwardBatch, PagedKV, RopeTable, StepLimits, Weight
from kukri.quant.blocks import dequantize, quantize
from kukri.quant.per_token import linear_per_token, quantize_tokens
from kukri.quant.types import QUANT_TYPES

QUANTIZED = tuple(HALVES)  # every quantized type that kukri runs
TYPES = ("F32", "F16", "BF16", *QUANTIZED)

# Why these bounds: results differ by the order of float32 sums alone, a few ulp of the largest term.
RELATIVE = 3e-6


@pytest.fixture(scope="module")
def backend():
    backend = CpuBackend(n_threads=2)
    yield backend
    backend.close()


def weight(rng, type_name, n_out, n_in):
    """Random blocks of a type; `n_in` is rounded up to whole blocks."""
    type = QUANT_TYPES[type_name]
    n_in = -(-n_in // type.block_size) * type.block_size
    if type_name in QUANTIZED:
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
    """A step of one sequence without a cache behind it."""
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
    cache = cache or PagedKV(1, 32, 1, 16)
    limits = StepLimits(max(batch.n_tokens, 8) + 3, max_sequences, max(batch.n_tokens, 8) + 3, 32)
    compiled = backend.compile(program, cache, limits, {})
    if isinstance(backend, CpuBackend):
        compiled.plan.memory.view(np.float32)[:] = np.nan
    return compiled(batch).copy()


def both(backend, program, batch):
    """(CPU, reference) results of one program."""
    return run(backend, program, batch), run(ReferenceBackend(), program, batch)


def assert_close(got, want, relative=RELATIVE):
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= relative * max(np.abs(want).max(), 1e-30)


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


@pytest.mark.parametrize("n_out", [1, 3, 15, 16, 17, 63, 65, 1000])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_at_every_width(backend, type_name, n_out):
    """Would catch rows lost or doubled where a weight does not fill its last tile of 16 rows."""
    rng = np.random.default_rng(n_out)
    w = weight(rng, type_name, n_out, 64)
    x = exact_rows(rng, 5, w.shape[1])
    bias = rng.standard_normal(n_out).astype(np.float32)
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
    bias = rng.standard_normal(71).astype(np.float32)

    def program(ops, batch):
        return ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), parts, bias), batch)

    assert_close(*both(backend, program, plain_batch(9)))


@pytest.mark.parametrize("sizes", [(24, 24), (17, 31), (8, 8)])
def test_a_tile_that_starts_inside_another_ends_in_its_row(backend, sizes):
    """Would catch the last tile of one type written over the first columns of the next token."""
    rng = np.random.default_rng(2)
    x, width = exact_rows(rng, 9, 64), sum(sizes)
    parts = tuple(weight(rng, name, n, 64) for name, n in zip(("Q4_1", "Q8_0"), sizes, strict=True))
    bias = rng.standard_normal(width).astype(np.float32)
    residual = rng.standard_normal((9, width)).astype(np.float32)

    def program(ops, batch):
        added = ops.embed(f32_weight(residual), batch)
        return ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), parts, bias, added), batch)

    assert_close(*both(backend, program, plain_batch(9)))


def per_token(w):
    return Weight(w.data, w.type, w.shape, w.name, per_token=True)


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
    bias = rng.standard_normal(63).astype(np.float32)
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
    np.testing.assert_allclose(got, np.hstack([int4, int8]) + bias + residual, atol=2e-5 * np.abs(got).max())
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


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_logit_rows_are_quantized_in_two_terms(backend, type_name):
    """Would catch logits that carry the error of one int8: the second term takes it below 1e-4."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((16, 512)).astype(np.float32)
    w = weight(rng, type_name, 256, 512)
    got, want = both(
        backend,
        lambda ops, batch: ops.linear(ops.logit_rows(ops.embed(f32_weight(x), batch), batch), (w,)),
        plain_batch(16),
    )
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-4


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
    return Weight(rows, type, (17, 256))


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_extreme_weights_with_extreme_activations(backend, type_name, n_tokens):
    """Would catch a run of products that is too long for the 16 bits in which AVX2 sums it."""
    rng = np.random.default_rng(n_tokens)
    w = extreme_weight(rng, type_name)
    x = np.full((n_tokens, 256), 127, np.float32)
    x[1::2] = -127
    x[2::4] = rng.choice([-127, 127], 256)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.linear(ops.embed(f32_weight(x), batch), (w,)), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want)


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
        x = ops.rms_norm(ops.embed(rows, batch), np.ones(64, np.float32), 1e-5)
        return ops.logit_rows(ops.linear(x, (w,)), batch)

    assert np.isnan(run(backend, program, plain_batch(2))).all()


@pytest.mark.parametrize("type_name", TYPES)
def test_embedding(backend, type_name):
    """Would catch rows read in another order than the file's: dequantization is exact."""
    w = weight(np.random.default_rng(6), type_name, 12, 64)
    got, want = both(backend, lambda ops, batch: ops.logit_rows(ops.embed(w, batch), batch), plain_batch(12))
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 65])
@pytest.mark.parametrize("width", [16, 48, 96])
def test_rms_norm(backend, n_tokens, width):
    """Would catch a wrong mean at widths that are not powers of two, and eps in the wrong place."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 1e-2)
    scale = rng.standard_normal(width).astype(np.float32)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.rms_norm(ops.embed(x, batch), scale, 1e-4), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want)


@pytest.mark.parametrize("n_tokens", [1, 3, 65])
@pytest.mark.parametrize("width", [16, 96, 1040])
def test_silu_mul(backend, n_tokens, width):
    """Would catch lost columns (work is cut every 512) and an inexact exponential in either tail."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, 2 * width)) * 20)

    def program(ops, batch):
        gate, up = ops.split(ops.embed(x, batch), (width, width))
        return ops.logit_rows(ops.silu_mul(gate, up), batch)

    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("n_tokens", [1, 3, 9, 65])
@pytest.mark.parametrize("d_head", [16, 48, 128])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_head_norm(backend, n_tokens, d_head, part):
    """Would catch a mean over all heads, a head left out, and columns beside them overwritten."""
    rng = np.random.default_rng(d_head)
    x = f32_weight(rng.standard_normal((n_tokens, 5 * d_head)) * 1e-2)
    scale = rng.standard_normal(d_head).astype(np.float32)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(x, batch), (3 * d_head, d_head, d_head))
        parts = {"q": ops.head_norm(q, scale, 1e-4), "k": ops.head_norm(k, scale * 2, 1e-4), "v": v}
        return ops.logit_rows(parts[part], batch)

    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("n_tokens", [1, 7, 8, 9, 65])
@pytest.mark.parametrize("width", [16, 48, 96])
def test_layer_norm(backend, n_tokens, width):
    """Would catch a variance about zero, a mean over padding, and eps or the bias in the wrong place."""
    rng = np.random.default_rng(width)
    x = f32_weight(rng.standard_normal((n_tokens, width)) * 1e-2 + 0.05)
    scale, bias = rng.standard_normal((2, width)).astype(np.float32)
    got, want = both(
        backend,
        lambda ops, batch: ops.logit_rows(ops.layer_norm(ops.embed(x, batch), scale, bias, 1e-4), batch),
        plain_batch(n_tokens),
    )
    assert_close(got, want, 1e-5)  # x - mean loses two bits where the mean is five deviations away


@pytest.mark.parametrize("n_tokens", [1, 3, 65])
@pytest.mark.parametrize("width", [16, 96, 1040])
def test_gelu(backend, n_tokens, width):
    """Would catch lost columns (work is cut every 512), the exact form, and NaN from exp in either tail."""
    x = f32_weight(np.random.default_rng(width).standard_normal((n_tokens, width)) * 8)
    assert_close(
        *both(
            backend,
            lambda ops, batch: ops.logit_rows(ops.gelu(ops.embed(x, batch)), batch),
            plain_batch(n_tokens),
        )
    )


@pytest.mark.parametrize("kind", ["silu, rms", "gelu, layer"])
def test_fused_and_separate_quantization_agree(backend, kind):
    """Would catch a producer whose int8 panels differ from quantizing its float result."""
    rng = np.random.default_rng(7)
    x, w = f32_weight(rng.standard_normal((9, 128))), weight(rng, "Q4_1", 32, 64)
    norm, bias = rng.standard_normal((2, 64)).astype(np.float32)

    def activate(ops, gate, up):
        return ops.silu_mul(gate, up) if kind == "silu, rms" else ops.gelu(gate)

    def normalize(ops, x):
        return ops.rms_norm(x, norm, 1e-5) if kind == "silu, rms" else ops.layer_norm(x, norm, bias, 1e-5)

    def program(listen):
        def program(ops, batch):
            gate, up = ops.split(ops.embed(x, batch), (64, 64))
            hidden = ops.tap("t1", None, activate(ops, gate, up))
            hidden = ops.linear(hidden, (weight(np.random.default_rng(8), "Q4_0", 64, 64),))
            normed = ops.tap("t2", None, normalize(ops, hidden))
            return ops.logit_rows(ops.linear(normed, (w,)), batch)

        hooks = {"t1": [lambda name, x: None], "t2": [lambda name, x: None]} if listen else {}
        compiled = backend.compile(program, PagedKV(1, 32, 1, 16), StepLimits(16, 1, 16, 8), hooks)
        compiled.plan.memory.view(np.float32)[:] = np.nan
        return compiled(plain_batch(9)).copy()

    np.testing.assert_array_equal(program(True), program(False))


@pytest.mark.parametrize(("rotary", "d_head"), [(64, 64), (32, 64), (16, 16), (24, 48)])
def test_rope(backend, rotary, d_head):
    """Would catch interleaved pairs, a rotation past rotary_dim, and widths that are not vectors."""
    rng = np.random.default_rng(rotary)
    spec = AttentionSpec(0, 3, 1, d_head, 1.0)
    table = RopeTable(1 / 10000 ** (np.arange(0, rotary, 2) / rotary), 256)
    table.ensure(128)
    x = f32_weight(rng.standard_normal((9, 4 * d_head)))

    def program(ops, batch):
        q, k = ops.split(ops.embed(x, batch), (3 * d_head, d_head))
        q, k = ops.rope(q, k, table, spec, batch)
        return ops.logit_rows(q, batch)

    assert_close(*both(backend, program, plain_batch(9)))


def fill(array, rng):
    """Random numbers of any size in a cache; scales of q8_0 are at most 1 / 127."""
    if array.dtype.names:
        array["quants"] = rng.integers(-127, 128, array["quants"].shape)
        array["scales"] = rng.uniform(0, 1 / 127, array["scales"].shape)
    else:
        array[:] = rng.standard_normal(array.shape)


def attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type="f16"):
    """A program and a batch of several sequences, their pages scattered, on caches with the same past."""
    n_tokens = sum(n_new)
    width = (group + 2) * n_kv_heads * d_head
    x = f32_weight(rng.standard_normal((n_tokens, width)))
    spec = AttentionSpec(0, group * n_kv_heads, n_kv_heads, d_head, d_head**-0.5, window)
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
    past = PagedKV(1, sum(n_pages) + 5, n_kv_heads, d_head, kv_type)
    fill(past.keys, rng)
    fill(past.values, rng)

    def program(ops, batch):
        sizes = (group * n_kv_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head)
        q, k, v = ops.split(ops.embed(x, batch), sizes)
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    return program, batch, past


def copy_of(cache):
    new = PagedKV(cache.n_layers, cache.n_pages, cache.n_kv_heads, cache.d_head, cache.kv_type)
    new.keys[:], new.values[:] = cache.keys, cache.values
    return new


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kv_type"),
    [
        *((1, 3, 16, "f16"), (3, 2, 64, "f16"), (4, 1, 32, "f16"), (8, 2, 48, "f16"), (12, 1, 16, "f16")),
        *((3, 2, 64, "q8_0"), (4, 1, 96, "q8_0")),
    ],
)
def test_attention(backend, group, n_kv_heads, d_head, kv_type, window):
    """Would catch a mask that forgets the cache, heads of the wrong group, pages mixed up, a lost window,
    a scale of another token or block."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 200, 130, 64), (1, 1, 20, 130, 3)
    program, batch, past = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type)
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], max_sequences=5)
    want = run(ReferenceBackend(), program, batch, caches[1], max_sequences=5)
    assert_close(got, want, relative=1e-5)
    np.testing.assert_array_equal(caches[0].keys, caches[1].keys)
    np.testing.assert_array_equal(caches[0].values, caches[1].values)


def test_a_q8_0_cache_is_close_to_float16(backend):
    """Would catch quantization that is wrong in the same way on both backends."""
    logits = []
    for kv_type in ("f16", "q8_0"):
        rng = np.random.default_rng(3)
        program, batch, past = attention_case(rng, 3, 2, 64, None, (70, 130), (70, 130), kv_type)
        logits.append(run(backend, program, batch, past, max_sequences=2))
    error = np.abs(logits[0] - logits[1])
    assert 1e-4 < error.max() < 0.05
    with pytest.raises(UnsupportedError, match="head size"):
        PagedKV(1, 1, 1, 16, "q8_0")


def test_attention_ignores_what_lies_outside_the_context(backend):
    """Would catch reads of stale slots: they hold other requests' numbers, here the largest there are."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    used = {
        (int(batch.page_table[s, p // PAGE_TOKENS]), p % PAGE_TOKENS)
        for s in range(2)
        for p in range(batch.context_len[s])
    }
    for page in range(past.n_pages):
        for offset in range(PAGE_TOKENS):
            if (page, offset) not in used:
                dirty.keys[0, page, :, :, offset] = 65504
                dirty.values[0, page, :, offset] = -65504
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


def test_the_cache_limits_numbers_and_keeps_nan(backend):
    """Would catch an inf that makes NaN of 0 * inf later, and a NaN hidden from the request that made it."""
    values = np.zeros((3, 48), np.float32)
    values[1, 16:32], values[1, 32:] = 1e30, -1e30
    values[2, 32:] = np.nan
    spec = AttentionSpec(0, 1, 1, 16, 1.0)
    cache = PagedKV(1, 2, 1, 16)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(f32_weight(values), batch), (16, 16, 16))
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    for n_tokens in (2, 3):
        got = run(backend, program, plain_batch(n_tokens), cache)
        assert np.isnan(got[-1]).all() == (n_tokens == 3)
    assert cache.keys.max() == 65504
    assert cache.values[0, 0, 0, 1].min() == -65504


def test_nan_left_in_a_page_does_not_reach_the_next_owner(backend):
    """Would catch 0 * NaN: slots past a sequence's end may hold what a failed request left."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    for s, n_context in enumerate(batch.context_len):
        page, offset = batch.page_table[s, n_context // PAGE_TOKENS], n_context % PAGE_TOKENS
        dirty.keys[0, page, :, :, offset:] = np.nan
        dirty.values[0, page, :, offset:] = np.nan
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_results_do_not_depend_on_threads_or_batch_mates(n_threads):
    """Would catch sums whose order follows the batch: a token alone and among others, to the bit."""
    rng = np.random.default_rng(10)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(300, 290), n_new=(40, 1))
    backend = CpuBackend(n_threads=n_threads)
    together = run(backend, program, batch, copy_of(past))
    cache = copy_of(past)
    for t in range(40):  # the first sequence token by token
        one = ForwardBatch(
            batch.token_ids[t : t + 1],
            batch.positions[t : t + 1],
            batch.slots[t : t + 1],
            np.array([0, 1], np.int32),
            batch.positions[t : t + 1] + 1,
            batch.page_table[:1],
            np.array([0], np.int32),
        )
        np.testing.assert_array_equal(run(backend, program, one, cache)[0], together[t])
    backend.close()


def corrupt(batch, name, value):
    arrays = {f: a.copy() for f, a in vars(batch).items() if a is not None}
    arrays[name].reshape(-1)[-1] = value
    return ForwardBatch(**arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", 12),
        ("token_ids", -1),
        ("slots", 32 * PAGE_TOKENS),
        ("positions", 2),
        ("query_start", 3),
        ("context_len", 3),
        ("context_len", 10_000),
        ("page_table", 32),
        ("page_table", -1),
        ("logit_rows", 4),
    ],
)
def test_bad_indices_never_reach_a_kernel(backend, name, value):
    """Would catch an index that reads or writes outside its array: kernels do not check."""
    spec = AttentionSpec(0, 1, 1, 16, 1.0)
    rows = f32_weight(np.zeros((12, 48)))

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(rows, batch), (16, 16, 16))
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    with pytest.raises(ShapeError):
        run(backend, program, corrupt(plain_batch(4), name, value))


def test_limits_are_checked(backend):
    """Would catch a step that overruns the buffers made for the limits."""
    rows = f32_weight(np.zeros((40, 16)))
    compiled = backend.compile(
        lambda ops, batch: ops.logit_rows(ops.embed(rows, batch), batch),
        PagedKV(1, 8, 1, 16),
        StepLimits(16, 1, 4, 8),
        {},
    )
    with pytest.raises(CapacityError):
        compiled(plain_batch(17))
    with pytest.raises(CapacityError):
        compiled(plain_batch(8))


def test_shapes_without_a_kernel_are_refused(backend):
    """Would catch widths that the vector loops would run past."""
    rows = f32_weight(np.zeros((4, 24)))

    def program(ops, batch):
        return ops.logit_rows(ops.rms_norm(ops.embed(rows, batch), np.ones(24, np.float32), 1e-5), batch)

    with pytest.raises(MissingKernelError, match="multiples of 16"):
        run(backend, program, plain_batch(4))
