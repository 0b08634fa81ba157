"""Qwen2 and 2.5 (Yang et al. 2024): Llama with biases of q, k and v, which come with the checkpoint."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

QWEN2 = Architecture(
    "qwen2",
    Llama,
    "Qwen2ForCausalLM",
    gguf_seeing="qwen2vl",
    reads={"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    ignores={"attention_bias"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    biases={f"self_attn.{part}_proj": True for part in "qkv"},
)
