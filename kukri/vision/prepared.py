"""Pictures that have been decoded and prepared: those of a conversation come again with each turn."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from kukri.vision.decode import Picture, decode
from kukri.vision.image import ImageInput

if TYPE_CHECKING:
    from kukri.vision.processors.processor import ImageProcessor

_MAX_BYTES = 128 << 20  # a picture of four million pixels takes 48 MiB


class PreparedImages:
    """What processors made of files, by their bytes, the least recently used forgotten first.

    A photo of 12 megapixels takes a third of a second to decode and resize, as long as many encoders take.
    For several threads.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, picture: Picture, processor: ImageProcessor, param: str) -> ImageInput:
        """A picture as the processor makes it; one in bytes is kept. Raises what both raise."""
        if not isinstance(picture, bytes):
            return processor.prepare(decode(picture, param))
        digest = hashlib.sha256(repr(processor).encode())
        digest.update(picture)
        key = digest.digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = processor.prepare(decode(picture, param))
        with self._lock:
            if key not in self._kept:
                self._n_bytes += made.pixels.nbytes
            self._kept[key] = made
            while self._n_bytes > self._max_bytes:
                self._n_bytes -= self._kept.popitem(last=False)[1].pixels.nbytes
        return made
