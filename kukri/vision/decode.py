"""Pictures in bytes, files, arrays and objects of Pillow to pixels: upright, RGB, nothing see-through.

Whatever comes is hostile: its sides are read from its header and checked before memory is taken for its
pixels, a few formats are read and no others, and few pictures are decoded at once.
"""

from __future__ import annotations

import binascii
import os
import re
import threading
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kukri.errors import RequestError, UnsupportedError
from kukri.host.installed import needs_package
from kukri.kernels.arrays import ByteArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50 << 20  # a phone's 50 megapixels
MAX_SIDE = 1 << 16  # pixels
MAX_FILE_BYTES = 64 << 20
_MAX_SCANS = 16  # full-sized pictures that a progressive JPEG may make its reader go through
_AT_ONCE = threading.BoundedSemaphore(2)  # a picture in work takes up to 16 bytes a pixel
_SCAN = b"\xff\xda"
_DATA_URL = re.compile(r"data:([^,]{0,200}),", re.IGNORECASE)
# how Python and C write memory addresses
_ADDRESSES = re.compile(r"<[^<>]*\bat 0x[0-9a-f]+>|(?:at )?0x[0-9a-f]{6,}", re.IGNORECASE)
_LETTERS = bytes.maketrans(b"-_", b"+/")  # from the alphabet of base64 in URLs to the usual alphabet
_SPACES = b" \t\n\r\f\v"
_AT_A_TIME = 1 << 16  # letters that are decoded in one call, which lets no other thread run: a multiple of 4

Picture: TypeAlias = Any  # bytes, a path, a data URL, an image of Pillow, or uint8 [H, W], [H, W, 1 | 3 | 4]


def decode(picture: Picture, param: str = "image") -> ByteArray:
    """The pixels of a picture: uint8 [H, W, 3].

    A path is a `Path` or a str that is not a data URL, so a str must come from this program's user, never
    from a client. The image is turned as its EXIF data says, an animation gives its first frame, and alpha is
    laid on white. Pillow's `convert` converts 16-bit gray and CMYK, as in the processors of transformers.
    Raises RequestError, which names `param`, for anything that is not a picture or is too large, and
    UnsupportedError without Pillow.
    """
    if isinstance(picture, str) and picture[:5].lower() == "data:":
        picture = data_url_bytes(picture, param)
    if isinstance(picture, str | os.PathLike):
        picture = file_bytes(Path(picture), param)
    with _AT_ONCE, _reading(param):
        if isinstance(picture, bytes | bytearray | memoryview):
            return _rgb(_opened(bytes(picture), param), param)
        if isinstance(picture, np.ndarray):
            return _rgb(_of_array(picture, param), param)
        if isinstance(picture, _pillow().Image):
            return _rgb(picture, param)
    raise _error(param, f"an image must be a path, bytes, an array or Pillow's, not {type(picture).__name__}")


def data_url_bytes(url: str, param: str = "image") -> bytes:
    """The bytes of a data URL in base64. Raises RequestError, naming `param`, for any other."""
    head = _DATA_URL.match(url)
    if head is None or not head[1].lower().endswith(";base64"):
        raise _error(param, "a data URL must begin like data:image/png;base64,")
    return base64_bytes(url[head.end() :], param)


def base64_bytes(text: str, param: str = "image") -> bytes:
    """The bytes of base64, with or without line ends and padding. Raises RequestError, naming `param`."""
    try:
        data = text.encode("ascii").translate(_LETTERS, _SPACES).rstrip(b"=")
        data += b"=" * (-len(data) % 4)
        pieces = (data[i : i + _AT_A_TIME] for i in range(0, len(data), _AT_A_TIME))
        data = b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
    except ValueError:
        raise _error(param, "the image must be base64") from None
    if not data:
        raise _error(param, "the image must not be empty")
    return data


def file_bytes(path: Path, param: str = "image") -> bytes:
    """The bytes of a file, and one more if there are too many. Raises RequestError, naming `param`."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _error(param, f"the file {str(path)[:200]!r} cannot be read: {reason}") from None
    return data


def _opened(data: bytes, param: str) -> Image:
    if len(data) > MAX_FILE_BYTES:
        raise _error(param, f"the image must be at most {MAX_FILE_BYTES >> 20} MiB")
    pillow = _pillow()
    try:
        image = pillow.open(BytesIO(data), formats=FORMATS)
    except pillow.UnidentifiedImageError:
        names = ", ".join(FORMATS)
        raise _error(param, f"the image is broken, or its format is not supported: use {names}") from None
    if image.format in ("JPEG", "MPO"):
        _check_scans(image, data, param)
    return cast("Image", image)


def _check_scans(image: Image, data: bytes, param: str) -> None:
    """Refuses a progressive JPEG that is written over and over: a small file could take minutes."""
    if image.width * image.height * data.count(_SCAN) > _MAX_SCANS * MAX_PIXELS:
        raise _error(param, "the image must be a JPEG of fewer scans: save it as a plain one")


def _of_array(array: np.ndarray[Any, Any], param: str) -> Image:
    shape = array.shape[:2] if array.ndim == 3 and array.shape[2] == 1 else array.shape
    if array.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
        raise _error(
            param,
            "an array of an image must be uint8 [height, width] or [height, width, 3 or 4], not "
            f"{array.dtype} {list(array.shape)}",
        )
    _check_size(shape[1], shape[0], param)
    return cast("Image", _pillow().fromarray(np.ascontiguousarray(array.reshape(shape))))


def _rgb(image: Image, param: str) -> ByteArray:
    _check_size(image.width, image.height, param)
    image = _upright(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        image = white
    return np.array(image.convert("RGB"))


def _upright(image: Image) -> Image:
    """The image turned as its EXIF data says; broken data says nothing."""
    from PIL import ImageOps

    image.load()
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception:  # whatever the parser of EXIF raises
        return image
    return image if turned is None else turned


def _check_size(width: int, height: int, param: str) -> None:
    if width < 1 or height < 1:
        raise _error(param, f"the image must have pixels, not {width} x {height}")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise _error(
            param,
            f"the image must have at most {MAX_PIXELS:,} pixels and {MAX_SIDE:,} a side, not {width} x "
            f"{height}: send it smaller",
        )


@contextmanager
def _reading(param: str) -> Iterator[None]:
    """Makes a RequestError of all that Pillow's parsers raise on broken files."""
    try:
        yield
    except (RequestError, UnsupportedError):
        raise
    except Exception as error:
        # a client must not learn where the heap lies
        text = _ADDRESSES.sub("data", " ".join(str(error).split()))[:200] or type(error).__name__
        raise _error(param, f"the image cannot be read: {text}") from error


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedError(needs_package("an image", "pillow", "vision")) from None
    return Image


def _error(param: str, text: str) -> RequestError:
    return RequestError(f"{param}: {text}", param=param, code="invalid_image")
