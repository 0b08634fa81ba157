"""Seed-OSS (ByteDance 2025): Llama with biases of q, k and v."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

SEED_OSS = Architecture(
    "seed_oss",
    Llama,
    "SeedOssForCausalLM",
    tensor_names={"post_attention_layernorm": "post_attention_norm"},
    ignores={"residual_dropout"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    biases={"self_attn.o_proj": "attention_out_bias", "self_attn": "attention_bias", "mlp": "mlp_bias"},
)
