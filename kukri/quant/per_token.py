"""Int4 dynamic: Q4_0 weights times int8 activations of one scale and zero point a token. The definition.

The scheme of KleidiAI's qai8dxp x qsi4c32p kernels and of PyTorch's dynamic 4-bit matmul: a token's
activations lie on 256 steps from its least to its largest value, 0 always among them, and 32 weights share a
scale. As

    sum of d (w - 8) scale (q - zero)  =  scale * sum of d (w - 8) q  -  scale * zero * sum of d (w - 8)

the zero point costs one product with the sum of a row's weights, which is known beforehand. kukri's own form,
a scale for each 32 inputs and no zero point, rounds more finely; `python -m benchmarks.int4` compares them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kukri.quant.blocks import ByteArray, FloatArray, dequantize
from kukri.quant.types import QUANT_TYPES

ACTIVATIONS_KEY = "kukri.activations"  # marks a GGUF file whose Q4_0 matrices run this way
PER_TOKEN = "per-token"  # the value of the key, and of a recipe's `activations`

_ROWS = 256  # summed at a time


def quantize_tokens(x: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray, FloatArray]:
    """float32 [T, n] -> int8 [T, n], scale [T], zero [T] (whole numbers): x is about scale * (int8 - zero).

    A row that holds NaN or an infinity has the scale NaN.
    """
    least, largest = x.min(axis=1, initial=0), x.max(axis=1, initial=0)
    with np.errstate(all="ignore"):
        span = np.where(np.isfinite(x).all(axis=1), largest - least, np.float32(np.nan)).astype(np.float64)
        scale = (span * (1 / 255)).astype(np.float32)
        inverse = np.where(span > 1e-35, 255 / span, span * 0).astype(np.float32)
        zero = np.rint((-128 - (least * inverse).astype(np.float64)).astype(np.float32))
        q = np.rint(x * inverse[:, None]) + zero[:, None]
        return np.nan_to_num(q.clip(-128, 127)).astype(np.int8), scale, zero


def linear_per_token(x: FloatArray, rows: ByteArray) -> npt.NDArray[np.float64]:
    """x [T, in], quantized, times Q4_0 rows (uint8 [out, row_bytes]) transposed -> float64 [T, out]."""
    q, scale, zero = quantize_tokens(x)
    weights = dequantize(rows, QUANT_TYPES["Q4_0"]).astype(np.float64)
    products: npt.NDArray[np.float64] = (q.astype(np.float64) - zero[:, None]) @ weights.T
    return products * scale[:, None]


def row_sums(rows: ByteArray) -> FloatArray:
    """The sum of each row's weights, Q4_0 uint8 [out, row_bytes] -> float32 [out]."""
    parts = [
        dequantize(rows[start : start + _ROWS], QUANT_TYPES["Q4_0"]).sum(axis=1, dtype=np.float64)
        for start in range(0, len(rows), _ROWS)
    ]
    return np.concatenate([*parts, np.zeros(0)]).astype(np.float32)
