"""`LLM(directory)`: what transformers saved gives transformers' answer, for each architecture that runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kukri import LLM, SamplingParams
from kukri.errors import ConfigError, FormatError, UnsupportedError, UnusedTensorError
from kukri.formats.checkpoint import open_checkpoint
from kukri.kernels import make_backend
from kukri.kernels.cache import KVType
from kukri.kernels.quantize import quantize
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.models import ARCHITECTURES, load_model
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.quick import SOME_ARCHITECTURES, quick, some

with lazy_imports():
    import torch
    import transformers as tr

    from tests.models import bailing_class, exaone_class, minicpm_class, smallthinker_class

N_VOCAB = 272  # 12 rows more than there are tokens, as Qwen pads
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 259,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0]},
}
LOCAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PHI4_MINI = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    },
}
GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "vocab_size_per_layer_input": N_VOCAB},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 16},
}
LATENT_MOE = {
    **{**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
NEMOTRON_H = {
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 16},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24},
}
# kind of checkpoint -> name of the configuration's class and what it is given
OLMO_HYBRID = {
    **{"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 4},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "initializer_range": 0.1,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied-llama3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": 9},
    ),
    "llama-yarn-unrounded": ("LlamaConfig", {"rope_parameters": {**YARN, "truncate": False, "factor": 3.0}}),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "smollm3-yarn": ("SmolLM3Config", {"rope_parameters": YARN}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "phi3-as-phi4-mini": (
        "Phi3Config",
        {
            **{"rope_parameters": PHI4_MINI, "original_max_position_embeddings": 16},
            **{"sliding_window": 262144, "tie_word_embeddings": True},
        },
    ),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi-odd-heads": (
        "PhiConfig",
        {
            "partial_rotary_factor": 0.5,
            "hidden_size": 100,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"rope_parameters": {**YARN, "truncate": False}},
    ),
    "olmoe": ("OlmoeConfig", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True},
    ),
    "granite": (
        "GraniteConfig",
        {
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "tie_word_embeddings": True},
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            **{"sliding_window": 9, "layer_rope_theta": [0, 500.0, 10000, 500.0], "rope_parameters": YARN},
            **{"attention_multiplier": 0.25, "residual_multiplier": 0.22},
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9, "attention_multiplier": 0.25},
    ),
    "granite-plain": (
        "GraniteConfig",
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.25},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma2-uncapped": (
        "Gemma2Config",
        {
            **{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
            **{"query_pre_attn_scalar": 24, "layer_types": ["full_attention"] * 4},
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "rope_parameters": {**LOCAL, "full_attention": {"rope_type": "default", "rope_theta": 1e5}},
        },
    ),
    "gemma3_text-pattern": (
        "Gemma3TextConfig",
        {
            **{**GEMMA, "sliding_window_pattern": 3, "final_logit_softcapping": 10.0},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **{**GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2},
            **{"use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
    ),
    "gemma4_text-keys": (
        "Gemma4TextConfig",
        {
            **{**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
        },
    ),
    "gemma4_moe_text": (
        "Gemma4TextConfig",
        {
            **{**GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2},
            **{"moe_intermediate_size": 48, "hidden_size_per_layer_input": 0},
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "rope_parameters": LOCAL["full_attention"]}),
    "ernie4_5-biases": (
        "Ernie4_5Config",
        {"use_bias": True, "head_dim": 32, "rope_parameters": LOCAL["full_attention"]},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo": ("OlmoConfig", {}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-plain": ("StableLmConfig", {"tie_word_embeddings": True, "partial_rotary_factor": 0.5}),
    "internlm3": ("InternLM3Config", {"head_dim": 16}),
    "internlm3-biases": ("InternLM3Config", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan_v1_dense-alpha": (
        "HunYuanDenseV1Config",
        {
            **{"head_dim": 32, "attention_bias": True},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 9.0, "factor": 1.0},
        },
    ),
    "exaone": ("ExaoneConfig", {"rope_parameters": LLAMA3}),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-windows": ("Exaone4Config", {"sliding_window": 9}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "glm4-plain": ("Glm4Config", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 9}),
    "cohere2-scaled": (
        "Cohere2Config",
        {"logit_scale": 0.5, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "logits_scaling": 4.0},
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22},
        },
    ),
    "arcee": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "nemotron": ("NemotronConfig", {"partial_rotary_factor": 0.5}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 48},
            **{"attention_multiplier": 0.25, "residual_multiplier": 0.22},
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "initializer_range": 0.1},
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **{"layer_types": ["conv", "full_attention"] * 2, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_dense_layers": 1, "routed_scaling_factor": 2.0},
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "head_dim": 16},
            "rope_parameters": LOCAL["full_attention"],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
            **{"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True},
        },
    ),
    "bailing_moe": (
        "BailingMoeV2Config",
        {
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
            **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32},
            **{"sliding_window": 9, "mup_enabled": True, "route_scale": 1.5},
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}),
    "olmo2-biases-yarn": ("Olmo2Config", {"attention_bias": True, "rope_parameters": YARN}),
    "olmo3": ("Olmo3Config", {"sliding_window": 5, "rope_parameters": LOCAL}),
    "olmo3-yarn": (
        "Olmo3Config",
        {"sliding_window": 5, "rope_parameters": {**LOCAL, "full_attention": YARN}},
    ),
    "olmo3-layers": (
        "Olmo3Config",
        {
            **{"sliding_window": 9, "rope_parameters": LOCAL},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "max_position_embeddings": 512},
    ),
    "lfm2-biases": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_bias": True, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "head_dim": 32, "max_position_embeddings": 512},
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
            **{"shared_intermediate_size": 96, "mamba_n_heads": 4, "mamba_d_state": 32},
            **{"layer_types": ["mamba", "mamba", "attention", "mamba"], "max_position_embeddings": 512},
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22},
        },
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybridConfig",
        {
            **{"num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 8},
            **{
                "mamba_n_groups": 2,
                "mamba_d_state": 16,
                "layer_types": ["mamba", "attention"] * 2,
                "logits_scaling": 4.0,
            },
            **{"position_embedding_type": "rope", "tie_word_embeddings": True, "attention_bias": True},
        },
    ),
    "granitemoehybrid-attention": (
        "GraniteMoeHybridConfig",
        {
            **{"num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 8},
            **{"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
            "attention_multiplier": 0.25,
        },
    ),
    "qwen3_5_text-grouped": (
        "Qwen3_5TextConfig",
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "head_dim": 32, "tie_word_embeddings": True},
        },
    ),
    "lfm2-adjusted": (
        "Lfm2Config",
        {
            **{"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 64, "conv_L_cache": 4},
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT_MOE, "q_lora_rank": None}),
    "deepseek_v2-yarn": (
        "DeepseekV2Config",
        {
            **{**LATENT_MOE, "num_experts_per_tok": 8},  # all: none is chosen by llama.cpp's rounding
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT_MOE, "n_group": 2, "attention_bias": True}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT_MOE),
    "minicpm3": ("MiniCPM3Config", LATENT),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-longrope": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 4, "sliding_window": 9, "original_max_position_embeddings": 16},
            "rope_parameters": {
                **{**LONGROPE, "long_factor": LONGROPE["short_factor"]},
                **{"short_mscale": 1.25, "long_mscale": 1.25},
            },
        },
    ),
    "smallthinker": (
        "SmallThinkerConfig",
        {
            **{"rope_layout": [0, 1, 1, 1], "sliding_window_layout": [0, 1, 1, 1], "sliding_window_size": 9},
            **{"moe_num_primary_experts": 8, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 32},
        },
    ),
    "smallthinker_softmax": (
        "SmallThinkerConfig",
        {
            **{"rope_layout": [1] * 4, "sliding_window_layout": [0] * 4, "tie_word_embeddings": True},
            **{"moe_num_primary_experts": 8, "moe_num_active_primary_experts": 8, "moe_ffn_hidden_size": 32},
            **{"moe_primary_router_apply_softmax": True, "initializer_range": 0.15},
        },
    ),
    "apertus": ("ApertusConfig", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "minicpm": ("MiniCPMConfig", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}),
    "minicpm-longrope": (
        "MiniCPMConfig",
        {"rope_parameters": LONGROPE, "scale_emb": 12, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "rope_parameters": {
                **{**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.375},
                **{"mscale": 1.0, "mscale_all_dim": 1.0},
            }
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 32},
            **{"embedding_multiplier": 4.0, "lm_head_multiplier": 0.25, "key_multiplier": 0.375},
            **{"attention_out_multiplier": 0.75, "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.5},
            **{"mlp_multipliers": [0.75, 1.25], "ssm_multipliers": [0.5, 1.25, 0.75, 1.5, 0.875]},
        },
    ),
    "falcon_h1-normed": (
        "FalconH1Config",
        {
            **{"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
            **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
            "embedding_multiplier": 3.0,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 24},
    ),
    "mamba2-tied": (
        "Mamba2Config",
        {
            **{"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "use_bias": True},
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("NemotronHConfig", {**NEMOTRON_H, "mlp_bias": True}),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            **{**NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5},
        },
    ),
    "nemotron_h_moe-latent": (
        "NemotronHConfig",
        {
            **{**NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"moe_shared_expert_intermediate_size": 48, "moe_latent_size": 40, "mlp_bias": True},
        },
    ),
    "starcoder2-plain": ("Starcoder2Config", {"use_bias": False, "tie_word_embeddings": False}),
    "olmo_hybrid": ("OlmoHybridConfig", {**OLMO_HYBRID, "rope_parameters": {"rope_theta": None}}),
    "lfm3": (
        "Lfm3Config",
        {
            **{"layer_types": ["conv", "conv", "full_attention", "sliding_attention"], "sliding_window": 9},
            "max_position_embeddings": 512,
        },
    ),
    "flint": (
        "FlintConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32},
            **{"shared_expert_intermediate_size": 48, "sliding_window": 9, "mlp_only_layers": [1]},
        },
    ),
    "bitnet": ("BitNetConfig", {"attention_bias": True}),
    "olmo_hybrid-rope": ("OlmoHybridConfig", {**OLMO_HYBRID, "attention_bias": True}),
}
NO_GGUF = {name for name, architecture in ARCHITECTURES.items() if not architecture.in_gguf}
ALONE = [kind for kind in CHECKPOINTS if kind.split("-")[0] in NO_GGUF]
# transformers' dynamic RoPE is that of the tokens so far, kukri's that of the longest context
RUN = [kind for kind in CHECKPOINTS if kind.split("-")[0] in ARCHITECTURES and kind != "llama-dynamic"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# LLM's cache is float16, which moves these logits by up to 0.014 (measured, the same on both backends)
TIE = 0.03
PROMPT = "The capital of France is Paris."


def byte_tokenizer() -> tr.PreTrainedTokenizerFast:
    """A token for each byte, and BOS before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 256)])
    return tr.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


