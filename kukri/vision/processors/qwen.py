"""Qwen2-VL to Qwen3.5, and PaddleOCR-VL and LFM3-VL, which do the same: sides within a budget of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BICUBIC, Scale, resized, too_narrow
from kukri.vision.processors.processor import (
    CLIP_MEAN,
    CLIP_STD,
    LOW_SIDE,
    ImageProcessor,
    filter_of,
    integer,
    size_of,
    too_few,
    within_pixels,
)

_LONGEST_TO_SHORTEST = 200
_MAX_PIXELS = 1 << 26


@dataclass(frozen=True)
class QwenProcessor(ImageProcessor):
    """Between `min_pixels` and `max_pixels`, in patches, `merge` x `merge` of which are a token."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    token: ClassVar[str] = "<|image_pad|>"
    around: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    class_sides: ClassVar[tuple[int, int, int]] = (56 * 56, 28 * 28 * 1280, 2)  # if a file states none
    widens: ClassVar[bool] = False
    patch: int
    merge: int
    n_frames: int  # a still image is repeated to this many frames
    min_pixels: int
    max_pixels: int
    resample: int
    scale: Scale

    @property
    def written(self) -> str:
        """The placeholder between the tokens that templates write around it."""
        return self.around[0] + self.placeholder + self.around[1]

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """The processor of a checkpoint. `min_pixels` and `max_pixels` win over `size`."""
        size, (own_least, own_most, n_frames) = size_of(stated, "size"), cls.class_sides
        least = integer(
            size, "shortest_edge", integer(size, "min_pixels", own_least, _MAX_PIXELS), _MAX_PIXELS
        )
        most = integer(size, "longest_edge", integer(size, "max_pixels", own_most, _MAX_PIXELS), _MAX_PIXELS)
        made = cls(
            patch=integer(stated, "patch_size", 14),
            merge=integer(stated, "merge_size", 2, 64),
            n_frames=integer(stated, "temporal_patch_size", n_frames, 64),
            min_pixels=integer(stated, "min_pixels", least, _MAX_PIXELS),
            max_pixels=integer(stated, "max_pixels", most, _MAX_PIXELS),
            resample=filter_of(stated, BICUBIC),
            scale=Scale.of(stated, CLIP_MEAN, CLIP_STD),
        )
        if made.min_pixels > made.max_pixels:
            raise FormatError("'min_pixels' of the image processor must be at most 'max_pixels'")
        return made

    def prepare(self, image: ByteArray) -> ImageInput:
        """Patches float32 [n, 3 * n_frames * patch * patch], token by token; (1, rows, columns)."""
        height, width, side = *image.shape[:2], self.patch * self.merge
        if self.widens and height < side:
            height, width = side, round(width * side / height)
        if self.widens and width < side:
            height, width = round(height * side / width), side
        if max(height, width) / min(height, width) > _LONGEST_TO_SHORTEST:
            raise too_narrow(image.shape[0], image.shape[1], _LONGEST_TO_SHORTEST)
        size, merge = self.patch, self.merge
        height, width = within_pixels(height, width, side, self.min_pixels, self.max_pixels)
        planes = self.scale.planes(resized(image, height, width, self.resample))
        cut = planes.reshape(3, height // side, merge, size, width // side, merge, size)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        cut = np.repeat(cut, self.n_frames, axis=5)
        n_patches = height * width // size**2
        grid = (1, height // size, width // size)
        return self.made(image, cut.reshape(n_patches, -1), grid, n_patches // merge**2)

    def text(self, image: ImageInput) -> str:
        """The tokens; those around them are the template's."""
        return self.token * image.n_tokens

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Low: no more pixels than a square of 512. High: as the checkpoint says."""
        return self._within(LOW_SIDE**2) if detail == "low" else self

    def with_tokens(self, n_tokens: int) -> Self:
        """Return a processor for at most `n_tokens` tokens, which may be more than the checkpoint says."""
        least = max(self.min_pixels // (self.patch * self.merge) ** 2, 1)
        if n_tokens < least:
            raise too_few(least, n_tokens)
        return replace(self, max_pixels=n_tokens * (self.patch * self.merge) ** 2)

    def _within(self, n_pixels: int) -> Self:
        return replace(self, max_pixels=max(min(self.max_pixels, n_pixels), self.min_pixels))


class PaddleOcrProcessor(QwenProcessor):
    """PaddleOCR-VL's: a picture is no film, and one narrower than a token is first made as wide."""

    placeholder = token = "<|IMAGE_PLACEHOLDER|>"
    around = ("<|IMAGE_START|>", "<|IMAGE_END|>")
    class_sides = (384 * 384, 1536 * 1536, 1)
    widens = True


class Lfm3VlProcessor(QwenProcessor):
    """LFM3-VL's, with a token of its own."""

    placeholder = token = "<|image|>"
