"""Gemma (Gemma team 2024): Llama with GeGLU, embeddings times the root of the width, 1 + w in norms."""

from __future__ import annotations

from typing import Any

from kukri.models.architecture import Architecture
from kukri.models.gemma2 import Gemma2
from kukri.models.llama import Block

_GELU = "gelu_pytorch_tanh"


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The first files say gelu, and mean its approximation."""
    return config | {"hidden_act": _GELU} if config.get("hidden_act") == "gelu" else config


GEMMA = Architecture(
    "gemma",
    Gemma2.of(block_type=Block),
    "GemmaForCausalLM",
    respelled=_respelled,
    hf_norm_offset=1.0,
    activation=_GELU,
    ignores={"hidden_activation"},
    fixed={"use_bidirectional_attention": False},
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    biases={"self_attn": "attention_bias"},
)
