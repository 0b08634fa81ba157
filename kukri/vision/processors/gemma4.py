"""Gemma 4: every picture is scaled, also up, to fill a budget of tokens; the encoder pools patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from kukri.dataclass import dataclass, replace
from kukri.kernels.arrays import ByteArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import BICUBIC, Scale, patches, resized
from kukri.vision.processors.processor import ImageProcessor, filter_of, integer, too_few

_BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True)
class Gemma4Processor(ImageProcessor):
    """At most `max_tokens` squares of `pool` x `pool` patches of `patch` x `patch` pixels."""

    placeholder: ClassVar[str] = "<|image|>"
    token: ClassVar[str] = "<|image|>"
    patch: int
    pool: int
    max_tokens: int
    resample: int
    scale: Scale

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        return cls(
            patch=integer(stated, "patch_size", 16),
            pool=integer(stated, "pooling_kernel_size", 3, 64),
            max_tokens=integer(stated, "max_soft_tokens", 280),
            resample=filter_of(stated, BICUBIC),
            scale=Scale.of({"do_normalize": False, **stated}, (0.0,) * 3, (1.0,) * 3),
        )

    def prepare(self, image: ByteArray) -> ImageInput:
        """Patches float32 [n, patch * patch * 3], row by row, colour last; (1, rows, columns)."""
        height, width = self._size(*image.shape[:2])
        planes = self.scale.planes(resized(image, height, width, self.resample))
        grid = (1, height // self.patch, width // self.patch)
        cut = patches(planes, self.patch, colour_last=True)
        return self.made(image, cut, grid, len(cut) // self.pool**2)

    def text(self, image: ImageInput) -> str:
        """The tokens between the beginning and end tokens."""
        return f"<|image>{self.token * image.n_tokens}<image|>"

    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """The least and the largest budget that the model knows."""
        return replace(self, max_tokens=_BUDGETS[0 if detail == "low" else -1])

    def with_tokens(self, n_tokens: int) -> Self:
        """The largest budget that the model knows and that is not above `n_tokens`."""
        fitting = [budget for budget in _BUDGETS if budget <= n_tokens]
        if not fitting:
            raise too_few(_BUDGETS[0], n_tokens)
        return replace(self, max_tokens=fitting[-1])

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The largest sides within the budget, multiples of a token's, in the image's proportions."""
        n_patches, side = self.max_tokens * self.pool**2, self.pool * self.patch
        factor = math.sqrt(n_patches * self.patch**2 / (height * width))
        tall = math.floor(factor * height / side) * side
        wide = math.floor(factor * width / side) * side
        most = self.max_tokens * side
        if tall == 0:
            return side, min(math.floor(width / height) * side, most)
        if wide == 0:
            return min(math.floor(height / width) * side, most), side
        return tall, wide


class Gemma4UnifiedProcessor(Gemma4Processor):
    """Squares of `pool` x `pool` patches are patches themselves: there is no encoder that pools them."""

    @classmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        made = super().of(stated, processor, model)
        return replace(made, patch=made.patch * made.pool, pool=1)
