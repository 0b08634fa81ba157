"""Matrices of BitNet: ternary rows as files pack them, and rows that are rounded to ternary ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kukri.errors import FormatError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.quantize import quantize
from kukri.quant.blocks import ByteArray
from kukri.quant.types import QUANT_TYPES, QuantType

PER_BYTE = 4  # rows of a matrix in one of bytes


def ternary_rows(packed: ByteArray, scale: float, path: Path, name: str) -> tuple[ByteArray, QuantType]:
    """Rows of -scale, 0 and scale from bytes [out / 4, in]: quarters of the rows lie in pairs of bits.

    Raises FormatError for a pair of bits that is not one of the three.
    """
    parts = [(packed >> 2 * i) & 3 for i in range(PER_BYTE)]
    if any((part == 3).any() for part in parts):
        raise FormatError("must hold ternary weights", path=path, tensor=name)
    return _stored(np.concatenate(parts).astype(np.float32) - 1, scale)


def rounded_rows(weights: FloatArray) -> tuple[ByteArray, QuantType]:
    """Rows of -d, 0 and d next to the weights [out, in], whose mean magnitude is d."""
    scale = max(float(np.abs(weights).mean()), 1e-5)
    return _stored(np.rint(weights / np.float32(scale)).clip(-1, 1), scale)


def _stored(signs: FloatArray, scale: float) -> tuple[ByteArray, QuantType]:
    """Rows of 2 bits a weight, or floats if they are no whole blocks."""
    packed = QUANT_TYPES["TQ2_0"]
    kind = QUANT_TYPES["F32"] if signs.shape[1] % packed.block_size else packed
    return quantize(signs * np.float32(scale), kind), kind
