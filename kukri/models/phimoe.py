"""Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE (Microsoft 2024): LayerNorms, and sparsemixer's two experts.

Nearly always the weight of both is 1: it is a share among experts whose logits are within 2%.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.keys import Keys
from kukri.models.layers import LayerNorm
from kukri.models.lenses import Number
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.rope import attention_factor

_MSCALES = ("short_mscale", "long_mscale")
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    keys.expect("num_experts_per_tok", 2)
    scaling = facts["rope"].scaling
    if scaling is None:
        return
    if scaling.kind != "longrope":
        raise keys.unsupported("rope_scaling", f"is {scaling.kind}: only longrope is supported")
    where = "rope_parameters" if keys.value("rope_parameters") else "rope_scaling"
    short, long = (keys.as_positive(where, keys.value(where).get(name)) for name in _MSCALES)
    if short != long:
        raise keys.unsupported(where, f"has a 'short_mscale' of {short:g} and a 'long_mscale' of {long:g}")
    scaling = replace(scaling, attention_factor=long)
    facts["rope"] = replace(facts["rope"], scaling=scaling)


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    if config.rope.scaling is not None:
        keys["rope_scaling"] |= dict.fromkeys(_MSCALES, attention_factor(config.rope.scaling))


PHIMOE = Architecture(
    "phimoe",
    Llama.of(block_type=Block.of(norm_type=LayerNorm, mlp_type=Mixture)),
    "PhimoeForCausalLM",
    joined={
        "block_sparse_moe.gate": ("mlp.gate",),
        **{
            f"block_sparse_moe.experts.{stored}": (f"mlp.experts.{part}",)
            for stored, part in _EXPERTS.items()
        },
    },
    reads={
        *("sliding_window", "original_max_position_embeddings"),
    },
    ignores={*_MSCALES, "input_jitter_noise"},
    defaults={
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
    },
    biases={"self_attn": "attention_bias", "lm_head": "lm_head_bias"},
    experts=ExpertKeys("num_local_experts", "intermediate_size", normalized=False, gguf_normalized=False),
    read_hf=_read_hf,
    write_hf=_write_hf,
    lenses=(
        Number(
            *("mixture.tolerance", "router_jitter_noise", ""),
            usual=0.01,
            most=0.5,
            load=lambda jitter, facts: 2 * jitter,
            store=lambda tolerance, config: tolerance / 2,
        ),
    ),
)
