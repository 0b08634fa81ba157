"""What Gemma 4's encoder shares with the layer that replaces it in 12B: places, and the projector."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.kernels.weight_handles import Vector
from kukri.models.layers import Linear
from kukri.models.weights import WeightSource
from kukri.quant.blocks import dequantize
from kukri.vision.encoders.rotated import RotatedEncoder
from kukri.vision.image import ImageInput


class Gemma4Rows(RotatedEncoder):
    """A patch has the sum of the learned embeddings of its column and of its row. Rows are normed and
    multiplied. Files hold the tables of columns and rows along axis `tables_axis`.
    """

    by_rows, adds_places, tables_axis = True, True, 0

    def take_ends(self, source: WeightSource) -> None:
        """Takes the embeddings of places, and the projector."""
        d_model, n = self.config.encoder.d_model, self.config.encoder.n_positions
        first, second = (2, n) if self.tables_axis == 0 else (n, 2)
        table = source.matrix("model.embed_positions.weight", (first, second * d_model))
        self._type = table.type
        self._columns, self._rows = np.moveaxis(table.data.reshape(first, second, -1), self.tables_axis, 0)
        self._ones = Vector(np.ones(d_model, np.float32))
        self.projector = Linear(source, ["projector"], (self.config.d_text,), d_model)

    def check(self, image: ImageInput) -> None:
        super().check(image)
        config, most = self.config, self.config.encoder.n_positions
        if max(image.grid) > most:
            raise RequestError.of("images", f"must have at most {most} patches a side, not {image.grid}")
        if config.attends_both_ways and image.n_tokens > config.most_run_rows:
            raise RequestError.of(
                "images",
                f"must have at most {config.most_run_rows} tokens each, not {image.n_tokens}: send "
                "'image_tokens'",
            )

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Return the patches, each followed by the embeddings of its place."""
        return np.concatenate([patches, self.places(grid)], axis=1)

    def places(self, grid: tuple[int, int]) -> FloatArray:
        """The embeddings of the places of a grid, row by row [T, D]."""
        tables = zip((self._rows, self._columns), grid)
        rows, columns = (dequantize(np.ascontiguousarray(of[:n]), self._type) for of, n in tables)
        return (columns[None] + rows[:, None]).reshape(grid[0] * grid[1], -1)

    def project(self, ops: Any, batch: Any) -> Tensor:
        encoder = self.config.encoder
        x = ops.rms_norm(ops.activations(batch, encoder.d_model), self._ones, encoder.norm_eps)
        return self.projector(ops, x)
