"""Qwen2 and Qwen1.5 as mixtures (Yang et al. 2024): Qwen2 with experts and a gated MLP for all tokens."""

from __future__ import annotations

from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.llama import Block, Llama
from kukri.models.mixture import GatedSharedMLP, Mixture

# the names of the MLP for all tokens in safetensors
GATED_SHARED = {
    f"mlp.shared_expert.{part}": (f"mlp.shared_experts.{part}",)
    for part in ("gate_proj", "up_proj", "down_proj")
}


QWEN2_MOE = Architecture(
    "qwen2_moe",
    Llama.of(block_type=Block.of(mlp_type=Mixture.of(shared_type=GatedSharedMLP))),
    "Qwen2MoeForCausalLM",
    gguf="qwen2moe",
    joined=GATED_SHARED,
    ignores={
        *("max_window_layers", "layer_types"),
        "sliding_window",
    },
    defaults={
        **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "qkv_bias": True},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
    },
    biases={f"self_attn.{part}_proj": "qkv_bias" for part in "qkv"},
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
        gguf_normalized=False,
        interval="decoder_sparse_step",
        dense="mlp_only_layers",
        d_shared="shared_expert_intermediate_size",
    ),
)
