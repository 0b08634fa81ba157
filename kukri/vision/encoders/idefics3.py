"""Idefics3 (Laurençon et al. 2024), and SmolVLM and Granite-Docling built like it.

A SigLIP encoder sees tiles; the hidden states of neighbouring patches, side by side, are one row (pixel
shuffle), and one matrix turns rows into embeddings.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig, siglip_config
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.siglip import Siglip, from_squares, squares_of


class Idefics3(Siglip):
    """The encoder and its projector."""

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.width = config.merge**2 * config.encoder.d_model
        self.projector = Linear(source, ["projector"], (config.d_text,), self.width)

    def places(self) -> IntArray:
        return nearest_places(self.config.side)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """A square's hidden states side by side."""
        return squares_of(hidden, grid, self.config.merge).reshape(-1, self.width)

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        return from_squares(grad, grid, self.config.merge)

    def project(self, ops: Any, batch: Any) -> Tensor:
        return self.projector(ops, ops.activations(batch, self.width))


def nearest_places(side: int) -> IntArray:
    """The rows of the learned positions of a tile's patches [side * side].

    They are found by each patch's fraction of the tile, in float32, as in training: of some sizes the
    rounding gives two neighbours one place.
    """
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    fractions = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    places = np.searchsorted(bounds, np.minimum(fractions, np.float32(1 - 1e-6)), side="right")
    rows: IntArray = (places[:, None] * side + places).reshape(-1).astype(np.int32)
    return rows


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    return VisionConfig(
        "idefics3",
        siglip_config(vision, "idefics3"),
        image_size=vision.whole("image_size"),
        patch_size=vision.whole("patch_size"),
        merge=keys.whole("scale_factor", most=64),
        d_text=d_text,
        image_token_id=keys.whole("image_token_id", least=0),
    )


IDEFICS3 = VisionFamily(
    "idefics3",
    Idefics3,
    hf_types=("idefics3", "smolvlm"),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("vision_model.embeddings.patch_embedding",),
        "model.embed_positions": ("vision_model.embeddings.position_embedding",),
        "model.layers": ("vision_model.encoder.layers",),
        "model.norm": ("vision_model.post_layernorm",),
        "projector": ("connector.modality_projection.proj",),
    },
    defaults={"scale_factor": 2, "image_token_id": 128257},
    vision_defaults={
        **SIGLIP_DEFAULTS,
        **{"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    },
)
