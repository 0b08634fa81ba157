"""The image encoder of LFM3-VL (Liquid AI 2026): gated convolutions over the grid of patches, and attention.

Heads are normed and rotate by row and column. Squares of patches, each patch normed, go through an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

from kukri.config import LayerConfig, ModelConfig, RecurrentConfig, RopeConfig
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import LayerNorm, Linear, RMSNorm
from kukri.models.lfm2 import Lfm2Block, ShortConv
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import ImagePart, VisionFamily
from kukri.vision.encoders.rotated import RotatedAttention, RotatedEncoder, read_rotated
from kukri.vision.encoders.siglip import from_squares
from kukri.vision.image import ImageInput


class _Attention(RotatedAttention, Qwen3Attention):
    out_name, q_norm_name, k_norm_name = "out_proj", "q_layernorm", "k_layernorm"


class _GridConv(ShortConv):
    """LFM2's convolution, but of squares of patches, in the middle of which is the token's own."""

    conv_name = "spatial_conv"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        side = isqrt(self.conv.spec.n_taps)
        self.conv.spec = replace(self.conv.spec, n_taps=side, n_after=side // 2, n_lines=side)


class Lfm3Vision(RotatedEncoder):
    """The encoder, whose last norm is the projector's, and the projector. Rows of patches are windows."""

    block_type = Lfm2Block.of(attention_type=_Attention, recurrent_type=_GridConv)
    norm_type, by_rows = LayerNorm, True

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        encoder = config.encoder
        self.norm.eps = config.projector_eps
        self.patch_norm = RMSNorm(source, "model.patch_norm", encoder.d_model, encoder.norm_eps)
        layers = [block.attention.cache_layer for block in self.blocks]
        self.cache_layer = max(layers, key=lambda layer: layer.n_kv_heads)  # convolutions keep nothing
        self.hidden = Linear(source, ["projector.linear_1"], (config.d_projector,), self.width)
        self.projector = Linear(source, ["projector.linear_2"], (config.d_text,), config.d_projector)

    def encode(self, ops: Any, batch: Any) -> Tensor:
        patches = self.patches(ops, ops.activations(batch, self.config.patch_values))
        return self.through_blocks(ops, self.patch_norm(ops, patches), batch)

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        """The image, row by row."""
        for part in super().parts(image):
            height, width = part.grid
            yield part._replace(windows=(width,) * height)

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Patches come square by square."""
        return from_squares(patches, grid, self.config.merge)


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    others = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
    own = {name: vision.value(key) for name, key in others.items()} | {"hidden_act": "silu"}
    vision.values = {**vision.values, **own}
    keys.expect("projector_hidden_act", "gelu")
    config = read_rotated(
        *(keys, vision, d_text, "lfm3_vl"),
        side=16 * vision.whole("spatial_merge_size", most=64),
        has_places=False,
        d_projector=keys.whole("projector_hidden_size", most=1 << 18),
        projector_eps=1e-6,
    )
    encoder, kernel = config.encoder, vision.whole("conv_kernel_size", least=3, most=31)
    if kernel % 2 == 0:
        raise vision.error("conv_kernel_size", f"must be odd, not {kernel}")
    kinds = ["conv" if i < 2 or i % 2 else "full_attention" for i in range(encoder.n_layers)]
    if vision.value("layer_types") is not None:
        kinds = vision.first("layer_types", str, encoder.n_layers)
    if unknown := set(kinds) - {"conv", "full_attention"}:
        raise vision.unsupported("layer_types", f"has {min(unknown)!r}: use conv and full_attention")
    rope = vision.value("rope_parameters") or {}
    stated = Keys(rope if isinstance(rope, dict) else {}, keys.path, defaults={"rope_theta": 1e6})
    n_kv_heads = vision.whole("num_key_value_heads", most=encoder.n_heads)
    if encoder.n_heads % n_kv_heads:
        raise vision.error("num_key_value_heads", f"must divide {encoder.n_heads} heads, not be {n_kv_heads}")
    encoder = replace(
        encoder,
        n_kv_heads=n_kv_heads,
        norm_eps=vision.positive("norm_eps"),
        rope=RopeConfig(stated.positive("rope_theta"), encoder.d_head),
        layers=tuple(LayerConfig(is_recurrent=kind == "conv") for kind in kinds),
        recurrent=RecurrentConfig(kernel**2),
    )
    return replace(config, encoder=encoder)


LFM3_VISION = VisionFamily(
    "lfm3_vl",
    Lfm3Vision,
    hf_types=("lfm3_vl",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("vision_tower.patchifier", "vision_tower.patch_embed"),
        "model.patch_norm": ("vision_tower.embedding_norm",),
        "model.layers": ("vision_tower.layers",),
        "model.norm": ("multi_modal_projector.layer_norm",),
        "projector": ("multi_modal_projector",),
    },
    defaults={
        **{"image_token_id": 125030, "projector_hidden_act": "gelu", "projector_hidden_size": 4096},
    },
    vision_defaults={
        **{"num_hidden_layers": 14, "hidden_size": 1024, "intermediate_size": 2560, "norm_eps": 1e-5},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "conv_kernel_size": 3, "in_channels": 3},
        **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
)
