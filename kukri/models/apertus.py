"""Apertus (Swiss AI 2025): Llama with norms of heads, and an MLP whose activation is learned (xIELU)."""

from __future__ import annotations

from math import log1p
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import UngatedMLP
from kukri.models.llama import Block, Llama
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.stored import ONE_NUMBER, PARAMETER, Stored
from kukri.models.weights import WeightSource

_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}


class XieluMLP(UngatedMLP):
    """down(xielu(up(x))), with four numbers a layer that make the activation."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        alpha_p, alpha_n, self.beta, eps = (
            float(source.vector(f"{name}.act_fn.{part}.weight", 1)[0]) for part in XIELU
        )
        if not eps >= -1e-5:  # bounds a negative x from above; so near to 0 it changes no result
            raise UnsupportedError(f"'{name}.act_fn.eps' must be at least -1e-05, not {eps:g}")
        self.high, self.low = _softplus(alpha_p), self.beta + _softplus(alpha_n)

    def activate(self, ops: Ops, x: Tensor, up: Tensor | None) -> Tensor:
        """beta x, and above 0 high x^2, below it low (exp(x) - 1 - x)."""
        return ops.add(ops.map("xielu", x, None, self.high, self.low), ops.scale(x, self.beta))


def _mlp(source: WeightSource, name: str, config: ModelConfig, layer: int) -> UngatedMLP:
    """An MLP with a learned activation, or with another."""
    return (XieluMLP if config.activation == "xielu" else UngatedMLP)(source, name, config, layer)


def _softplus(x: float) -> float:
    return max(x, 0.0) + log1p(float(np.exp(-abs(x))))


XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the class's RoPE, if it states none."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or config.get("rope_theta")
    return config if stated else {**config, "rope_parameters": _LLAMA3}


APERTUS = Architecture(
    "apertus",
    Llama.of(
        block_type=Block.of(
            attention_type=Qwen3Attention,
            mlp_type=staticmethod(_mlp),
            attention_norm_name="attention_layernorm",
            mlp_norm_name="feedforward_layernorm",
        )
    ),
    "ApertusForCausalLM",
    tensor_names={
        **{"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        **{f"mlp.act_fn.{x}": Stored("", PARAMETER, gguf_key=f"xielu.{x}") for x in XIELU[:2]},
        **{f"mlp.act_fn.{x}": Stored("", PARAMETER, ONE_NUMBER, gguf_key=f"xielu.{x}") for x in XIELU[2:]},
    },
    activation="xielu",
    respelled=_respelled,
    ignores={"mlp_bias", "post_norm", "qk_norm"},
    defaults={"rms_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias"},
)
