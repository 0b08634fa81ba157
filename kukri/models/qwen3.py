"""Qwen3 (Yang et al. 2025): Llama with an RMSNorm on each query and key head before its rotation."""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.layers import Attention, HeadNorm
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class Qwen3Attention(Attention):
    """Attention with a norm that all query heads share, and one for the key heads."""

    q_norm_name, k_norm_name = "q_norm", "k_norm"

    def norms(self, source: WeightSource, name: str, config: ModelConfig) -> tuple[Any, Any]:
        """A norm of each head on its own; a layer that reads another's keys has none for them."""
        size = self.spec.d_head, config.norm_eps
        q_norm = HeadNorm(source, f"{name}.{self.q_norm_name}", *size)
        k_norm = HeadNorm(source, f"{name}.{self.k_norm_name}", *size) if self.spec.reads is None else None
        return q_norm, k_norm


QWEN3 = Architecture(
    "qwen3",
    Llama.of(block_type=Block.of(attention_type=Qwen3Attention)),
    "Qwen3ForCausalLM",
    gguf_seeing="qwen3vl",
    gguf_reads={"n_deepstack_layers"},  # the encoder says which
    reads={"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}
    | {"mrope_interleaved": True},  # Qwen3-VL's
    biases={"self_attn": "attention_bias"},
)
