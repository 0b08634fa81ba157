"""What processors do with the pixels of a picture: resize, cut, scale, by Pillow and NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import FormatError, RequestError
from kukri.kernels.arrays import ByteArray, FloatArray

NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)  # as Pillow and preprocessor_config.json count


def resized(image: ByteArray, height: int, width: int, resample: int) -> ByteArray:
    """An image uint8 [H, W, 3] as [height, width, 3], by the filter of Pillow of that number."""
    from PIL import Image

    if image.shape[:2] == (height, width):
        return image  # as Pillow does it: a copy
    return np.asarray(Image.fromarray(image).resize((width, height), resample=Image.Resampling(resample)))


def tiles(image: ByteArray, height: int, width: int) -> list[ByteArray]:
    """The tiles of that size of an image, row by row."""
    n_rows, n_columns = image.shape[0] // height, image.shape[1] // width
    return [
        image[r * height : (r + 1) * height, c * width : (c + 1) * width]
        for r in range(n_rows)
        for c in range(n_columns)
    ]


@dataclass(frozen=True)
class Scale:
    """From a byte to the number that the encoder reads: (byte * factor - mean) / std, for each colour."""

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def of(cls, stated: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> Scale:
        """The scale that a configuration states; `mean` and `std` are the family's. Raises FormatError."""
        factor = stated.get("rescale_factor", 1 / 255) if stated.get("do_rescale", True) else 1.0
        mean, std = stated.get("image_mean") or mean, stated.get("image_std") or std
        if stated.get("do_normalize", True) is False:
            mean, std = (0.0,) * 3, (1.0,) * 3
        try:
            mean, std = ([x] * 3 if isinstance(x, int | float) else x for x in (mean, std))
            made = cls(float(factor), tuple(map(float, mean)), tuple(map(float, std)))
        except (TypeError, ValueError):
            raise FormatError("'image_mean', 'image_std' and 'rescale_factor' must be numbers") from None
        if len(made.mean) != 3 or len(made.std) != 3 or not np.all(np.isfinite(made.table())):
            raise FormatError("'image_mean' and 'image_std' must be three numbers each, the latter not 0")
        return made

    def table(self) -> FloatArray:
        """The number of each byte of each colour: float32 [3, 256], rounded as transformers rounds it."""
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (scaled[None, :] - mean[:, None]) / std[:, None]

    def planes(self, image: ByteArray) -> FloatArray:
        """The numbers of an image uint8 [H, W, 3], colour by colour: float32 [3, H, W]."""
        return np.stack([colour[image[..., i]] for i, colour in enumerate(self.table())])


def patches(planes: FloatArray, size: int, *, colour_last: bool = False) -> FloatArray:
    """Patches of `size` x `size` of an image float32 [3, H, W], row by row: [n, 3 * size * size].

    The values of a patch are ordered by colour, row, column, or with `colour_last` by row, column, colour.
    """
    n_rows, n_columns = planes.shape[1] // size, planes.shape[2] // size
    cut = planes.reshape(3, n_rows, size, n_columns, size)
    order = (1, 3, 2, 4, 0) if colour_last else (1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut.transpose(order)).reshape(n_rows * n_columns, -1)


def too_narrow(height: int, width: int, most: int) -> RequestError:
    """Return the error for an image that is more than `most` times as long as it is wide."""
    return RequestError(
        f"the image has {width} x {height} pixels, but must be at most {most} times as long as wide",
        param="image",
        code="invalid_image",
    )
