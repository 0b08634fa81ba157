"""ERNIE 4.5 as mixtures (Baidu 2025), such as 21B-A3B: a bias chooses experts and does not weigh them."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.architecture import ExpertKeys
from kukri.models.ernie4_5 import ERNIE4_5
from kukri.models.lenses import Stated
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.stored import BIAS_PARAMETER, ONE_ROW, Stored

ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    model=Llama.of(block_type=Block.of(mlp_type=Mixture)),
    hf_class="Ernie4_5_MoeForCausalLM",
    gguf="ernie4_5-moe",
    joined={"mlp.moe_statics.e_score_correction": ("mlp.gate.e_score_correction",)},
    tensor_names={"mlp.gate.e_score_correction": Stored("exp_probs_b", BIAS_PARAMETER, ONE_ROW)},
    ignores={
        *("moe_norm_min", "moe_capacity", "moe_gate"),
        *("moe_use_aux_free", "num_nextn_predict_layers"),
    },
    unused=r"model\.mtp_.+",
    defaults={
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1},
    },
    biases={**ERNIE4_5.biases, "mlp.gate": False},
    lenses=(Stated("gguf", "interleave_moe_layer_step", 1),),  # a key that other readers require
    experts=ExpertKeys(
        *("moe_num_experts", "moe_intermediate_size", True),
        gguf_normalized=True,
        n_used="moe_k",
        bias=True,
        n_shared="moe_num_shared_experts",
        n_dense="moe_layer_start_index",
        interval="moe_layer_interval",
        last="moe_layer_end_index",
    ),
)
