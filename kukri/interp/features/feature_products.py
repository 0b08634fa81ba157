"""Products of activations and the encoder of a dictionary of features, by the kernels of the CPU backend.

They run on the engine's threads, in turn with its steps. Threads of BLAS would wait busily for each other on
the same cores, and its products take two to three times as long. The bits of a row depend on no other row.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, cast

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend
from kukri.kernels.step import StepLimits, rows_batch
from kukri.kernels.weight_handles import Weight
from kukri.quant.blocks import FLOAT_BYTES
from kukri.quant.types import QUANT_TYPES

_ROWS = 64  # tokens that are multiplied at a time


def product_backend(backend: Backend) -> Backend | None:
    """Return a backend for products on the threads of a model's backend; None if BLAS is to multiply."""
    if backend.name != "cpu":
        return None
    from kukri.kernels.cpu import CpuBackend

    return CpuBackend(cast(CpuBackend, backend).pool.n_threads)


class Product:
    """x [rows, D] -> [rows, F] by a matrix [F, D], which is kept in the type `dtype` of safetensors."""

    def __init__(self, backend: Backend, matrix: FloatArray, dtype: str) -> None:
        type = QUANT_TYPES[dtype if dtype in FLOAT_BYTES else "F32"]
        stored = FLOAT_BYTES[type.name](np.ascontiguousarray(matrix, np.float32).reshape(-1, 1))
        weight = Weight(stored.reshape(len(matrix), -1), type, (len(matrix), matrix.shape[1]), "encoder")
        self.shape = weight.shape

        def program(ops: Any, batch: Any) -> Any:
            return ops.linear(ops.activations(batch, matrix.shape[1]), [weight])

        self._program = backend.compile(program, None, StepLimits.of_rows(_ROWS))
        self._lock = Lock()  # a program runs one step at a time

    def __call__(self, x: FloatArray) -> FloatArray:
        """The products of rows. Any thread may call it."""
        found = np.empty((len(x), self.shape[0]), np.float32)
        with self._lock:
            for start in range(0, len(x), _ROWS):
                rows = np.ascontiguousarray(x[start : start + _ROWS], np.float32)
                found[start : start + _ROWS] = self._program(rows_batch(rows)).numpy()
        return found
