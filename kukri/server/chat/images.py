"""Images as clients send them: base64, data URLs, and addresses if the server fetches images."""

from __future__ import annotations

from typing import Any

from kukri.calls.image_prompts import url_of
from kukri.errors import RequestError
from kukri.server.chat.image_urls import fetched
from kukri.tokenizer.image_marks import ImagePart
from kukri.vision.decode import base64_bytes, data_url_bytes


class ImageReader:
    """Finds the bytes of an image. With `fetches`, also at a public address (`--image-urls`)."""

    def __init__(self, *, fetches: bool) -> None:
        self._fetches = fetches

    def read(self, image: ImagePart) -> bytes:
        """The bytes, not yet looked at. Raises RequestError for what says none; never opens a file."""
        data: Any = image.part.get("data")
        param = image.param
        if isinstance(data, str):
            is_url = data[:5].lower() == "data:"
            return data_url_bytes(data, param) if is_url else base64_bytes(data, param)
        url = url_of(image)
        if url is None:
            raise RequestError.of(param, "must be base64, as data:image/png;base64,...", code="invalid_image")
        if url[:5].lower() == "data:":
            return data_url_bytes(url, param)
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            if not self._fetches:
                raise RequestError(
                    f"fetching {param!r} is disabled: send a data URL, or start the server with --image-urls",
                    param=param,
                    code="unsupported_content",
                )
            return fetched(url, param)
        raise RequestError.of(param, "must have a data:, http:// or https:// URL", code="invalid_image")
