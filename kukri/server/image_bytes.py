"""Counts the bytes of images in a body while it arrives, before anything of it is parsed."""

from __future__ import annotations

import re

_CHARACTERS = rb"[A-Za-z0-9+/=_\\-]*"  # base64's letters; some writers of JSON put a \ before a /
# how PNG, JPEG, GIF, WebP and BMP begin in base64
_BEGINNING = re.compile(rb"(?:iVBORw0K|\\?/9j\\?/|R0lGOD|UklGR|Qk[0-9])" + _CHARACTERS)
_REST = re.compile(_CHARACTERS)
_LONGEST = 8  # bytes of a beginning


class ImageBytes:
    """The images in base64 of one body, given piece by piece."""

    def __init__(self) -> None:
        self._tail = b""  # the end of the last piece, in which an image may begin
        self._is_inside = False  # the last piece ended within an image

    def count(self, piece: bytes) -> int:
        """How many bytes of the next piece belong to images, give or take a few at its ends."""
        n_bytes, start = 0, 0
        if self._is_inside:
            found = _REST.match(piece)
            start = n_bytes = 0 if found is None else found.end()
            if start == len(piece):
                return n_bytes
        else:
            piece = self._tail + piece
        self._is_inside = False
        for image in _BEGINNING.finditer(piece, start):
            n_bytes += len(image[0])
            self._is_inside = image.end() == len(piece)
        self._tail = b"" if self._is_inside else piece[max(len(piece) - _LONGEST + 1, start) :]
        return n_bytes
