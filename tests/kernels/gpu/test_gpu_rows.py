"""Kernels on rows under Triton's interpreter: norms, element-wise ops, quantization, RoPE with the cache."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.activations import ACTIVATIONS
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.reference import ReferenceOps
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.weight_handles import Vector
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.kernels.gpu import attention
    from kukri.kernels.gpu.rows import Recipe, activate, activate_q8, quantize, rms_norm, rms_norm_q8

OPS = ReferenceOps(PagedKV([KVLayer(1, 16)], 1))


def quantized(x):
    """The definition: (int8, float32 scales, sums of 16) of float32 [T, width], padded to pairs of blocks."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 64)))
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return q.reshape(len(x), -1), largest / np.float32(127), q.reshape(len(x), -1, 16).sum(-1, dtype=np.int32)


def halves(rows):
    return rows.sums.numpy().T.copy().view(np.int16).astype(np.int32)


def check_q8(rows, want):
    quants, scales, sums = quantized(want)
    np.testing.assert_allclose(rows.scales.numpy().T, scales, rtol=1e-5)
    assert rows.quants.shape == quants.shape
    assert np.abs(rows.quants.numpy().astype(int) - quants).max() <= 1  # a tie where the last bits differ
    own = rows.quants.numpy().astype(np.int32).reshape(len(quants), -1, 16).sum(-1)
    assert (halves(rows) == own).all()
    assert np.abs(own - sums).max() <= 2


@pytest.mark.parametrize("width", [32, 96, 576, 1100])
def test_activations_are_quantized_as_the_reference_does(width):
    """Catches ties rounded up, a scale of a neighbour's block, sums with the wrong sign and stale padding."""
    x = np.random.default_rng(width).standard_normal((3, width), dtype=np.float32) * 100
    x[1, :32] = 0
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.5]
    wide = torch.full((3, width + 5), float("nan"))
    wide[:, :width] = torch.as_tensor(x)
    rows = quantize(wide[:, :width])
    quants, scales, sums = quantized(x)
    assert (rows.quants.numpy() == quants).all()
    assert (scales == rows.scales.numpy().T).all()
    assert (halves(rows) == sums).all()


def test_nan_travels():
    """Catches a maximum that forgets NaN: its block would become finite, and the error would vanish."""
    x = torch.ones(1, 128)
    x[0, 40] = float("nan")
    assert quantize(x).scales.T.isnan().tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("width", [48, 96, 576])
def test_rms_norm(width):
    """Catches a mean over padding, and a row's stride taken for its width."""
    rng = np.random.default_rng(width)
    wide = rng.standard_normal((3, width + 7), dtype=np.float32) * 1e-2
    weight = rng.standard_normal(width, dtype=np.float32)
    want = OPS.rms_norm(wide[:, :width], Vector(weight), 1e-4)
    x = torch.as_tensor(wide)[:, :width]
    np.testing.assert_allclose(rms_norm(x, torch.as_tensor(weight), 1e-4).numpy(), want, rtol=2e-6)
    check_q8(rms_norm_q8(x, torch.as_tensor(weight), 1e-4), want)


def test_rms_norm_of_heads():
    """Catches a norm over all heads at once."""
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((2, 5 * 48), dtype=np.float32), rng.standard_normal(48, dtype=np.float32)
    got = rms_norm(torch.as_tensor(x).reshape(-1, 48), torch.as_tensor(weight), 1e-5)
    np.testing.assert_allclose(got.numpy().reshape(2, -1), OPS.head_norm(x, Vector(weight), 1e-5), rtol=2e-6)


@pytest.mark.parametrize("width", [96, 1100])
def test_gated_silu(width):
    """Catches lost columns, gate and up exchanged, and an overflow in either tail."""
    gate_up = np.random.default_rng(width).standard_normal((3, 2 * width), dtype=np.float32) * 30
    gate_up[0, :2] = [-200, 200]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    want = OPS.map("gated_silu", up, gate)
    recipe = Recipe("gated_silu", *reversed(torch.as_tensor(gate_up).split(width, 1)))
    np.testing.assert_allclose(activate(recipe).numpy(), want, rtol=1e-5, atol=1e-12)
    check_q8(activate_q8(recipe), want)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_element_wise_op_is_its_formula(name):
    """Catches a formula that Triton reads otherwise, a bound that swallows NaN, and padding that is not 0."""
    parts = np.random.default_rng(0).standard_normal((2, 3, 96), dtype=np.float32) * 4
    parts[:, 0, :2] = [[-80, 80], [60, -60]]
    numbers = 0.75, 1.25
    want = OPS.map(name, *parts, *numbers)
    recipe = Recipe(name, *torch.as_tensor(parts), *numbers)
    np.testing.assert_allclose(activate(recipe).numpy(), want, rtol=1e-5, atol=2e-6)
    check_q8(activate_q8(recipe), activate(recipe).numpy())
    recipe.x[1, 40] = float("nan")
    assert activate(recipe).isnan().sum() == 1


