"""OLMo (Groeneveld et al. 2024): Llama whose norms are LayerNorms without weights."""

from __future__ import annotations

import numpy as np

from kukri.kernels.weight_handles import Vector
from kukri.models.architecture import Architecture
from kukri.models.layers import LayerNorm
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class BareLayerNorm(LayerNorm):
    """(x - mean) / sqrt(var + eps): the checkpoint holds nothing of it."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self.weight, self.bias = Vector(np.ones(size, np.float32)), Vector(np.zeros(size, np.float32))
        self.eps = eps


OLMO = Architecture(
    "olmo",
    Llama.of(block_type=Block.of(norm_type=BareLayerNorm)),
    "OlmoForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    interleaved_rope=True,
    hf_epsilon="layer_norm_eps",
    numbers={"qkv_clip"},
    defaults={"layer_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias"},
)
