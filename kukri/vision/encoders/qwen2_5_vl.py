"""The image encoder of Qwen2.5-VL (Bai et al. 2025). Most of its layers attend within squares.

Heads rotate by row and column; squares of patches, side by side, go through an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models.keys import Keys
from kukri.models.layers import Linear, RMSNorm
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import ImagePart, VisionFamily
from kukri.vision.encoders.rotated import RotatedBlock, RotatedEncoder, read_rotated
from kukri.vision.image import ImageInput


class Qwen25Vision(RotatedEncoder):
    """The encoder and its merger. Rows of embeddings lie window by window until they are merged."""

    block_type, norm_type = RotatedBlock, RMSNorm

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.hidden = Linear(source, ["projector.0"], (self.width,), self.width)
        self.projector = Linear(source, ["projector.2"], (config.d_text,), self.width)

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        """The image, its rows of embeddings in the order of windows."""
        squares = self.config.merge**2
        for part in super().parts(image):
            order, lengths = self._windows(part.grid)
            assert part.positions is not None
            patches = part.patches.reshape(len(order), -1)[order].reshape(part.patches.shape)
            positions = part.positions.reshape(2, len(order), -1)[:, order].reshape(2, -1)
            yield ImagePart(patches, part.grid, positions, tuple(n * squares for n in lengths))

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """A square's hidden states side by side, row by row again."""
        order, _ = self._windows(grid)
        return super().merged(hidden, grid)[np.argsort(order)]

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        order, _ = self._windows(grid)
        return super().unmerged(grad[order], grid)

    def _windows(self, grid: tuple[int, int]) -> tuple[IntArray, list[int]]:
        """The numbers of the rows of embeddings window by window, and how many each has."""
        height, width = (side // self.config.merge for side in grid)
        numbers, side = np.arange(height * width, dtype=np.int32).reshape(height, width), self.config.window
        found = [
            numbers[y : y + side, x : x + side].reshape(-1)
            for y in range(0, height, side)
            for x in range(0, width, side)
        ]
        return np.concatenate(found), [len(each) for each in found]


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    patch_size, merge = vision.whole("patch_size", most=1 << 10), vision.whole("spatial_merge_size", most=64)
    window = vision.whole("window_size", most=1 << 13) // (patch_size * merge)
    if not window:
        raise vision.error("window_size", "must be at least the pixels of one row of embeddings")
    layers = tuple(vision.items("fullatt_block_indexes", int))
    return read_rotated(
        keys, vision, d_text, "qwen2_5_vl", side=32 * merge, window=window, full_layers=layers
    )


QWEN2_5_VISION = VisionFamily(
    "qwen2_5_vl",
    Qwen25Vision,
    hf_types=("qwen2_5_vl",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("visual.patch_embed.proj",),
        "model.layers": ("visual.blocks",),
        "model.norm": ("visual.merger.ln_q",),
        "projector": ("visual.merger.mlp",),
    },
    defaults={"image_token_id": 151655},
    vision_defaults={
        **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
        **{"hidden_act": "silu", "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    },
)
