"""Pictures that are decoded and prepared once."""

from __future__ import annotations

import pytest

from benchmarks.pictures import encoded, picture
from kukri.errors import RequestError
from kukri.vision import prepared
from kukri.vision.prepared import PreparedImages
from kukri.vision.processors import image_processor

PROCESSOR = image_processor({"image_processor_type": "Gemma3ImageProcessor", "size": 32}, {}, {})
RED, TALL = encoded(picture(40, 50, 1)), encoded(picture(90, 30, 2))


def test_a_file_is_decoded_once(monkeypatch):
    """Catches a conversation's pictures decoded again with each turn, and one taken for another: of other
    bytes, or prepared by other settings.
    """
    decoded = []
    monkeypatch.setattr(prepared, "decode", lambda *given: decoded.append(given) or real(*given))
    images = PreparedImages()
    first = images.prepare(RED, PROCESSOR, "image")
    assert images.prepare(bytes(bytearray(RED)), PROCESSOR, "image") is first
    assert len(decoded) == 1
    other = images.prepare(TALL, PROCESSOR, "image")
    assert other.digest == PROCESSOR.prepare(real(TALL)).digest
    larger = image_processor({"image_processor_type": "Gemma3ImageProcessor", "size": 64}, {}, {})
    assert images.prepare(RED, larger, "image").pixels.shape[-1] == 64
    assert len(decoded) == 3


def test_the_oldest_are_forgotten(monkeypatch):
    """Catches a server that keeps all it was ever sent, and errors that are kept."""
    monkeypatch.setattr(prepared, "decode", lambda *given: decoded.append(given) or real(*given))
    decoded: list[object] = []
    one = 3 * 32 * 32 * 4  # bytes of pixels
    images = PreparedImages(2 * one)
    for file in (RED, TALL, RED, encoded(picture(20, 20, 3)), RED, TALL):  # TALL is older than RED by then
        images.prepare(file, PROCESSOR, "image")
    assert len(decoded) == 4
    with pytest.raises(RequestError, match=r"there: the image is broken"):
        images.prepare(b"no image", PROCESSOR, "there")
    small = PreparedImages(one - 1)  # no room for any
    assert small.prepare(RED, PROCESSOR, "image").digest == small.prepare(RED, PROCESSOR, "image").digest
    assert small._kept.n_bytes == 0


real = prepared.decode
