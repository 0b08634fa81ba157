"""Encoders of images of any proportions, most of whose heads rotate by the row and the column of a patch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.op_set import Tensor
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.models.keys import Keys
from kukri.models.llama import Block
from kukri.models.rope import inverse_frequencies
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig, read_blocks
from kukri.vision.encoder import ImagePart
from kukri.vision.encoders.siglip import PatchEncoder, SiglipAttention, from_squares, squares_of
from kukri.vision.image import ImageInput

MOST_PATCHES = 1 << 15  # patches that are computed at once


class RotatedAttention(SiglipAttention):
    """The first half of a head's frequencies turns by the row, the second by the column.

    Both halves have the frequencies of half a head, or they alternate among the frequencies of a whole head.
    """

    fused_name, out_name = "qkv", "proj"
    takes_turns = False

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        n, d_head = self.spec.d_head // 4, self.spec.d_head
        rope = replace(config.rope, rotary_dim=d_head if self.takes_turns else d_head // 2)
        inverse = inverse_frequencies(rope, 1).tolist()
        by_axis = (inverse[::2], inverse[1::2]) if self.takes_turns else (inverse, inverse)
        self.rope = RopeFrequencies((*by_axis[0], *by_axis[1]), MOST_PATCHES, axes=(0,) * n + (1,) * n)


class RotatedBlock(Block):
    """One layer."""

    attention_type = RotatedAttention
    attention_norm_name, mlp_norm_name, attention_name = "norm1", "norm2", "attn"


class RotatedEncoder(PatchEncoder):
    """An encoder whose rows are the merged states of a square of patches, which `hidden` and `projector`,
    an MLP that subclasses make, project.

    Patches are ordered by the squares that become one row of embeddings, or with `by_rows` row by row.
    """

    hidden: Callable[..., Tensor]
    projector: Callable[..., Tensor]
    by_rows = False
    adds_places = False  # True: learned embeddings of a patch's place stand after its values

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.width = config.merge**2 * config.encoder.d_model

    def encode(self, ops: Any, batch: Any) -> Tensor:
        if not self.adds_places:
            patches = self.patches(ops, ops.activations(batch, self.config.patch_values))
            return self.through_blocks(ops, patches, batch)
        widths = self.config.patch_values, self.config.encoder.d_model
        patches, places = ops.split(ops.activations(batch, sum(widths)), widths)
        return self.through_blocks(ops, ops.add(self.patches(ops, patches), places), batch)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """A square's hidden states side by side."""
        squares = squares_of(hidden, grid, self.config.merge) if self.by_rows else hidden
        return squares.reshape(-1, self.width)

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        if self.by_rows:
            return from_squares(grad, grid, self.config.merge)
        return grad.reshape(-1, self.config.encoder.d_model)

    def project(self, ops: Any, batch: Any) -> Tensor:
        x = self.hidden(ops, ops.activations(batch, self.width))
        return self.projector(ops, ops.map("gelu_exact", x))

    def grids(self, image: ImageInput) -> Sequence[tuple[int, int]]:
        """The (height, width) of each part of an image in patches; none if that cannot be."""
        return [image.grid[1:]] if len(image.grid) == 3 and image.grid[0] == 1 else []

    def check(self, image: ImageInput) -> None:
        merge, values, grids = self.config.merge, self.config.patch_values, self.grids(image)
        sizes = [height * width for height, width in grids]
        is_whole = bool(grids) and all(side > 0 and side % merge == 0 for grid in grids for side in grid)
        is_well = is_whole and max(sizes) <= MOST_PATCHES and image.pixels.shape == (sum(sizes), values)
        if not is_well or image.n_tokens * merge**2 != sum(sizes):
            raise RequestError.of(
                "images",
                f"must be patches of {values} numbers, up to {MOST_PATCHES} at once, not "
                f"{list(image.pixels.shape)} with {image.n_tokens} tokens and a grid {image.grid}",
            )

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        first, rotates = 0, self.config.encoder.layers[0].use_rope
        for grid in self.grids(image):
            patches = image.pixels[first : first + grid[0] * grid[1]]
            first += len(patches)
            yield ImagePart(self.values(patches, grid), grid, self.places_of(grid) if rotates else None)

    def places_of(self, grid: tuple[int, int]) -> IntArray:
        """Row and column of each patch of a grid, in their order: [2, T]."""
        return grid_of_blocks(grid, 1 if self.by_rows else self.config.merge)

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Return the encoder's input for patches [T, values]."""
        return patches


def grid_of_blocks(grid: tuple[int, int], merge: int) -> IntArray:
    """Row and column of each patch of a grid, square by square of merge x merge: [2, T]."""
    rows, columns = grid[0] // merge, grid[1] // merge
    places = np.indices(grid, np.int32).reshape(2, rows, merge, columns, merge)
    return np.ascontiguousarray(places.transpose(0, 1, 3, 2, 4).reshape(2, -1))


def read_rotated(keys: Keys, vision: Keys, d_text: int, name: str, *, side: int, **more: Any) -> VisionConfig:
    """The configuration, by the keys of Qwen's `vision_config`; `more` are fields of `VisionConfig`."""
    patch_size = vision.whole("patch_size", most=1 << 10)
    vision.expect("in_channels", 3)
    named: Any = {"n_layers": "depth", "n_heads": "num_heads"}
    encoder = read_blocks(vision, name, 1e-6, MOST_PATCHES, side**2, rotates=True, **named)
    config = VisionConfig(
        name,
        encoder,
        image_size=side * patch_size,
        patch_size=patch_size,
        merge=vision.whole("spatial_merge_size", most=64),
        d_text=d_text,
        image_token_id=keys.whole("image_token_id", least=0),
        n_frames=vision.whole("temporal_patch_size", most=64),
        has_places=True,
    )
    return replace(config, **more)
