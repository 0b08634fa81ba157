"""Adapters' updates next to Triton kernels: plain ops, whose rows and bits are those of the torch backend."""

from __future__ import annotations

import numpy as np

from kukri.kernels.cache import KVLayer
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import LowRank, Weight
from kukri.quant.types import QUANT_TYPES
from tests.kernels.gpu.device import DEVICE
from tests.lazy_imports import lazy_imports

with lazy_imports():
    from kukri.kernels.gpu.backend import GpuBackend


def matrix(array, name=""):
    array = np.ascontiguousarray(array, np.float32)
    return Weight(array.view(np.uint8), QUANT_TYPES["F32"], array.shape, name)


def test_updates_beside_kernels():
    """A deferred norm that the update does not read; another sequence's rows; logit rows taken for tokens."""
    rng = np.random.default_rng(0)
    x, w, head = (rng.standard_normal(shape) for shape in ((4, 32), (32, 32), (32, 32)))
    made = {
        name: LowRank(matrix(rng.standard_normal((4, 32))), matrix(rng.standard_normal((32, 4))), 0.5)
        for name in ("w", "head")
    }
    rows, weight, last = matrix(x), matrix(w, "w"), matrix(head, "head")

    def program(ops, batch):
        inputs = ops.embed(rows, batch)
        y = ops.linear(inputs, [weight], None, inputs, ("out", None))
        return ops.linear(ops.logit_rows(y, batch), [last])

    ids, zero = np.arange(4, dtype=np.int32), np.zeros(2, np.int32)
    batch = ForwardBatch(
        ids,
        np.array([0, 0, 1, 2], np.int32),
        np.array([0, 16, 17, 18], np.int32),
        np.array([0, 1, 4], np.int32),
        np.array([1, 3], np.int32),
        np.array([[0], [1]], np.int32),
        np.array([3, 0], np.int32),
        adapters=zero + np.array([-1, 0], np.int32),
    )
    limits = StepLimits(8, 2, 8, 1)
    results = []
    for backend in (GpuBackend(DEVICE), ReferenceBackend()):
        cache = backend.new_cache([KVLayer(1, 16)], 2)
        compiled = backend.compile(program, cache, limits, frozenset(), [made])
        results.append(compiled(batch).numpy().copy())
        if backend.name == "gpu":
            assert not backend.is_batch_invariant
    np.testing.assert_allclose(*results, rtol=0.02, atol=0.02 * np.abs(results[1]).max())
