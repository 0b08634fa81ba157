"""Pixtral's encoder (Agrawal et al. 2024), for images of any proportions; Mistral 3 and Ministral 3 have it
too.

Heads rotate by row and column. A matrix merges the states of a square of patches, and an MLP makes them
rows of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import Linear, RMSNorm
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.rotated import RotatedAttention, RotatedBlock, RotatedEncoder, read_rotated
from kukri.vision.encoders.siglip import from_squares, squares_of


class _Block(RotatedBlock):
    norm_type, attention_type = RMSNorm, RotatedAttention.of(out_name="o_proj", takes_turns=True)
    attention_norm_name, mlp_norm_name = "attention_norm", "ffn_norm"
    attention_name, mlp_name = "attention", "feed_forward"


class Pixtral(RotatedEncoder):
    """The encoder and its projector, whose norm reads the result of the last layer.

    With `merges` a matrix merges the states of a square of patches.
    """

    block_type, by_rows, merges = _Block, True, True
    norm_type: Callable[..., Any] = RMSNorm

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        d_model = config.encoder.d_model
        self.norm.eps = config.projector_eps
        self.first_norm = RMSNorm(source, "model.ln_pre", d_model, config.encoder.norm_eps)
        if self.merges:
            self.merger = Linear(source, ["projector.patch_merger.merging_layer"], (d_model,), self.width)
        self.hidden = Linear(source, ["projector.linear_1"], (config.d_text,), d_model)
        self.projector = Linear(source, ["projector.linear_2"], (config.d_text,), config.d_text)

    def encode(self, ops: Any, batch: Any) -> Tensor:
        patches = self.patches(ops, ops.activations(batch, self.config.patch_values))
        return self.through_blocks(ops, self.first_norm(ops, patches), batch)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """A square's hidden states, number by number."""
        squares = squares_of(hidden, grid, self.config.merge).transpose(0, 2, 1)
        return np.ascontiguousarray(squares).reshape(len(squares), self.width)

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        squares = grad.reshape(len(grad), self.config.encoder.d_model, -1).transpose(0, 2, 1)
        return from_squares(squares, grid, self.config.merge)

    def project(self, ops: Any, batch: Any) -> Tensor:
        x = ops.activations(batch, self.width)
        x = self.hidden(ops, self.merger(ops, x) if self.merges else x)
        return self.projector(ops, ops.map("gelu_exact", x))


def read_pixtral(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    """See VisionFamily.read_hf."""
    for key, value in (("projector_hidden_act", "gelu"), ("vision_feature_layer", -1)):
        keys.expect(key, value)
    rope = vision.value("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_theta", vision.value("rope_theta")) != 10000:
        raise vision.unsupported("rope_theta", "of the encoder must be 10000, and nothing else is supported")
    merge, text = keys.whole("spatial_merge_size", most=64), keys.value("text_config")
    others = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"}
    values = {name: vision.value(own) for name, own in others.items()}
    values |= {"spatial_merge_size": merge, "temporal_patch_size": 1}
    vision.values = {**vision.values, **values}
    eps = Keys(text if isinstance(text, dict) else {}, keys.path, "", {"rms_norm_eps": 1e-5})
    more = {"has_places": False, "projector_eps": eps.positive("rms_norm_eps")}
    config = read_rotated(keys, vision, d_text, "pixtral", side=32 * merge, **more)
    return replace(config, encoder=replace(config.encoder, norm_eps=1e-5))


PIXTRAL_VISION = VisionFamily(
    "pixtral",
    Pixtral,
    hf_types=("mistral3",),
    read_hf=read_pixtral,
    names={
        "model.embed_patches": ("vision_tower.patch_conv",),
        "model.ln_pre": ("vision_tower.ln_pre",),
        "model.layers": ("vision_tower.transformer.layers",),
        "model.norm": ("multi_modal_projector.norm",),
        "projector": ("multi_modal_projector",),
    },
    defaults={
        **{"image_token_id": 10, "projector_hidden_act": "gelu", "vision_feature_layer": -1},
        "spatial_merge_size": 2,
    },
    vision_defaults={
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 16},
        **{"num_attention_heads": 16, "num_channels": 3, "hidden_act": "gelu", "rope_theta": 10000},
    },
)
