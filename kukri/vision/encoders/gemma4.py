"""The image encoder of Gemma 4 (Google 2026), for images of any proportions, of blocks like the text's.

Heads rotate by row and column. A patch has the sum of two learned embeddings, of its column and of its row.
Matrices may clamp their inputs and their outputs. The hidden states of a square of patches are averaged.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import Vector
from kukri.models.gemma2 import Gemma2Block
from kukri.models.gemma4_text import Gemma4Attention
from kukri.models.keys import Keys
from kukri.models.layers import ClampedLinear, GatedMLP, NoNorm
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig, read_blocks
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.gemma4_rows import Gemma4Rows
from kukri.vision.encoders.rotated import MOST_PATCHES, RotatedAttention
from kukri.vision.encoders.siglip import from_means, squares_of

_MOST_ROWS = 1120  # the largest budget of a picture


class _Attention(Gemma4Attention, RotatedAttention):
    linear_type, out_name = ClampedLinear, "o_proj"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        # files have the pairs that turn by the column as a head's first half, those by the row as the second
        quarters = np.arange(config.d_model).reshape(-1, 4, config.d_head // 4)
        order = quarters[:, [2, 0, 3, 1]].reshape(-1)
        for linear in self.qkv.linears:
            linear.weights = tuple(
                w if ".v_proj." in w.name else replace(w, row_order=order) for w in linear.weights
            )
        for norm in (self.q_norm, self.k_norm):
            norm.weight = Vector(norm.weight.data[order[: config.d_head]], norm.weight.name)


_BLOCK = Gemma2Block.of(attention_type=_Attention, mlp_type=GatedMLP.of(linear_type=ClampedLinear))


class Gemma4Vision(Gemma4Rows):
    """The encoder, the last of whose states are not normed, and its projector."""

    block_type, norm_type = _BLOCK, NoNorm

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.take_ends(source)
        self._mean, self._factor = np.zeros(1, np.float32), np.ones(1, np.float32)
        if source.has("model.std_bias"):  # the projector's input is standardized
            names = "model.std_bias", "model.std_scale"
            self._mean, self._factor = (source.vector(name, config.encoder.d_model) for name in names)

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Return patches with values from -1 to 1, each followed by the embeddings of its place."""
        return super().values(2 * (patches - np.float32(0.5)), grid)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """The mean of a square's hidden states, scaled."""
        mean: FloatArray = squares_of(hidden, grid, self.config.merge).mean(axis=1)
        mean *= np.float32(self.config.encoder.d_model**0.5)
        return (mean - self._mean) * self._factor

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        scaled = grad * np.float32(self.config.encoder.d_model**0.5)
        return from_means(scaled * self._factor, grid, self.config.merge)


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    defaults = {"pad_token_id": 0, "vocab_size": 262144}
    text = Keys(keys.value("text_config") or {}, keys.path, "", defaults)
    heads, merge = vision.whole("num_attention_heads"), vision.whole("pooling_kernel_size", most=64)
    vision.expect("num_key_value_heads", heads)
    vision.expect("head_dim", vision.whole("hidden_size") // heads)
    n_positions = vision.whole("position_embedding_size", most=1 << 16)
    encoder = read_blocks(
        *(vision, "gemma4", vision.positive("rms_norm_eps"), MOST_PATCHES, n_positions),
        activation="hidden_activation",
        rotates=True,
    )
    rope = Keys(vision.value("rope_parameters") or {}, vision.path, "", {"rope_theta": 100.0})
    return VisionConfig(
        "gemma4",
        replace(encoder, attention_scale=1.0, rope=replace(encoder.rope, theta=rope.positive("rope_theta"))),
        image_size=17 * merge * (patch_size := vision.whole("patch_size", most=1 << 10)),  # room for 280 rows
        patch_size=patch_size,
        merge=merge,
        d_text=d_text,
        image_token_id=keys.whole("image_token_id", least=0),
        attends_both_ways="windows" if text.value("use_bidirectional_attention") == "vision" else "",
        whole_tokens=_MOST_ROWS,
        blank_id=text.whole("pad_token_id", least=0, most=text.whole("vocab_size") - 1),
    )


GEMMA4_VISION = VisionFamily(
    "gemma4",
    Gemma4Vision,
    hf_types=("gemma4",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("vision_tower.patch_embedder.input_proj",),
        "model.embed_positions.weight": ("vision_tower.patch_embedder.position_embedding_table",),
        "model.layers": ("vision_tower.encoder.layers",),
        "model": ("vision_tower",),
        "projector": ("embed_vision.embedding_projection",),
    },
    unused=r"(?:model\.)?(?:audio_tower|embed_audio)\..+",
    defaults={"image_token_id": 258880},
    vision_defaults={
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "patch_size": 16},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "pooling_kernel_size": 3},
        **{"position_embedding_size": 10240, "rms_norm_eps": 1e-6},
        "hidden_activation": "gelu_pytorch_tanh",
    },
)
