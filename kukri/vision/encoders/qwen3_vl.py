"""The image encoder of Qwen3-VL and Qwen3.5 (Qwen team 2025), a vision transformer of any proportions.

Heads rotate by row and column; learned positions are resized. Squares of patches go through an MLP. So do
squares of states of earlier layers, which the text's first layers add (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import MLP, LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.placed import PlacedEncoder
from kukri.vision.encoders.rotated import RotatedBlock, read_rotated

_MLP = MLP.of(in_names=("linear_fc1",), out_name="linear_fc2")


class _Merger:
    """The MLP of merged patches; before it states of layers before the last are normed."""

    def __init__(self, source: WeightSource, name: str, width: int, d_text: int, eps: float) -> None:
        self.norm = LayerNorm(source, f"{name}.norm", width, eps) if name != "projector" else None
        self.hidden = Linear(source, [f"{name}.linear_fc1"], (width,), width)
        self.out = Linear(source, [f"{name}.linear_fc2"], (d_text,), width)

    def __call__(self, ops: Any, x: Tensor) -> Tensor:
        """x [R, width] -> [R, d_text]."""
        x = x if self.norm is None else self.norm(ops, x)
        return self.out(ops, ops.map("gelu_exact", self.hidden(ops, x)))


class Qwen3Vision(PlacedEncoder):
    """The encoder and its mergers."""

    block_type = RotatedBlock.of(norm_type=LayerNorm, mlp_type=_MLP)
    norm_type, aligned = LayerNorm, "corners"

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        names, eps = ["projector"], config.encoder.norm_eps
        names += [f"deep.{i}" for i in range(len(config.deep_layers))]
        self.mergers = [_Merger(source, name, self.width, config.d_text, eps) for name in names]

    def project(self, ops: Any, batch: Any) -> Tensor:
        widths = (self.width,) * len(self.mergers)
        parts = ops.split(ops.activations(batch, sum(widths)), widths)
        rows = [merger(ops, part) for merger, part in zip(self.mergers, parts, strict=True)]
        return ops.join_heads(rows, 1) if len(rows) > 1 else rows[0]


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    side = isqrt(vision.whole("num_position_embeddings", most=1 << 16))
    layers = tuple(vision.items("deepstack_visual_indexes", int))
    return read_rotated(keys, vision, d_text, "qwen3_vl", side=side, deep_layers=layers)


QWEN3_VISION = VisionFamily(
    "qwen3_vl",
    Qwen3Vision,
    hf_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("visual.patch_embed.proj",),
        "model.embed_positions": ("visual.pos_embed",),
        "model.layers": ("visual.blocks",),
        "model.norm": ("visual.merger.norm",),
        "projector": ("visual.merger",),
        "deep": ("visual.deepstack_merger_list",),
    },
    defaults={"image_token_id": 151655},
    vision_defaults={
        **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
        **{"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "spatial_merge_size": 2},
        **{"temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": []},
    },
)
