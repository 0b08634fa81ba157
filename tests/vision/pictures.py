"""Pictures for tests: smooth and noisy, in odd sizes."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

# height, width: square, wide, tall, tiny, a line, exact multiples, one above and below them
SIZES = {
    "photo": (600, 800), "tall": (900, 300), "wide": (200, 1300), "tiny": (1, 1), "small": (20, 30),
    "square": (512, 512), "one above": (513, 511), "large": (1600, 1200), "line": (3, 450),
}  # fmt: skip


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image uint8 [height, width, 3] with slopes, edges and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], -1)
    squares = ((x // 16 + y // 16) % 2 * 120)[..., None]
    noise = rng.integers(0, 60, (height, width, 3))
    return ((slopes + squares + noise) % 256).astype(np.uint8)


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    """A file of an image."""
    made = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = BytesIO()
    made.save(file, kind, **options)
    return file.getvalue()
