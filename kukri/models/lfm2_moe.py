"""LFM2's mixtures (Liquid AI 2025), 8B-A1B and 24B-A2B: LFM2 with experts in all layers but the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.models.architecture import ExpertKeys
from kukri.models.keys import Keys
from kukri.models.layers import GatedMLP
from kukri.models.lfm2 import LFM2, Lfm2, Lfm2Block, Older
from kukri.models.mixture import Mixture

_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    if keys.value("layer_types") is None:
        raise keys.error("layer_types", "is missing: it says which layers attend")


LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    model=Lfm2.of(block_type=Lfm2Block.of(mlp_type=Mixture, dense_type=GatedMLP, mlp_name="mlp")),
    hf_class="Lfm2MoeForCausalLM",
    gguf="lfm2moe",
    tensor_names={key: name for key, name in LFM2.tensor_names.items() if "feed_forward" not in key},
    joined={
        "feed_forward.gate": ("mlp.gate",),
        "feed_forward.expert": ("mlp.gate.e_score_correction",),
        **{f"feed_forward.{stored}": (f"mlp.{part}",) for stored, part in _PARTS.items()},
        **{f"feed_forward.experts.{stored}": (f"mlp.experts.{part}",) for stored, part in _PARTS.items()},
    },
    ignores=LFM2.ignores | Older().keys("hf"),
    aliases={"tie_embedding": "tie_word_embeddings"},
    defaults={
        **{"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1000000.0},
        **{"conv_L_cache": 3, "conv_bias": False, "num_experts": 32, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1792, "norm_topk_prob": True, "use_expert_bias": True},
        **{"num_dense_layers": 2, "routed_scaling_factor": 1.0},
    },
    read_hf=_read_hf,
    lenses=(),
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
        gguf_normalized=True,
        by_sigmoid=True,
        bias="use_expert_bias",
        scale="routed_scaling_factor",
        n_dense="num_dense_layers",
    ),
)