HUB_CLASSES = {  # modules of classes that stand for classes on the hub
    "BailingMoeV2Config": bailing_class,
    "ExaoneConfig": exaone_class,
    "MiniCPMConfig": minicpm_class,
    "SmallThinkerConfig": smallthinker_class,
}


def config_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return the configuration's class of a kind, and what it is given."""
    from tests.models import token_by_token  # noqa: F401

    name, facts = CHECKPOINTS[kind]
    return getattr(HUB_CLASSES.get(name, tr), name), facts


def make(directory: Path, kind: str, dtype: torch.dtype | str = "float32", **save: Any) -> tuple[Path, Any]:
    """A directory as transformers saves it, and its model in float32: copies, which a test may change."""
    files, model, random_state = _saved(kind, repr(CHECKPOINTS[kind]), dtype, tuple(save.items()))
    torch.set_rng_state(random_state)  # what a test draws next does not depend on the tests before it
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory, deepcopy(model)


@cache
def _saved(
    kind: str, made_of: str, dtype: torch.dtype | str, save: tuple[tuple[str, Any], ...]
) -> tuple[dict[str, bytes], Any, torch.Tensor]:
    """The files that transformers saves, its model in float32, and the random state, made once a process."""
    config_class, facts = config_of(kind)
    torch.manual_seed(3)
    model = tr.AutoModelForCausalLM.from_config(
        config_class(**{**TINY, **facts}), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                "norm" in name or "bias" in name or "act_fn" in name or name.endswith("scale")
            ):  # else all ones or zeros, and a mistake would not show
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.5 + torch.rand(1))
            elif name.endswith("bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model.to(dtype).eval()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, **dict(save))
        byte_tokenizer().save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, model.float(), torch.get_rng_state()


def theirs(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def exact_logits(
    directory: Path,
    ids: list[int],
    max_context: int | None = None,
    backend_name: str = "reference",
    kv_type: KVType = "f32",
) -> np.ndarray:
    """Logits [T, V] on the reference backend with a float32 cache, which LLM does not have, or on another.

    RoPE is that of a model loaded for `max_context` tokens; None: the checkpoint's.
    """
    with open_checkpoint(directory) as checkpoint:
        config = checkpoint.config
        config = replace(config, max_context=max_context or config.max_context)
        model = load_model(checkpoint.weights(config), config)
    n, backend = len(ids), make_backend(backend_name)
    n_pages = -(-n // backend.page_tokens)
    cache = backend.new_cache(model.cache_layout, n_pages, 1, kv_type)
    program = backend.compile(model, cache, StepLimits(n, 1, n, n_pages))
    steps = np.arange(n, dtype=np.int32)
    ends = np.array([0, n], np.int32)
    table = np.arange(n_pages, dtype=np.int32)[None]
    return program(ForwardBatch(np.array(ids, np.int32), steps, steps, ends, ends[1:], table, steps)).numpy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama")[0]


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


@pytest.mark.parametrize("kind", RUN)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """A tensor under another name, a key of config.json misread, rows in another order."""
    directory, model = make(tmp_path, kind)
    ids = np.random.default_rng(0).integers(0, N_VOCAB, 50).tolist()
    if kind.startswith("qwen3_5_text"):  # on some processors its float32 is more than 1e-4 off itself
        model.double()
    want = theirs(model, ids)
    # float32 sums through 4 layers; values are of size 1 to 30
    np.testing.assert_allclose(
        exact_logits(directory, ids), want, atol=1e-4 * max(1.0, np.abs(want).max() / 7)
    )


# one of each sort of layers is enough for tensors and kernels of BF16
_GREEDY = [
    *[("float32", kind) for kind in RUN],
    *quick([("bfloat16", kind) for kind in RUN], [("bfloat16", kind) for kind in SOME_ARCHITECTURES]),
]


@pytest.mark.full(but=some("float32-{}"))
@pytest.mark.parametrize(("dtype", "kind"), _GREEDY)
def test_greedy_ids_on_the_cpu(kind: str, dtype: str, tmp_path: Path) -> None:
    """A model that drifts from transformers' answer, in the types that checkpoints are saved in."""
    directory, model = make(tmp_path, kind, dtype)
    with LLM(directory) as llm:
        want_ids = tr.PreTrainedTokenizerFast.from_pretrained(directory).encode(PROMPT)
        result = llm.generate(PROMPT, GREEDY)
        matrices = [p for p in llm.model.parameters if len(p.shape) > 1 and p.name.endswith(".weight")]
        assert {p.type for p in matrices} == {"F32" if dtype == "float32" else "BF16"}
    assert result.prompt_token_ids == want_ids
    logits = theirs(model, want_ids + result.token_ids)[len(want_ids) - 1 : -1]
    chosen = logits[np.arange(len(logits)), result.token_ids]
    assert (logits.max(axis=1) - chosen).max() < TIE
    assert (logits.argmax(axis=1) == result.token_ids).sum() >= len(logits) - 1


def test_shards_give_the_same(llama: Path, tmp_path: Path) -> None:
    """A sharded checkpoint that is another model."""
    directory, _ = make(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    ids = list(range(30))
    np.testing.assert_array_equal(exact_logits(directory, ids), exact_logits(llama, ids))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "IQ4_NL"])
def test_quantize_packs_while_loading(llama: Path, kind: str) -> None:
    """A type other than asked for, or weights packed wrongly: rounding alone may differ."""
    ids = list(range(40))
    with open_checkpoint(llama, kind) as checkpoint:
        packed = checkpoint.weights(checkpoint.config).matrix("model.layers.0.mlp.up_proj.weight", (96, 64))
    with open_checkpoint(llama) as checkpoint:
        plain = checkpoint.weights(checkpoint.config).matrix("model.layers.0.mlp.up_proj.weight", (96, 64))
    rows = dequantize(plain.data, plain.type)
    np.testing.assert_array_equal(packed.data, quantize(rows, QUANT_TYPES[kind]))
    with LLM(llama, quantize=kind, backend="reference") as llm:
        assert {p.type for p in llm.model.parameters if len(p.shape) == 2} == {kind}
        reference = llm.logits(ids)
    with LLM(llama, quantize=kind) as llm:
        got = llm.logits(ids)
    assert np.corrcoef(got.ravel(), reference.ravel())[0, 1] > 0.99


def test_quantize_takes_the_type_that_fits_the_rows(llama: Path, tmp_path: Path) -> None:
    """K-quants refused, or blocks that run over the ends of rows, where rows are no multiple of 256."""
    with LLM(llama, quantize="Q4_K", backend="reference") as llm:
        assert {p.type for p in llm.model.parameters if len(p.shape) == 2} == {"Q5_0"}
    torch.manual_seed(3)
    wide = tr.LlamaConfig(**{**TINY, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 1})
    tr.AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    ids = list(range(40))
    with LLM(tmp_path, quantize="Q4_K", backend="reference") as llm:
        want = llm.logits(ids)
    with LLM(tmp_path, quantize="Q4_K") as llm:
        types = {p.name.split(".")[-2]: p.type for p in llm.model.parameters if len(p.shape) == 2}
        got = llm.logits(ids)
    assert types["down_proj"] == "Q5_0"
    assert {kind for name, kind in types.items() if name != "down_proj"} == {"Q4_K"}
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.99


def test_nan_weights_are_not_packed(llama: Path, tmp_path: Path) -> None:
    """A diverged checkpoint that becomes finite nonsense once packed."""
    model = tr.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"'model.layers.1.mlp.up_proj.weight'.*NaN or infinite.*Q8_0"):
        LLM(tmp_path, quantize="Q8_0")


def test_quantize_says_what_cannot_be(llama: Path, smollm2_path: Path) -> None:
    """A promise of a type that is not one, or of packing a packed file, that is silently not kept."""
    with pytest.raises(
        ConfigError,
        match=r"'Q4_X' is not supported for packing weights while loading: use one of Q4_0, .*Q4_K",
    ):
        LLM(llama, quantize="Q4_X")
    with pytest.raises(ConfigError, match="is packed already"):
        LLM(smollm2_path, quantize="Q8_0")


@pytest.mark.full
def test_quantize_on_the_command_line(llama: Path) -> None:
    """A flag that is read and not handed on: with Q4_X it must be refused, with Q8_0 say something."""
    command = [sys.executable, "-m", "kukri", "run", "--raw", "Hi", "-n", "2", "-m", str(llama), "--quantize"]
    bad = subprocess.run([*command, "Q4_X"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert bad.returncode == 2
    assert "'Q4_X' is not supported for packing weights while loading: use one of Q4_0" in bad.stderr
    good = subprocess.run(
        [*command, "Q8_0", "--json"], capture_output=True, stdin=subprocess.DEVNULL, check=True
    )
    assert json.loads(good.stdout)["n_generated"] == 2


def test_the_edge_of_text(llama: Path) -> None:
    """BOS lost, a generation that ends elsewhere than transformers', a row without a token that crashes."""
    with LLM(llama, backend="reference") as llm:
        assert llm.tokenizer.eos_ids == {257, 259}
        assert llm.tokenizer.encode("a", add_special=True)[0] == 256
        assert llm.tokenizer.decode([N_VOCAB - 1]) == ""
        assert llm.config.name == llama.name


def edit_config(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"hidden_size": 68}, FormatError, r"'model\.embed_tokens\.weight'.*has shape \(272, 64\) where"),
        ({"num_hidden_layers": 5}, FormatError, r"'model\.layers\.4\.input_layernorm\.weight'.*is missing"),
        ({"num_hidden_layers": 3}, UnusedTensorError, r"no layer of llama takes: 'model\.layers\.3"),
        ({"model_type": "gpt9"}, UnsupportedError, "'model_type' 'gpt9' is not supported"),
        ({"vocab_size": 100}, FormatError, "tokenizer|eos_token_id"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_that_does_not_fit(broken: Path, keys: Any, error: type[Exception], message: str) -> None:
    """A traceback from NumPy, or a model that runs with weights left out."""
    edit_config(broken, **keys)
    with pytest.raises(error, match=message) as caught:
        LLM(broken)
    assert "\n" not in str(caught.value)


def test_cut_and_absent_files(broken: Path) -> None:
    """A half-downloaded checkpoint that starts."""
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"model\.safetensors.*is cut short"):
        LLM(broken)
    weights.unlink()
    with pytest.raises(FormatError, match=r"must hold model\.safetensors or"):
        LLM(broken)
    (broken / "config.json").unlink()
    with pytest.raises(FormatError, match=r"is a directory"):
        LLM(broken)
