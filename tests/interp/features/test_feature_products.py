"""Products with encoders by the CPU backend's kernels, against NumPy on the numbers that are stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kukri.interp.features.feature_products import Product, product_backend
from kukri.kernels import make_backend
from kukri.quant.blocks import FLOAT_BYTES, dequantize
from kukri.quant.types import QUANT_TYPES

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def backend():
    made = make_backend("cpu", 1)
    yield product_backend(made)
    made.close()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("n_features", "width"), [(83, 48), (16, 40), (130, 64)])
def test_autoencoder_products_are_those_of_the_stored_matrix(backend, dtype, n_features, width):
    """A tile of features that is full of those before, rows beyond a step, columns of a transposed matrix."""
    matrix = np.asfortranarray(RNG.standard_normal((n_features, width), np.float32))
    x = RNG.standard_normal((150, width)).astype(np.float32)[::-1]
    product = Product(backend, matrix, dtype)
    stored = FLOAT_BYTES[dtype](np.ascontiguousarray(matrix).reshape(-1, 1))
    kept = dequantize(stored.reshape(n_features, -1), QUANT_TYPES[dtype])
    found = product(x)
    np.testing.assert_allclose(found, x @ kept.T, atol=1e-4)
    np.testing.assert_array_equal(np.concatenate([product(row) for row in x[:70, None]]), found[:70])
    assert product(x[:0]).shape == (0, n_features)


def test_threads_that_multiply_at_once(backend):
    """A batch that another thread writes before it has been multiplied."""
    matrix = RNG.standard_normal((64, 32), np.float32)
    product = Product(backend, matrix, "F64")
    inputs = [RNG.standard_normal((n, 32)).astype(np.float32) for n in range(1, 40)]
    with ThreadPoolExecutor(4) as threads:
        for x, found in zip(inputs, threads.map(product, inputs)):
            np.testing.assert_allclose(found, x @ matrix.T, atol=1e-4)


def test_other_backends_multiply_by_blas():
    """A backend of the processor for a model on a device."""
    assert product_backend(make_backend("reference")) is None
