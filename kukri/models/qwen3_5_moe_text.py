"""Qwen3.5 and 3.6 as mixtures, such as 35B-A3B: Qwen3.5 with experts and a gated MLP for all tokens."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.architecture import ExpertKeys
from kukri.models.llama import Llama
from kukri.models.mixture import GatedSharedMLP, Mixture
from kukri.models.qwen2_moe import GATED_SHARED
from kukri.models.qwen3_5_text import QWEN3_5_TEXT, Qwen35Block

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    model=Llama.of(block_type=Qwen35Block.of(mlp_type=Mixture.of(shared_type=GatedSharedMLP))),
    hf_class="Qwen3_5MoeForCausalLM",
    gguf="qwen35moe",
    joined=GATED_SHARED,
    keys={"d_ffn": ("feed_forward_length", "moe_intermediate_size")},  # no layer has another MLP
    ignores=QWEN3_5_TEXT.ignores | {"intermediate_size"},
    defaults={
        **QWEN3_5_TEXT.defaults,
        **{"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", True),
        gguf_normalized=True,
        d_shared="shared_expert_intermediate_size",
    ),
)
