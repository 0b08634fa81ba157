"""`ImageProcessor`: what each family's processor offers, and what their configurations have in common."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kukri.errors import FormatError, RequestError
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.vision.image import ImageInput
from kukri.vision.pixels import HAMMING

Detail = Literal["auto", "low", "high"]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)  # SigLIP's mean and deviation
LOW_SIDE = 512  # pixels: a picture of low detail has at most the square of this
MAX_SIDE = 1 << 14  # pixels, the largest side that a configuration may ask for
MAX_TOKENS = 1 << 14  # an image's


class ImageProcessor(ABC):
    """Prepares pictures for an encoder, and makes the text that stands for a picture in a prompt.

    Processors are frozen dataclasses of the settings of a checkpoint. `placeholder` is what a chat template
    writes for an image; `token` is the token of which there is one for each row of an image's embeddings.
    """

    placeholder: ClassVar[str]
    token: ClassVar[str]

    @property
    def written(self) -> str:
        """The text to write for an image where no template writes it."""
        return self.placeholder

    @classmethod
    @abstractmethod
    def of(cls, stated: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """The processor of a checkpoint, by its preprocessor_config.json, processor_config.json and
        config.json.

        Raises FormatError on values that no checkpoint has.
        """

    @abstractmethod
    def prepare(self, image: ByteArray) -> ImageInput:
        """A picture, uint8 [H, W, 3], as the encoder reads it. Raises RequestError for sides it cannot."""

    @abstractmethod
    def text(self, image: ImageInput) -> str:
        """Return the text that replaces the placeholder in a prompt: `token` for each row, and its frame."""

    @abstractmethod
    def with_detail(self, detail: Literal["low", "high"]) -> Self:
        """Return a processor for pictures of little detail, or of as much detail as the family has."""

    @abstractmethod
    def with_tokens(self, n_tokens: int) -> Self:
        """Return a processor of images of at most `n_tokens` tokens. Raises RequestError if too few."""

    def budgeted(self, detail: Detail = "auto", image_tokens: int | None = None) -> Self:
        """Return the processor for a request's options; without options this one. Raises RequestError."""
        chosen = self if detail == "auto" else self.with_detail(detail)
        if image_tokens is None:
            return chosen
        if not 1 <= image_tokens <= MAX_TOKENS:
            raise RequestError.of("image_tokens", f"must be from 1 to {MAX_TOKENS}, not {image_tokens}")
        return chosen.with_tokens(image_tokens)

    def made(
        self, image: ByteArray, pixels: FloatArray, grid: tuple[int, ...], n_tokens: int, whole: int = -1
    ) -> ImageInput:
        """Return the input for an image, whose digest covers the image and all settings."""
        if n_tokens > MAX_TOKENS:
            raise RequestError(
                f"the image must become at most {MAX_TOKENS} tokens, not {n_tokens}", param="image"
            )
        digest = hashlib.sha256(f"{self!r} {image.shape}".encode())
        digest.update(np.ascontiguousarray(image).data)
        return ImageInput(pixels, grid, n_tokens, digest.digest(), whole)


def too_few(least: int, n_tokens: int) -> RequestError:
    """Return the error for a token budget below the model's minimum for an image."""
    return RequestError.of(
        "image_tokens", f"must be at least {least} for this image and model, not {n_tokens}"
    )


def integer(stated: Mapping[str, Any], key: str, default: int, most: int = MAX_SIDE) -> int:
    """Return a positive integer of a configuration. Raises FormatError."""
    value = stated.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise FormatError(f"{key!r} of the image processor must be from 1 to {most}, not {str(value)[:50]}")
    return value


def above_0(stated: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of a configuration. Raises FormatError unless it is positive."""
    value = stated.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise FormatError(f"{key!r} of the image processor must be a number above 0, not {str(value)[:50]}")
    return float(value)


def size_of(stated: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A size of a configuration; an integer is both its sides. Raises FormatError."""
    value = stated.get(key)
    if isinstance(value, int):
        return {"height": value, "width": value, "longest_edge": value}
    if value is not None and not isinstance(value, Mapping):
        raise FormatError(f"{key!r} of the image processor must be an object, not {str(value)[:50]}")
    return value or {}


def filter_of(stated: Mapping[str, Any], default: int) -> int:
    """The number of the filter that resizes. Raises FormatError, also if nothing is to be resized."""
    if stated.get("do_resize", True) is False:
        raise FormatError("an image processor that does not resize (do_resize) is not supported")
    value = stated.get("resample")
    value = default if value is None else value
    if value not in range(HAMMING + 1):
        raise FormatError(f"'resample' of the image processor must be from 0 to {HAMMING}, not {value!r}")
    return int(value)


def within_pixels(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return sides near the image's that are multiples of `factor`, with an area of `least` to `most` pixels.

    The order of the operations follows the families' own processors, because a rounding may decide a whole
    row.
    """
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        ratio = math.sqrt((height * width) / most)
        tall = max(factor, math.floor(height / ratio / factor) * factor)
        wide = max(factor, math.floor(width / ratio / factor) * factor)
    elif tall * wide < least:
        ratio = math.sqrt(least / (height * width))
        tall = math.ceil(height * ratio / factor) * factor
        wide = math.ceil(width * ratio / factor) * factor
    return tall, wide
