"""Hunyuan's mixtures (Tencent 2025): Hunyuan with experts and an MLP for all tokens of the same width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.errors import UnsupportedError, brief
from kukri.models.architecture import ExpertKeys
from kukri.models.hunyuan_v1_dense import HUNYUAN_V1_DENSE, HunyuanAttention
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """Return single numbers in place of lists of one number for each layer."""
    made = dict(config)
    for key in ("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"):
        value = config.get(key)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise UnsupportedError(f"key {key!r} is {brief(value)}: layers must have the same")
            made[key] = value[0]
    return {"num_shared_expert": 1, **made}


HUNYUAN_V1_MOE = replace(
    HUNYUAN_V1_DENSE,
    name="hunyuan_v1_moe",
    model=Llama.of(block_type=Block.of(attention_type=HunyuanAttention, mlp_type=Mixture)),
    hf_class="HunYuanMoEV1ForCausalLM",
    gguf="hunyuan-moe",
    joined={
        "mlp.gate.wg": ("mlp.gate",),
        **{
            f"mlp.shared_mlp.{part}": (f"mlp.shared_experts.{part}",)
            for part in ("gate_proj", "up_proj", "down_proj")
        },
    },
    respelled=_respelled,
    ignores=HUNYUAN_V1_DENSE.ignores
    | {"moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"},
    fixed={
        **{**HUNYUAN_V1_DENSE.fixed, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
        **{"norm_topk_prob": True, "group_limited_greedy": False, "routed_scaling_factor": 1.0},
    },
    defaults={**HUNYUAN_V1_DENSE.defaults, "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1},
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", True),
        gguf_normalized=True,
        n_used="moe_topk",
        n_shared="num_shared_expert",
    ),
)
