"""Ling 2.0 (Ling team 2025): Qwen3's attention, GLM-4.5's mixture, and names of its own."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.architecture import Architecture
from kukri.models.deepseek_v3 import EXPERTS
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.qwen3 import Qwen3Attention

BAILING_MOE = Architecture(
    "bailing_moe",
    Llama.of(
        block_type=Block.of(attention_type=Qwen3Attention, mlp_type=Mixture),
        embedding_name="model.word_embeddings",
    ),
    "BailingMoeV2ForCausalLM",
    embedding="model.word_embeddings",
    gguf="bailingmoe2",
    tensor_names={"model.word_embeddings": "token_embd"},
    joined={
        "attention.query_key_value": ("self_attn.qkv_proj",),
        "attention.dense": ("self_attn.o_proj",),
        "attention.query_layernorm": ("self_attn.q_norm",),
        "attention.key_layernorm": ("self_attn.k_norm",),
        "mlp.gate.expert": ("mlp.gate.e_score_correction",),
    },
    partial_rotary=True,
    ignores={
        *("router_dtype", "mtp_loss_scaling_factor", "embedding_dropout"),
        *("output_dropout", "max_window_layers", "use_rmsnorm", "moe_shared_expert_intermediate_size"),
    },
    fixed={
        **{"use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "num_nextn_predict_layers": 0},
        **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    },
    defaults={
        **{"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "n_group": 8, "topk_group": 4},
        **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
        **{"num_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        **{"first_k_dense_replace": 1, "rope_theta": 6e5, "head_dim": 128},
    },
    experts=replace(EXPERTS, n_experts="num_experts", n_shared="num_shared_experts"),
)
