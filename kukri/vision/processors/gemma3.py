"""Gemma 3: every picture becomes a square of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from kukri.dataclass import dataclass
from kukri.errors import FormatError
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BILINEAR, Scale, resized
from kukri.vision.processors.processor import HALVES, ImageProcessor, filter_of, integer, size_of, too_few


@dataclass(frozen=True)
class Gemma3Processor(ImageProcessor):
    """`height` x `width` pixels, `n_tokens` tokens, without crops (pan and scan is off by default)."""

    placeholder: ClassVar[str] = "<start_of_image>"
    token: ClassVar[str] = "<image_soft_token>"
    height: int
    width: int
    n_tokens: int
    resample: int
    scale: Scale

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        if stated.get("do_pan_and_scan"):
            raise FormatError("an image processor that crops (do_pan_and_scan) is not supported")
        size = size_of(stated, "size")
        return cls(
            height=integer(size, "height", 896),
            width=integer(size, "width", 896),
            n_tokens=integer(processor, "image_seq_length", integer(model, "mm_tokens_per_image", 256)),
            resample=filter_of(stated, BILINEAR),
            scale=Scale.of(stated, HALVES, HALVES),
        )

    def prepare(self, image: ByteArray) -> ImageInput:
        """One tile float32 [1, 3, height, width]."""
        planes = self.scale.planes(resized(image, self.height, self.width, self.resample))
        return self.made(image, planes[None], (0, 0), self.n_tokens)

    def text(self, image: ImageInput) -> str:
        """Return the image tokens between a token of the beginning and a token of the end, on a line."""
        return f"\n\n{self.placeholder}{self.token * image.n_tokens}<end_of_image>\n\n"

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """There is one size."""
        return self

    def with_tokens(self, n_tokens: int) -> Self:
        """There is one size."""
        if n_tokens < self.n_tokens:
            raise too_few(self.n_tokens, n_tokens)
        return self
