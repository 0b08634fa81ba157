"""Keeps decoded and prepared pictures, because each turn of a conversation sends them again."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kukri.vision.decode import Picture, decode
from kukri.vision.image import ImageInput
from kukri.vision.recent import Recent

if TYPE_CHECKING:
    from kukri.vision.processors.processor import ImageProcessor

_MAX_BYTES = 128 << 20  # a picture of four million pixels takes 48 MiB


class PreparedImages:
    """What processors made of files, by their bytes: see `Recent`.

    A photo of 12 megapixels takes a third of a second to decode and resize, as long as many encoders take.
    For several threads.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._kept: Recent[ImageInput] = Recent(max_bytes)

    def prepare(self, picture: Picture, processor: ImageProcessor, param: str) -> ImageInput:
        """A picture as the processor makes it; one in bytes is kept. Raises what both raise."""
        if not isinstance(picture, bytes):
            return processor.prepare(decode(picture, param))
        digest = hashlib.sha256(repr(processor).encode())
        digest.update(picture)
        made = self._kept.find(digest.digest())
        if made is None:
            made = processor.prepare(decode(picture, param))
            self._kept.keep(digest.digest(), made, made.pixels.nbytes)
        return made
