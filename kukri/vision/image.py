"""An image ready for its encoder, and a prompt in which images stand: what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import check_spans

DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One picture as the model's processor makes it, ready for the encoder. The arrays are not written to.

    Families of tiles or of a fixed size (Idefics3, SmolVLM, Gemma 3): `pixels` are [n_tiles, 3, height,
    width], in the order in which their embeddings stand in the prompt, and `grid` is (rows, columns) of the
    tiles besides the one that shows all, (0, 0) if that is the only one. Families that pack patches (Qwen,
    LFM2-VL, Pixtral, Gemma 4): [n_patches, values of a patch], in the order of the model's processor, and
    `grid` is (t, h, w) in patches; LFM2-VL's is (rows, columns, h, w): of tiles, (1, 1) for none, and of the
    whole picture after them in patches, (0, 0) for none.
    """

    noun: ClassVar[str] = "image"

    pixels: FloatArray  # float32, normalized
    grid: tuple[int, ...]
    n_tokens: int  # rows of embeddings that it becomes
    digest: bytes  # 32 bytes: hash of the decoded pixels and of all settings of the preprocessing
    whole: int = -1  # the tile that shows all

    def __post_init__(self) -> None:
        """Raises RequestError on an array, a count or a digest that no image can have."""
        if self.pixels.dtype != np.float32 or self.pixels.ndim not in (2, 4) or not len(self.pixels):
            raise RequestError(
                f"an image's pixels must be float32 [n_tiles, 3, height, width] or [n_patches, values], not "
                f"{self.pixels.dtype} {list(self.pixels.shape)}",
                param="images",
            )
        if self.n_tokens < 1 or len(self.digest) != DIGEST_BYTES:
            raise RequestError(
                f"an image must have at least one token and a digest of {DIGEST_BYTES} bytes, not "
                f"{self.n_tokens} and {len(self.digest)}",
                param="images",
            )


class ImageSpan(NamedTuple):
    """A run of placeholder tokens: `n_tokens` of them from index `start` of the prompt's tokens on.

    The tokens take the next rows of embeddings of image number `image`. An image of several tiles has a run
    for each tile, with tokens of text between the runs.
    """

    start: int
    n_tokens: int
    image: int


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images: it goes wherever a prompt of token ids goes, as in `LLM.generate(prompt)`.

    `token_ids` are the ids of the whole prompt, as the model's processor lays it out: text, the family's
    tokens around images and between tiles, and the image token at each place that becomes a row of an image.
    Only `spans` say where these places are, so an image token that a user wrote is text. Raises
    what `check_spans` raises.
    """

    token_ids: Sequence[int]
    images: tuple[ImageInput, ...]
    spans: tuple[ImageSpan, ...]

    def __post_init__(self) -> None:
        """Checks the spans against the tokens and the images."""
        check_spans(self)

    @property
    def inputs(self) -> tuple[ImageInput, ...]:
        """The images."""
        return self.images

    def __len__(self) -> int:
        """Tokens of the prompt, placeholders included."""
        return len(self.token_ids)
