"""LFM2-VL: a picture in its proportions, and if that is too large, tiles of it before a small one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BILINEAR, Scale, patches, resized, tiles
from kukri.vision.processors.processor import (
    HALVES,
    ImageProcessor,
    above_0,
    filter_of,
    integer,
    too_few,
    within_pixels,
)

_MAX_TILES = 64


@dataclass(frozen=True)
class Lfm2VlProcessor(ImageProcessor):
    """From `min_tokens` to `max_tokens`; above `tolerance` times that, `min_tiles` to `max_tiles` tiles."""

    placeholder: ClassVar[str] = "<image>"
    token: ClassVar[str] = "<image>"
    patch: int
    merge: int
    min_tokens: int
    max_tokens: int
    splits: bool
    tile: int
    min_tiles: int
    max_tiles: int
    has_thumbnail: bool
    has_marks: bool
    tolerance: float
    resample: int
    scale: Scale

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        made = cls(
            patch=integer(stated, "encoder_patch_size", 16),
            merge=integer(stated, "downsample_factor", 2, 64),
            min_tokens=integer(stated, "min_image_tokens", 64),
            max_tokens=integer(stated, "max_image_tokens", 256),
            splits=stated.get("do_image_splitting", True) is not False,
            tile=integer(stated, "tile_size", 512),
            min_tiles=integer(stated, "min_tiles", 2, _MAX_TILES),
            max_tiles=integer(stated, "max_tiles", 10, _MAX_TILES),
            has_thumbnail=stated.get("use_thumbnail", True) is not False,
            has_marks=processor.get("use_image_special_tokens", True) is not False,
            tolerance=above_0(stated, "max_pixels_tolerance", 2.0),
            resample=filter_of(stated, BILINEAR),
            scale=Scale.of(stated, HALVES, HALVES),
        )
        if made.min_tiles > made.max_tiles or made.tile % made.patch or made.min_tokens > made.max_tokens:
            raise FormatError("the image processor's bounds of tiles and tokens must fit together")
        return made

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of a tile."""
        return math.ceil(self.tile // self.patch / self.merge) ** 2

    def prepare(self, image: ByteArray) -> ImageInput:
        """Patches float32 [n, patch * patch * 3], row by row, colour last: tiles, then the small picture.

        The grid is (rows, columns, height, width): of tiles, (1, 1) if the picture is not cut, and of the
        small picture in patches, (0, 0) if there is none besides the tiles.
        """
        side, area = self.patch * self.merge, (self.patch * self.merge) ** 2
        height, width = image.shape[:2]
        tall, wide = (max(self.patch, round(x / side) * side) for x in (height, width))
        rows, columns, parts = 1, 1, []
        if self.splits and tall * wide > self.max_tokens * area * self.tolerance:
            rows, columns = self._tile_grid(height, width)
            large = resized(image, rows * self.tile, columns * self.tile, self.resample)
            parts = tiles(large, self.tile, self.tile)
        grid, n_tokens = (rows, columns, 0, 0), len(parts) * self.tokens_per_tile
        if not parts or (self.has_thumbnail and len(parts) > 1):
            height, width = self._whole_size(height, width)
            parts.append(resized(image, height, width, self.resample))
            grid = (rows, columns, height // self.patch, width // self.patch)
            n_tokens += math.ceil(grid[2] / self.merge) * math.ceil(grid[3] / self.merge)
        cut = [patches(self.scale.planes(part), self.patch, colour_last=True) for part in parts]
        return self.made(image, np.concatenate(cut), grid, n_tokens)

    def text(self, image: ImageInput) -> str:
        """Each tile with its place, and the small picture."""
        rows, columns, *_ = image.grid
        n_tiles = rows * columns if rows * columns > 1 else 0
        n_small = image.n_tokens - n_tiles * self.tokens_per_tile
        pieces = []
        for i in range(n_tiles):
            mark = f"<|img_row_{i // columns + 1}_col_{i % columns + 1}|>"
            pieces.append(self._marked(mark) + self.token * self.tokens_per_tile)
        if n_small:
            pieces.append(self._marked("<|img_thumbnail|>" if n_tiles else "") + self.token * n_small)
        return self._marked("<|image_start|>") + "".join(pieces) + self._marked("<|image_end|>")

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Low: no tiles. High: tiles."""
        return replace(self, splits=detail == "high")

    def with_tokens(self, n_tokens: int) -> Self:
        """Fewer tiles, or none and a smaller picture."""
        if n_tokens < self.min_tokens:
            raise too_few(self.min_tokens, n_tokens)
        n_tiles = (n_tokens - self.max_tokens * self.has_thumbnail) // self.tokens_per_tile
        if self.splits and n_tiles >= self.min_tiles:
            return replace(self, max_tiles=min(self.max_tiles, n_tiles))
        return replace(self, splits=False, max_tokens=min(self.max_tokens, n_tokens))

    def _marked(self, text: str) -> str:
        return text if self.has_marks else ""

    def _whole_size(self, height: int, width: int) -> tuple[int, int]:
        """Sides of the whole picture: multiples of a token's, within the bounds of tokens."""
        side = self.patch * self.merge
        area = side * side
        tall, wide = (max(side, round(x / side) * side) for x in (height, width))
        if self.min_tokens * area <= tall * wide <= self.max_tokens * area:
            return tall, wide
        return within_pixels(height, width, side, self.min_tokens * area, self.max_tokens * area)

    def _tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, in proportions next to the picture's; of two such, by its area."""
        least, most = self.min_tiles, self.max_tiles
        shapes = [
            (columns, rows)
            for n in range(least, most + 1)
            for columns in range(1, n + 1)
            for rows in range(1, n + 1)
            if least <= columns * rows <= most
        ]
        # shapes of as many tiles in the order of a set made like transformers' own: it decides ties
        shapes = sorted(set(shapes), key=lambda shape: shape[0] * shape[1])
        best, nearest = (1, 1), math.inf
        for columns, rows in shapes:
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.tile**2 * columns * rows
            if distance < nearest or (distance == nearest and is_filled):
                best, nearest = (columns, rows), distance
        return best[1], best[0]
