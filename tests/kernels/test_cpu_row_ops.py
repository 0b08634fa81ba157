"""The compiled passes over a row of logits against their definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.cpu.jit import KernelLibrary
from kukri.kernels.cpu.row_ops import CpuRowOps
from kukri.kernels.reference import ReferenceRowOps


@pytest.fixture(scope="module")
def ops():
    return CpuRowOps(KernelLibrary())


@pytest.fixture(params=[1, 15, 16, 17, 1000, 1024, 1025, 2063, 49152, 151936])
def row(request):
    row = np.random.default_rng(request.param).standard_normal(request.param).astype(np.float32) * 5
    row[request.param // 2 :: 3] = row[request.param // 2]  # ties
    return row


def test_argmax_takes_the_first_of_equals(ops, row):
    """Would catch the last of equal lanes, or a tail that is not looked at."""
    assert ops.argmax(row) == int(row.argmax())
    row[-1] = row.max() + 1
    assert ops.argmax(row) == len(row) - 1
    row[:] = row[0]
    assert ops.argmax(row) == 0
    row[:] = -np.inf
    assert ops.argmax(row) == 0


def test_nan_is_noticed_wherever_it_is(ops, row):
    """Would catch a NaN that a comparison of vectors drops."""
    for index in {0, len(row) // 2, len(row) - 1}:
        bad = row.copy()
        bad[index] = np.nan
        assert ops.argmax(bad) == -1
        assert np.isnan(ops.max_and_sum_exp(bad, 1.0)[0])


@pytest.mark.parametrize("scale", [1.0, 0.7, 30.0, 1e6])
def test_sums(ops, row, scale):
    """Would catch a block that ends inside a vector, and an exponential that is off in the tail."""
    row[0] = -np.inf
    if len(row) == 1:
        row[0] = 3
    top, sums = ops.max_and_sum_exp(row, scale)
    want_top, want = ReferenceRowOps().max_and_sum_exp(row, scale)
    assert top == want_top
    np.testing.assert_allclose(sums, want, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("threshold", [-100.0, 0.0, 1.25, 9.0, 100.0, -np.inf])
def test_above(ops, row, threshold):
    """Would catch an id lost or doubled at a vector's edge."""
    np.testing.assert_array_equal(ops.above(row, threshold), ReferenceRowOps().above(row, threshold))
