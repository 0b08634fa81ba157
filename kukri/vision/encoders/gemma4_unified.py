"""Images in Gemma 4 12B (Google 2026): squares of pixels become rows of the text without an encoder.

A square is normed, multiplied and normed, and the embeddings of its place are added. The rows of an image
attend to each other both ways in all layers of the text, as in transformers' model. (For caches of a fixed
size transformers prepares masks that do so in layers with a window alone.)
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.gemma4_rows import Gemma4Rows
from kukri.vision.encoders.rotated import MOST_PATCHES

_EPS = 1e-5  # PyTorch's


class Gemma4UnifiedVision(Gemma4Rows):
    """A layer without attention in place of an encoder, and the projector."""

    tables_axis = 1

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        d_model = config.encoder.d_model
        self.config, self.cache_layer = config, KVLayer(1, config.encoder.d_head)
        self.pixel_norm = LayerNorm(source, "model.patch_ln1", config.patch_values, _EPS)
        self.patches = Linear(source, ["model.embed_patches"], (d_model,), config.patch_values)
        self.patch_norm = LayerNorm(source, "model.patch_ln2", d_model, _EPS)
        self.norm = LayerNorm(source, "model.pos_norm", d_model, _EPS)
        self.take_ends(source)

    def encode(self, ops: Any, batch: Any) -> Tensor:
        widths = self.config.patch_values, self.config.encoder.d_model
        pixels, places = ops.split(ops.activations(batch, sum(widths)), widths)
        patches = self.patch_norm(ops, self.patches(ops, self.pixel_norm(ops, pixels)))
        x = ops.add(ops.tap("hook_embed", None, patches), places)
        x = ops.tap("hook_resid_mid", 0, x)
        return ops.tap("ln_final.hook_normalized", None, self.norm(ops, x))

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """The hidden states."""
        return hidden

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        return grad


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    defaults = {"use_bidirectional_attention": "vision", "sliding_window": 1024}
    text = Keys(keys.value("text_config") or {}, keys.path, "", defaults)
    patch_size = vision.whole("patch_size", most=1 << 10) * vision.whole("pooling_kernel_size", most=64)
    d_model = vision.whole("mm_embed_dim", most=1 << 16)
    vision.expect("output_proj_dims", d_model)
    encoder = ModelConfig(
        architecture="gemma4_unified",
        n_layers=1,
        d_model=d_model,
        n_heads=1,
        n_kv_heads=1,
        d_head=16,  # a cache has it, which nothing reads
        d_ffn=1,
        n_vocab=1,
        norm_eps=vision.positive("rms_norm_eps"),
        max_context=MOST_PATCHES,
        tie_embeddings=False,
        rope=RopeConfig(),
        layers=(LayerConfig(use_rope=False),),
        is_causal=False,
        n_positions=vision.whole("mm_posemb_size", most=1 << 16),
    )
    return VisionConfig(
        "gemma4_unified",
        encoder,
        image_size=patch_size * min(24, isqrt(text.whole("sliding_window"))),  # room for 560 rows
        patch_size=patch_size,
        merge=1,
        d_text=d_text,
        image_token_id=keys.whole("image_token_id", least=0),
        attends_both_ways="all" if text.value("use_bidirectional_attention") == "vision" else "",
    )


GEMMA4_UNIFIED_VISION = VisionFamily(
    "gemma4_unified",
    Gemma4UnifiedVision,
    hf_types=("gemma4_unified",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("vision_embedder.patch_dense",),
        "model.embed_positions.weight": ("vision_embedder.pos_embedding",),
        "model": ("vision_embedder",),
        "projector": ("embed_vision.embedding_projection",),
    },
    unused=r"(?:model\.)?embed_audio\..+",
    defaults={"image_token_id": 258880},
    vision_defaults={
        **{"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120},
        **{"output_proj_dims": 3840, "rms_norm_eps": 1e-6},
    },
)
