"""Granite 3 (IBM 2024): Llama with four multipliers: of embeddings, scores, what a layer adds, and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import Scaled
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class GraniteBlock(Block):
    """A layer whose attention and MLP add their results multiplied."""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        self.attention.out = Scaled(self.attention.out, config.residual_scale)
        self.mlp.down = Scaled(self.mlp.down, config.residual_scale)


class Granite(Llama):
    """The whole model."""

    block_type: Callable[..., Any] = GraniteBlock

    def embed(self, ops: Ops, batch: Any) -> Tensor:
        """The embeddings, multiplied [T, D]."""
        return ops.scale(self.embedding(ops, batch), self.config.embedding_scale)

    def adjust_logits(self, ops: Ops, logits: Tensor) -> Tensor:
        """The logits, divided [N, V]."""
        return ops.scale(logits, 1 / self.config.logits_divisor)


GRANITE = Architecture(
    "granite",
    Granite,
    "GraniteForCausalLM",
    interleaved_rope=True,
    numbers={"attention_scale", "embedding_scale", "residual_scale", "logits_divisor"},
    defaults={"attention_multiplier": 1.0},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
