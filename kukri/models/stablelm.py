"""StableLM 3B and 2 1.6B (Stability AI 2023): Llama with LayerNorm, partial rotation, and biases."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import LayerNorm
from kukri.models.llama import Block, Llama

STABLELM = Architecture(
    "stablelm",
    Llama.of(block_type=Block.of(norm_type=LayerNorm)),
    "StableLmForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    gguf_reads={"use_parallel_residual"},  # readers go by the norm of the MLP, which is missing if it is so
    partial_rotary=True,
    hf_epsilon="layer_norm_eps",
    fixed={"qk_layernorm": False, "use_parallel_residual": False},
    defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    biases={f"self_attn.{part}_proj": "use_qkv_bias" for part in "qkv"},
)
