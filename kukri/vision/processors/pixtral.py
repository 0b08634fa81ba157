"""Pixtral, Mistral Small 3.1, Ministral 3, LightOnOCR: a bounded longest edge, in proportion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BICUBIC, Scale, patches, resized
from kukri.vision.processors.processor import (
    CLIP_MEAN,
    CLIP_STD,
    LOW_SIDE,
    ImageProcessor,
    filter_of,
    integer,
    size_of,
    too_few,
)


@dataclass(frozen=True)
class PixtralProcessor(ImageProcessor):
    """Sides are at most `longest_edge`. A token is `merge` x `merge` patches, and each row of tokens ends."""

    placeholder: ClassVar[str] = "[IMG]"
    token: ClassVar[str] = "[IMG]"
    patch: int
    merge: int
    longest_edge: int
    resample: int
    scale: Scale

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        vision = model.get("vision_config") or {}
        if stated.get("do_center_crop"):  # transformers counts tokens of the picture before it is cropped
            raise FormatError(
                "'do_center_crop' of the image processor is not supported: crop pictures before"
            )
        return cls(
            patch=integer(processor, "patch_size", integer(vision, "patch_size", 16)),
            merge=integer(processor, "spatial_merge_size", integer(model, "spatial_merge_size", 1), 64),
            longest_edge=integer(size_of(stated, "size"), "longest_edge", 1024),
            resample=filter_of(stated, BICUBIC),
            scale=Scale.of(stated, CLIP_MEAN, CLIP_STD),
        )

    def prepare(self, image: ByteArray) -> ImageInput:
        """Patches float32 [n, 3 * patch * patch], row by row; (1, rows, columns)."""
        side = self.patch * self.merge
        height, width = self._size(*image.shape[:2])
        planes = self.scale.planes(resized(image, height, width, self.resample))
        grid = (1, height // self.patch, width // self.patch)
        return self.made(image, patches(planes, self.patch), grid, height * width // side**2)

    def text(self, image: ImageInput) -> str:
        """Return rows of tokens. A break token follows each row, and the end token follows the last."""
        _, rows, columns = image.grid
        row = self.token * (columns // self.merge)
        return "[IMG_BREAK]".join([row] * (rows // self.merge)) + "[IMG_END]"

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Low: no side above 512. High: as the checkpoint says."""
        return replace(self, longest_edge=min(self.longest_edge, LOW_SIDE)) if detail == "low" else self

    def with_tokens(self, n_tokens: int) -> Self:
        """Return a processor whose sides are at most the side of a square of `n_tokens` tokens."""
        side = math.isqrt(n_tokens)
        if side < 1:
            raise too_few(1, n_tokens)
        return replace(self, longest_edge=min(self.longest_edge, side * self.patch * self.merge))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        side = self.patch * self.merge
        return ((max(height, 1) - 1) // side + 1) * side, ((max(width, 1) - 1) // side + 1) * side


class LightOnOcrProcessor(PixtralProcessor):
    """The same pictures, whose tokens no others stand between."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    token: ClassVar[str] = "<|image_pad|>"

    def text(self, image: ImageInput) -> str:
        """A token for each row of embeddings."""
        return self.token * image.n_tokens
