"""InternLM3 (Shanghai AI Laboratory 2025): Llama with two keys for its biases. Its GGUF files say llama."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.llama import LLAMA

INTERNLM3 = replace(
    LLAMA,
    name="internlm3",
    hf_class="InternLM3ForCausalLM",
    gguf="llama",
    gguf_seeing="",
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
)
