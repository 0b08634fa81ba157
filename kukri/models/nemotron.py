"""Nemotron (Nvidia 2024) and Minitron: Llama with LayerNorms, squared ReLU, and RoPE in half of each head."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import LayerNorm, UngatedMLP
from kukri.models.llama import Block, Llama

NEMOTRON = Architecture(
    "nemotron",
    Llama.of(block_type=Block.of(norm_type=LayerNorm, mlp_type=UngatedMLP)),
    "NemotronForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    hf_epsilon="norm_eps",
    hf_norm_offset=1.0,
    partial_rotary=True,
    activation="relu2",
    defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
