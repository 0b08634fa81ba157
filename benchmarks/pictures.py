"""Pictures for tests and benchmarks: smooth and noisy, in odd sizes; odd and hostile files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from kukri.kernels.arrays import ByteArray

# height, width: square, wide, tall, tiny, a line, exact multiples, one above and below them
SIZES = {
    "photo": (600, 800), "tall": (900, 300), "wide": (200, 1300), "tiny": (1, 1), "small": (20, 30),
    "square": (512, 512), "one above": (513, 511), "large": (1600, 1200), "line": (3, 450),
}  # fmt: skip


def picture(height: int, width: int, seed: int = 0) -> ByteArray:
    """An image uint8 [height, width, 3] with slopes, edges and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], -1)
    squares = ((x // 16 + y // 16) % 2 * 120)[..., None]
    noise = rng.integers(0, 60, (height, width, 3))
    made: ByteArray = ((slopes + squares + noise) % 256).astype(np.uint8)
    return made


def encoded(image: ByteArray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A file of an image."""
    made = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = BytesIO()
    made.save(file, kind, **options)
    return file.getvalue()


def a_png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


PHOTO = picture(48, 64)
# an image that no decoder may take memory or time for, made when it is asked for, as some take a while
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "garbage": lambda: bytes(range(256)) * 40,
    "text": lambda: b"not an image",
    "svg": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><rect width='9' height='9'/></svg>",
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "psd": lambda: b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3) + bytes(20),
    "tiff": lambda: encoded(PHOTO, "TIFF"),
    "pdf": lambda: b"%PDF-1.7\n1 0 obj\n",
    "truncated png": lambda: encoded(PHOTO)[:-900],
    "truncated jpeg": lambda: encoded(PHOTO, "JPEG")[:400],
    "truncated webp": lambda: encoded(PHOTO, "WEBP")[:60],
    "a png's header": lambda: a_png(64, 48)[:33],
    "a png without pixels": lambda: a_png(64, 48),
    "a bomb of 60,000 x 60,000": lambda: a_png(60_000, 60_000, bytes(1000)),
    "a line of 2^31": lambda: a_png(2**31 - 1, 1),
    "no width": lambda: a_png(0, 10),
    "a bitmap of 60,000 x 60,000": lambda: b"BM" + struct.pack(
        "<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0
    ),
    "a gif of 65,535 x 65,535": lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
    "a webp of 16,383 x 16,383": lambda: b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10)
    + bytes(4) + (16382).to_bytes(3, "little") * 2 + b"VP8 " + struct.pack("<I", 0),
    "a jpeg of many scans": lambda: encoded(
        np.tile(picture(300, 400), (10, 10, 1)), "JPEG", progressive=True, quality=5
    ) + b"\xff\xda" * 100,
}  # fmt: skip
# what is an image after all
ODD: dict[str, Callable[[], bytes]] = {
    "1 x 1": lambda: encoded(picture(1, 1)),
    "30,000 x 2": lambda: encoded(picture(2, 30_000)),
    "an animation": lambda: encoded(
        Image.fromarray(PHOTO).quantize(), "GIF", save_all=True, append_images=[Image.fromarray(PHOTO[::-1])]
    ),
    "16-bit gray": lambda: encoded(Image.fromarray((np.arange(4096).reshape(64, 64) * 16).astype(np.uint16))),
}
