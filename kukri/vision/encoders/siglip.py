"""SigLIP (Zhai et al. 2023): a vision transformer of learned positions, LayerNorm and GELU.

A family that uses this encoder is a subclass, which says what is done with the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.op_set import Tensor
from kukri.models.layers import MLP, Attention, Embedding, LayerNorm, Linear
from kukri.models.llama import Block
from kukri.models.weights import Parameter, WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import ImagePart, VisionModel
from kukri.vision.image import ImageInput


class SiglipAttention(Attention):
    """Attention of patches to all of their tile. All layers share the first one's place in the cache."""

    out_name = "out_proj"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.spec = replace(self.spec, layer=0)


class SiglipBlock(Block):
    """One layer, in Llama's order."""

    norm_type, attention_type, mlp_type = LayerNorm, SiglipAttention, MLP
    attention_norm_name, mlp_norm_name = "layer_norm1", "layer_norm2"


class PatchEncoder(VisionModel):
    """A vision transformer: a matrix embeds patches, which go through blocks and a norm."""

    parameters: Sequence[Parameter] = ()
    block_type: Callable[..., Any]
    norm_type: Callable[..., Any]

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        self.config, encoder = config, config.encoder
        self.patches = Linear(source, ["model.embed_patches"], (encoder.d_model,), config.patch_values)
        self.blocks = [self.block_type(source, encoder, layer) for layer in range(encoder.n_layers)]
        self.norm = self.norm_type(source, "model.norm", encoder.d_model, encoder.norm_eps)
        self.cache_layer = self.blocks[0].attention.cache_layer

    def through_blocks(self, ops: Any, x: Tensor, batch: Any) -> Tensor:
        """Embeddings of patches [T, D] -> hidden states after the last norm."""
        x = ops.tap("hook_embed", None, x)
        for block in self.blocks:
            x = block(ops, x, batch)
        return ops.tap("ln_final.hook_normalized", None, self.norm(ops, x))


class Siglip(PatchEncoder):
    """The encoder without its projector."""

    block_type, norm_type = SiglipBlock, LayerNorm

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        n_positions, d_model = config.encoder.n_positions, config.encoder.d_model
        learned = Embedding(source, "model.embed_positions", n_positions, d_model).weight
        self.positions = replace(learned, stored=learned.stored[self.places()])

    def encode(self, ops: Any, batch: Any) -> Tensor:
        patches = self.patches(ops, ops.activations(batch, self.config.patch_values))
        return self.through_blocks(ops, ops.embed(self.positions, batch, "positions", patches), batch)

    def places(self) -> IntArray:
        """The row of the learned positions for each patch of a tile [T]."""
        return np.arange(self.config.side**2, dtype=np.int32)

    def check(self, image: ImageInput) -> None:
        size = self.config.image_size
        n_tokens = len(image.pixels) * self.config.tile_tokens
        if image.pixels.shape[1:] != (3, size, size) or image.n_tokens != n_tokens:
            raise RequestError.of(
                "images",
                f"must be tiles of [3, {size}, {size}] with {self.config.tile_tokens} tokens each, not "
                f"{list(image.pixels.shape)} with {image.n_tokens}",
            )

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        """Each tile, its patches row by row."""
        for tile in image.pixels:
            yield ImagePart(patches_of(tile, self.config.patch_size), (self.config.side, self.config.side))


def patches_of(tile: FloatArray, size: int) -> FloatArray:
    """The patches of a tile [3, H, W], row by row: [patches, 3 * size * size], a colour after the other."""
    n_rows, n_columns = tile.shape[1] // size, tile.shape[2] // size
    cut = tile.reshape(3, n_rows, size, n_columns, size).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut).reshape(n_rows * n_columns, 3 * size * size)


def squares_of(hidden: FloatArray, grid: tuple[int, int], merge: int) -> FloatArray:
    """Hidden states [height * width, D] by squares of merge x merge patches: [squares, merge * merge, D]."""
    n_rows, n_columns = grid[0] // merge, grid[1] // merge
    cut = hidden.reshape(n_rows, merge, n_columns, merge, -1).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(cut).reshape(n_rows * n_columns, merge * merge, -1)


def from_squares(squares: FloatArray, grid: tuple[int, int], merge: int) -> FloatArray:
    """Invert `squares_of`."""
    n_rows, n_columns = grid[0] // merge, grid[1] // merge
    cut = squares.reshape(n_rows, n_columns, merge, merge, -1).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(cut).reshape(grid[0] * grid[1], -1)


def from_means(means: FloatArray, grid: tuple[int, int], merge: int) -> FloatArray:
    """Return the gradient by hidden states, given the gradient by the means of their squares [squares, D]."""
    n = merge**2
    return from_squares(np.repeat(means[:, None] / np.float32(n), n, axis=1), grid, merge)


# Towers of transformers' SigLIP: the names that checkpoints of transformers 4 and 5 have for its parts, and a
# head that no model of images and text reads
_PARTS = {
    "model.embed_patches": "embeddings.patch_embedding",
    "model.embed_positions": "embeddings.position_embedding",
    "model.layers": "encoder.layers",
    "model.norm": "post_layernorm",
}
TOWER_NAMES = {
    part: (f"vision_tower.vision_model.{name}", f"vision_tower.{name}") for part, name in _PARTS.items()
}
TOWER_HEAD = r"(?:model\.)?vision_tower\.(?:vision_model\.)?head\..+"
