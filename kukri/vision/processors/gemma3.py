"""Gemma 3: every picture becomes a square of one size, and so do its crops, if there are some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BILINEAR, Scale, resized
from kukri.vision.processors.processor import (
    HALVES,
    ImageProcessor,
    above_0,
    filter_of,
    integer,
    size_of,
    too_few,
)

_MAX_CROPS = 64


@dataclass(frozen=True)
class Gemma3Processor(ImageProcessor):
    """`height` x `width` pixels and `n_tokens` tokens for the whole picture, and for each of its crops.

    Pan and scan: a picture with one side at least `crop_ratio` times the other is cut into up to `most_crops`
    with sides of at least `crop_side` pixels. `most_crops` is 0 unless the checkpoint crops.
    """

    placeholder: ClassVar[str] = "<start_of_image>"
    token: ClassVar[str] = "<image_soft_token>"
    height: int
    width: int
    n_tokens: int
    resample: int
    scale: Scale
    most_crops: int
    crop_side: int
    crop_ratio: float

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        size, most = size_of(stated, "size"), integer(stated, "pan_and_scan_max_num_crops", 4, _MAX_CROPS)
        return cls(
            height=integer(size, "height", 896),
            width=integer(size, "width", 896),
            n_tokens=integer(processor, "image_seq_length", integer(model, "mm_tokens_per_image", 256)),
            resample=filter_of(stated, BILINEAR),
            scale=Scale.of(stated, HALVES, HALVES),
            most_crops=most if stated.get("do_pan_and_scan") else 0,
            crop_side=integer(stated, "pan_and_scan_min_crop_size", 256),
            crop_ratio=above_0(stated, "pan_and_scan_min_ratio_to_activate", 1.2),
        )

    def prepare(self, image: ByteArray) -> ImageInput:
        """Tiles float32 [1 + crops, 3, height, width], the whole first; (rows, columns) of the crops."""
        height, width = image.shape[:2]
        length = self._crop_length(height, width)
        starts = range(0, max(height, width), length) if length else range(0)
        is_wide = width >= height
        cut = [image[:, at : at + length] if is_wide else image[at : at + length] for at in starts]
        squares = [resized(part, self.height, self.width, self.resample) for part in (image, *cut)]
        planes = np.stack([self.scale.planes(square) for square in squares])
        grid = (1, len(cut)) if is_wide else (len(cut), 1)
        return self.made(image, planes, grid if cut else (0, 0), len(planes) * self.n_tokens, 0)

    def text(self, image: ImageInput) -> str:
        """Return a tile's tokens between a token of the beginning and a token of the end, on a line.

        Words stand before the whole and before the crops, if there are some.
        """
        tile = f"\n\n{self.placeholder}{self.token * self.n_tokens}<end_of_image>\n\n"
        if len(image.pixels) == 1:
            return tile
        crops = " ".join([tile] * (len(image.pixels) - 1))
        return f"Here is the original image {tile} and here are some crops to help you see better {crops}"

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Low: only the whole. High: crops, if the checkpoint has them."""
        return replace(self, most_crops=0) if detail == "low" else self

    def with_tokens(self, n_tokens: int) -> Self:
        """Fewer crops, or none."""
        if n_tokens < self.n_tokens:
            raise too_few(self.n_tokens, n_tokens)
        most = n_tokens // self.n_tokens - 1
        return replace(self, most_crops=min(self.most_crops, most) if most > 1 else 0)

    def _crop_length(self, height: int, width: int) -> int:
        """Pixels of a crop along the longer side; 0 for no crops."""
        short, long = sorted((height, width))
        if not self.most_crops or long / short < self.crop_ratio:
            return 0
        n = min(max(2, min(long // self.crop_side, math.floor(long / short + 0.5))), self.most_crops)
        length = math.ceil(long / n)
        return length if min(length, short) >= self.crop_side else 0
