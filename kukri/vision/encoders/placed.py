"""Encoders of images of any proportions with a square of learned places, resized to each image's grid."""

from __future__ import annotations

from math import isqrt
from typing import Any, Literal

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.models.layers import Embedding
from kukri.models.weights import WeightSource
from kukri.quant.blocks import dequantize
from kukri.vision.config import VisionConfig
from kukri.vision.encoders.rotated import RotatedEncoder

Aligned = Literal["corners", "centres"]


class PlacedEncoder(RotatedEncoder):
    """The encoder without its projector."""

    adds_places = True
    aligned: Aligned  # see `between`

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        n, width = config.encoder.n_positions, config.encoder.d_model
        learned = Embedding(source, "model.embed_positions", n, width).weight
        self.learned: FloatArray = dequantize(learned.data, learned.type).reshape(isqrt(n), isqrt(n), -1)

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        return np.concatenate([patches, self.places(grid)], axis=1)

    def places(self, grid: tuple[int, int]) -> FloatArray:
        """The learned places of a grid's patches, in their order [T, D]."""
        rows, columns = self.places_of(grid)
        found: FloatArray = self.resized(grid)[rows, columns]
        return found

    def resized(self, grid: tuple[int, int]) -> FloatArray:
        """The learned places resized to a grid [height, width, D]."""
        return between(self.learned, grid, self.aligned)


def between(grid: FloatArray, shape: tuple[int, int], aligned: Aligned) -> FloatArray:
    """Numbers [height, width, D] of a grid at the places of another, bilinearly.

    Both grids' corners are the centres of their first and last cells, or the cells' own corners.
    """
    (rows, row_shares), (columns, column_shares) = (
        _taps(n, size, aligned) for n, size in zip(grid.shape[:2], shape)
    )
    found = np.zeros((*shape, grid.shape[2]), np.float32)
    for y, down in zip(rows, row_shares):
        for x, along in zip(columns, column_shares):
            found += grid[y[:, None], x] * (down[:, None] * along)[..., None]
    return found


def _taps(n: int, size: int, aligned: Aligned) -> tuple[Any, Any]:
    """The two of `n` numbers between which each of `size` lies, and their shares: [2, size] each."""
    places = np.arange(size, dtype=np.float32)
    if aligned == "corners":
        places = places * np.float32(n - 1) / np.float32(max(size - 1, 1))
    else:
        half = np.float32(0.5)
        places = (places + half) * np.float32(n) / np.float32(size) - half
    first = np.floor(places)
    indices = np.stack([first, first + 1]).astype(np.int32).clip(0, n - 1)
    return indices, np.stack([1 - (places - first), places - first]).astype(np.float32)


def averaged(grid: FloatArray, shape: tuple[int, int]) -> FloatArray:
    """Numbers [height, width, D] of a grid, resized to another by antialiased bilinear interpolation."""
    rows, columns = (_weights(n, size) for n, size in zip(grid.shape[:2], shape))
    wide: FloatArray = np.einsum("xw,hwd->hxd", columns, grid)
    found: FloatArray = np.einsum("yh,hxd->yxd", rows, wide)
    return found


def _weights(n: int, size: int) -> FloatArray:
    """What each of `n` numbers adds to each of `size`: float32 [size, n], rows with the sum 1."""
    scale = n / size
    centres = (np.arange(size) + 0.5) * scale
    distances = (np.arange(n) + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.maximum(1 - np.abs(distances), 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)
