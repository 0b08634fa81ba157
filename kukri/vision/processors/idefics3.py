"""Idefics3, SmolVLM, SmolDocling, Granite-Docling: tiles of a large picture, row by row, then the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import LANCZOS, Scale, resized, tiles
from kukri.vision.processors.processor import HALVES, ImageProcessor, filter_of, integer, size_of, too_few

_LONGEST = 4096  # pixels a side, whatever the configuration says


@dataclass(frozen=True)
class Idefics3Processor(ImageProcessor):
    """The longest edge becomes `longest_edge`, both sides multiples of `tile`: then it is cut into tiles."""

    placeholder: ClassVar[str] = "<image>"
    token: ClassVar[str] = "<image>"
    longest_edge: int
    tile: int
    tokens_per_tile: int
    splits: bool
    resample: int
    scale: Scale

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        vision = model.get("vision_config") or {}
        edge = integer(size_of(stated, "max_image_size"), "longest_edge", 364)
        patches = integer(vision, "image_size", edge) // integer(vision, "patch_size", 16)
        rows = patches // integer(model, "scale_factor", 2)
        return cls(
            longest_edge=integer(size_of(stated, "size"), "longest_edge", 4 * edge),
            tile=edge,
            tokens_per_tile=integer(processor, "image_seq_len", max(rows * rows, 1)),
            splits=stated.get("do_image_splitting", True) is not False,
            resample=filter_of(stated, LANCZOS),
            scale=Scale.of(stated, HALVES, HALVES),
        )

    def prepare(self, image: ByteArray) -> ImageInput:
        """Tiles float32 [n_tiles, 3, tile, tile], the last of which shows the whole; (rows, columns)."""
        height, width = self._first_size(*image.shape[:2])
        small = resized(image, height, width, self.resample)
        cut, grid = [], (0, 0)
        if self.splits:
            height, width = self._tiled_size(height, width)
            small = resized(small, height, width, self.resample)
            grid = (height // self.tile, width // self.tile)
            if grid != (1, 1):
                cut = tiles(small, self.tile, self.tile)
        whole = resized(small, self.tile, self.tile, self.resample)
        planes = np.stack([self.scale.planes(tile) for tile in (*cut, whole)])
        return self.made(image, planes, grid if cut else (0, 0), len(planes) * self.tokens_per_tile)

    def text(self, image: ImageInput) -> str:
        """Return the tokens of tiles with their places, a line for each row of tiles, and of the whole."""
        rows, columns = image.grid
        around, run = "<fake_token_around_image>", self.token * self.tokens_per_tile
        lines = [
            "".join(f"{around}<row_{r}_col_{c}>{run}" for c in range(1, columns + 1)) + "\n"
            for r in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{around}<global-img>{run}{around}"

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Low: only the whole. High: tiles."""
        return replace(self, splits=detail == "high")

    def with_tokens(self, n_tokens: int) -> Self:
        """Shorter edges, for fewer tiles."""
        most = n_tokens // self.tokens_per_tile
        if most < 1:
            raise too_few(self.tokens_per_tile, n_tokens)
        side = math.isqrt(most - 1)  # a square of side * side tiles, and the whole image
        if not self.splits or side < 2:
            return replace(self, splits=False)
        return replace(self, longest_edge=min(self.longest_edge, side * self.tile))

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """The longest edge made `longest_edge`, the other even."""
        ratio, edge = width / height, self.longest_edge
        if width >= height:
            short = int(edge / ratio)
            height, width = short + short % 2, edge
        else:
            short = int(edge * ratio)
            height, width = edge, short + short % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _LONGEST:
            height, width = int(_LONGEST / ratio), _LONGEST
        elif height > width and height > _LONGEST:
            height, width = _LONGEST, int(_LONGEST * ratio)
        return max(height, 1), max(width, 1)

    def _tiled_size(self, height: int, width: int) -> tuple[int, int]:
        """Both sides made multiples of a tile's."""
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return height, width
