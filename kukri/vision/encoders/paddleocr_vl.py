"""The image encoder of PaddleOCR-VL (Cui et al. 2025), SigLIP for images of any proportions with RoPE.

They do so by row and column, and learned positions are resized too. Squares of patches, normed and side by
side, go through an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import MLP, LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.placed import PlacedEncoder
from kukri.vision.encoders.rotated import (
    RotatedAttention,
    RotatedBlock,
    read_rotated,
)


class _Block(RotatedBlock):
    norm_type, attention_type, mlp_type = LayerNorm, RotatedAttention.of(out_name="out_proj"), MLP
    attention_norm_name, mlp_norm_name, attention_name = "layer_norm1", "layer_norm2", "self_attn"


class PaddleOcrVision(PlacedEncoder):
    """The encoder and its projector. The projector's norm reads the result of the encoder's last norm."""

    block_type, norm_type, aligned = _Block, LayerNorm, "centres"

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        encoder = config.encoder
        self.merged_norm = LayerNorm(source, "projector.pre_norm", encoder.d_model, config.projector_eps)
        self.hidden = Linear(source, ["projector.linear_1"], (self.width,), self.width)
        self.projector = Linear(source, ["projector.linear_2"], (config.d_text,), self.width)

    def encode(self, ops: Any, batch: Any) -> Tensor:
        return self.merged_norm(ops, super().encode(ops, batch))


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    rope = vision.value("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_theta", 10000) != 10000:
        raise vision.unsupported("rope_parameters", "must have the base 10000, and nothing else is supported")
    others = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"}
    values = {name: vision.value(own) for name, own in others.items()}
    vision.values = {**vision.values, **values, "temporal_patch_size": 1}
    merge = vision.whole("spatial_merge_size", most=64)
    side = vision.whole("image_size", most=1 << 20) // vision.whole("patch_size", most=1 << 10)
    n_positions = vision.whole("num_position_embeddings", max(side, 1) ** 2, most=1 << 16)
    config = read_rotated(keys, vision, d_text, "paddleocr_vl", side=28 * merge, projector_eps=1e-5)
    eps = vision.positive("layer_norm_eps")
    return replace(config, encoder=replace(config.encoder, n_positions=n_positions, norm_eps=eps))


PADDLEOCR_VISION = VisionFamily(
    "paddleocr_vl",
    PaddleOcrVision,
    hf_types=("paddleocr_vl",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("visual.vision_model.embeddings.patch_embedding",),
        "model.embed_positions": ("visual.vision_model.embeddings.position_embedding",),
        "model.layers": ("visual.vision_model.encoder.layers",),
        "model.norm": ("visual.vision_model.post_layernorm",),
        "projector": ("mlp_AR",),
    },
    unused=r"(?:model\.)?visual\.vision_model\.(?:embeddings\.packing_position_embedding|head)\..+",
    defaults={"image_token_id": 100295},
    vision_defaults={
        **SIGLIP_DEFAULTS,
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14},
        **{"num_attention_heads": 16, "image_size": 384, "spatial_merge_size": 2},
    },
)
