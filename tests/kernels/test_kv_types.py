"""Heads of a q4 KV cache: the rotation, and the numbers that 4 bits and a scale keep."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.kv_types import encode_q4, q4_bytes, rotate_heads, unpack_q4
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.kernels.pytorch import kv_types as tensors

SIZES = (16, 48, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("d_head", SIZES)
def test_rotation_is_orthogonal_and_its_own_inverse(d_head):
    """Would catch scores that a rotation of queries and keys changes, and a result not rotated back."""
    matrix = rotate_heads(np.eye(d_head, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d_head), atol=1e-6)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-7)
    assert np.abs(matrix).max() < 0.63  # no dimension stays nearly alone
    if d_head == 64:  # Sylvester's Hadamard matrix
        signs = [[(-1) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]
        np.testing.assert_array_equal(matrix, np.float32(signs) / 8)


@pytest.mark.parametrize("d_head", SIZES)
def test_heads_come_back_within_half_a_step(d_head):
    """Would catch nibbles out of order, a sign lost, a scale that cuts off more than it gains."""
    x = np.random.default_rng(d_head).standard_normal((50, 3, d_head)).astype(np.float32)
    x[0, 0] = 0
    packed, scales = encode_q4(x)
    assert packed.shape == (50, 3, q4_bytes(d_head))
    back = unpack_q4(packed, d_head) * scales.astype(np.float32)
    step = np.abs(scales.astype(np.float32))
    is_within = np.abs(x / np.where(step > 0, step, 1)) <= 7
    assert (np.abs(back - x) <= 0.51 * step)[is_within].all()
    assert np.square(back - x).mean() < 0.0115 * np.square(x).mean()
    assert not back[0, 0].any()


def test_nan_stays_in_the_scale_and_large_numbers_are_finite():
    """Would catch a request whose NaN is hidden, or an inf from the largest numbers that a cache takes."""
    x = np.ones((2, 128), np.float32)
    x[0, 3] = np.nan
    x[1] = 65504
    packed, scales = encode_q4(rotate_heads(x))
    assert np.isnan(scales[0])
    assert np.isfinite(scales[1])
    assert np.isfinite(unpack_q4(packed, 128)).all()


@pytest.mark.parametrize("d_head", [48, 64, 80])
def test_tensors_are_the_same_to_the_bit(d_head):
    """Would catch another order of dimensions, or of sums, in the torch backend."""
    x = np.random.default_rng(d_head).standard_normal((20, 3, d_head)).astype(np.float32)
    rotated = rotate_heads(x)
    got = tensors.rotate_heads(torch.from_numpy(x).flatten(1), d_head)
    np.testing.assert_array_equal(got.numpy(), rotated.reshape(20, -1))
    packed, scales = encode_q4(rotated)
    got_packed, got_scales = tensors.encode_q4(torch.from_numpy(rotated))
    np.testing.assert_array_equal(got_packed.numpy(), packed)
    np.testing.assert_array_equal(got_scales.numpy(), scales)
    np.testing.assert_array_equal(tensors.unpack_q4(got_packed, d_head).numpy(), unpack_q4(packed, d_head))
