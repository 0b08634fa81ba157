"""The image encoder of Gemma 3 (Gemma team 2025): SigLIP of one size, its hidden states averaged by squares.

The rows of an image attend to each other both ways in the text.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import Linear, RMSNorm
from kukri.models.weights import WeightSource
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig, siglip_config
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.siglip import TOWER_HEAD, TOWER_NAMES, Siglip, from_means, squares_of


class Gemma3Vision(Siglip):
    """The encoder and its projector."""

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        encoder = config.encoder
        self.pooled_norm = RMSNorm(source, "projector.norm", encoder.d_model, encoder.norm_eps)
        self.projector = Linear(source, ["projector"], (config.d_text,), encoder.d_model)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """The mean of a square's hidden states."""
        mean: FloatArray = squares_of(hidden, grid, self.config.merge).mean(axis=1)
        return mean

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        return from_means(grad, grid, self.config.merge)

    def project(self, ops: Any, batch: Any) -> Tensor:
        mean = ops.activations(batch, self.config.encoder.d_model)
        return self.projector(ops, self.pooled_norm(ops, mean))


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    image_size, patch_size = vision.whole("image_size"), vision.whole("patch_size")
    n_tokens = keys.whole("mm_tokens_per_image", most=1 << 16)
    side = isqrt(n_tokens)
    if side * side != n_tokens or not patch_size * side <= image_size or (image_size // patch_size) % side:
        raise keys.error("mm_tokens_per_image", f"must be a number of squares of patches, not {n_tokens}")
    return VisionConfig(
        "gemma3",
        siglip_config(vision, "gemma3"),
        image_size,
        patch_size,
        merge=image_size // patch_size // side,
        d_text=d_text,
        image_token_id=keys.whole(
            "image_token_id" if keys.has("image_token_id") else "image_token_index", least=0
        ),
        attends_both_ways="all",
    )


GEMMA3_VISION = VisionFamily(
    "gemma3",
    Gemma3Vision,
    hf_types=("gemma3",),
    read_hf=_read_hf,
    names={
        **TOWER_NAMES,
        "projector.norm": ("multi_modal_projector.mm_soft_emb_norm",),
        "projector.weight": ("multi_modal_projector.mm_input_projection_weight",),
    },
    unused=TOWER_HEAD,
    transposed={"projector.weight"},
    lacks_one={"projector.norm.weight"},
    defaults={"mm_tokens_per_image": 256, "image_token_index": 262144},
    vision_defaults=SIGLIP_DEFAULTS,
)
