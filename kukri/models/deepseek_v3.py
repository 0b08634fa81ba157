"""DeepSeek-V3 (DeepSeek-AI 2024) and GLM-4.7-Flash (Z.ai 2026): experts chosen by sigmoids and a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.models import latent
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.deepseek_v2 import DEEPSEEK_V2
from kukri.models.keys import Keys
from kukri.models.lenses import Fixed, Stated

# the names that others took from it
EXPERTS = ExpertKeys(
    *("n_routed_experts", "moe_intermediate_size", "norm_topk_prob"),
    gguf_normalized=False,
    by_sigmoid=True,
    bias=True,
    scale="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    n_shared="n_shared_experts",
    n_dense="first_k_dense_replace",
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    gguf="deepseek2",
    ignores=DEEPSEEK_V2.ignores - {"n_group", "topk_group", "rope_interleave"}
    | {"num_nextn_predict_layers", "num_mtp_layers"},
    next_token="layer",
    fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    defaults={
        **DEEPSEEK_V2.defaults,
        **{"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "n_group": 8},
        **{"topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5},
    },
    experts=EXPERTS,
    lenses=(
        latent.Latent(),
        Fixed("hf", "rope_interleave", True),
        Stated("hf", "num_nextn_predict_layers", 0),
    ),
)
_TYPES = "mlp_layer_types"


def _read_glm(keys: Keys, facts: dict[str, Any]) -> None:
    """Which layers are dense, by a list or, in older files, by how many come first."""
    if facts["rope"].rotary_dim != facts["d_head"]:
        raise keys.unsupported("partial_rotary_factor", "must be 1: rotating part of a head is not supported")
    if keys.value(_TYPES) is not None:
        types = keys.first(_TYPES, str, facts["n_layers"])
        if unknown := set(types) - {"dense", "sparse"}:
            raise keys.unsupported(_TYPES, f"names {min(unknown)!r:.60}: only dense and sparse are supported")
        layers = zip(facts["layers"], types)
        facts["layers"] = tuple(replace(layer, is_dense=kind == "dense") for layer, kind in layers)


def _write_glm(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys["partial_rotary_factor"] = 1.0
    keys[_TYPES] = ["dense" if layer.is_dense else "sparse" for layer in config.layers]


GLM4_MOE_LITE: Architecture = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    hf_class="Glm4MoeLiteForCausalLM",
    gguf="deepseek2",
    partial_rotary=True,
    reads=DEEPSEEK_V3.reads | {_TYPES},
    defaults={
        **DEEPSEEK_V3.defaults,
        **{"n_routed_experts": 64, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
        **{"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1},
        **{"num_experts_per_tok": 4, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    },
    read_hf=_read_glm,
    write_hf=_write_glm,
)