@pytest.mark.parametrize(
    ("kind", "d_head", "rotary"),
    [("f16", 96, 24), ("f16", 32, 0), ("q8_0", 64, 64), ("q8_0", 96, 24), ("fp8", 80, 24)],
)
def test_rope_and_store(kind, d_head, rotary):
    """Catches a rotation of the wrong pair or of values, a token in another's slot, and unlimited numbers."""
    rng = np.random.default_rng(d_head)
    spec = AttentionSpec(0, 4, 2, d_head, 1.0)
    positions, slots = np.int32([5, 0, 17]), np.int32([33, 2, 79])
    q, k, v = (rng.standard_normal((3, n * d_head), dtype=np.float32) for n in (4, 2, 2))
    k[1, 0], v[1, 1] = 1e9, -np.inf  # the pair of k[1, 0] is at position 0, where nothing rotates
    angles = rng.uniform(0, 7, (20, rotary // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    cos[0], sin[0] = 1, 0
    cache = empty_cache(kind, 6, 2, d_head)
    table = (torch.as_tensor(cos), torch.as_tensor(sin)) if rotary else None
    arrays = (torch.as_tensor(a) for a in (q, k, v))
    new = attention.NewTokens(*arrays, table, torch.as_tensor(positions), torch.as_tensor(slots))
    got = attention.rope_and_store(new, cache, spec)
    want_q, want_k = (
        rotated(q, cos[positions], sin[positions], d_head),
        rotated(k, cos[positions], sin[positions], d_head),
    )
    np.testing.assert_allclose(got.numpy().reshape(3, -1), want_q, rtol=1e-3, atol=1e-3)
    keys, values = floats(cache)
    for t, slot in enumerate(slots):
        for stored, want in ((keys, want_k), (values, v)):
            limit = 448 if kind == "fp8" else 65504
            want = np.clip(want[t].reshape(2, d_head), -limit, limit)
            bound = np.abs(want) * (1e-3 if kind == "f16" else 1 / 15.9) + 1e-3
            if kind == "q8_0":
                bound = np.abs(want.reshape(2, -1, 32)).max(-1).repeat(32, -1) * (0.51 / 127 + 1e-3) + 1e-6
            assert (np.abs(stored[slot // 16, :, slot % 16] - want) <= bound).all()
    untouched = np.ones((6, 16), bool)
    untouched[slots // 16, slots % 16] = False
    assert np.isnan(keys.swapaxes(1, 2)[untouched]).all()


def test_stored_fp8_is_that_of_pytorch_to_the_bit():
    """Catches a tie rounded away, a number below the least normal, a limit, NaN or a sign that is lost."""
    sizes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = [(sizes[1:] + sizes[:-1]) / 2, sizes[1:] * 0.999, torch.tensor([448.0, 1e9, torch.nan])]
    x = torch.zeros(2, 512)
    x[0, : 127 + 2 * 126 + 3] = torch.cat([sizes, *between])
    x[1] = -x[0]
    cache, spec = empty_cache("fp8", 1, 1, 512), AttentionSpec(0, 1, 1, 512, 1.0)
    slots = torch.tensor([3, 11], dtype=torch.int32)
    attention.rope_and_store(attention.NewTokens(x, -x, x, None, slots, slots), cache, spec)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    number = ~x.isnan()
    for stored, sign in ((cache.values, 0), (cache.keys, 0x80)):
        got = stored[0, 0, slots.long()]
        assert torch.equal(got[number], want[number] ^ sign)
        assert (got[~number] & 0x7F == 0x7F).all()


def rotated(x, cos, sin, d_head):
    half = cos.shape[1]
    heads = x.reshape(len(x), -1, d_head).copy()
    a, b = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = a * cos[:, None] - b * sin[:, None]
    heads[..., half : 2 * half] = b * cos[:, None] + a * sin[:, None]
    return heads.reshape(x.shape)


def empty_cache(kind, n_pages, n_kv_heads, d_head):
    """A cache whose numbers, or scales, are NaN."""
    shape = (n_pages, n_kv_heads, 16, d_head)
    if kind == "f16":
        keys, values = torch.full(shape, float("nan")).half(), torch.full(shape, float("nan")).half()
        return attention.PagedTensors(keys, values, keys, values)
    if kind == "fp8":
        keys, values = (torch.full(shape, 0x7F, dtype=torch.uint8) for _ in range(2))
        return attention.PagedTensors(keys, values, keys, values)
    scales = torch.full((*shape[:3], d_head // 32), float("nan")).half()
    return attention.PagedTensors(
        torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.int8), scales, scales.clone()
    )


def floats(cache):
    """Keys and values as float32 NumPy arrays."""
    pairs = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
    if cache.kind != "q8_0":
        float8 = torch.float8_e4m3fn
        return tuple((x.view(float8) if x.dtype == torch.uint8 else x).float().numpy() for x, _ in pairs)
    return tuple((x.float() * scales.float().repeat_interleave(32, dim=-1)).numpy() for x, scales in pairs)
