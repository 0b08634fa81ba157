"""Flint (Recursive Superintelligence 2026): Qwen3's mixture with windows, sinks, and an MLP for all tokens.

Scores of experts are sigmoids. Layers that see all do not rotate.
"""

from __future__ import annotations

from typing import Any

from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.gpt_oss import GptOssAttention
from kukri.models.lenses import ROTATING_WINDOWS
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.qwen2_moe import GATED_SHARED
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.stored import PARAMETER, Stored


class FlintAttention(GptOssAttention, Qwen3Attention):
    """Attention with normed heads, and a sink for each."""


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the layers that its class takes where it names none."""
    n = config.get("num_hidden_layers")
    last = n - 1 if type(n) is int else 0
    sees_all = [i < 2 or i % 4 == 1 or i == last for i in range(last + 1)]
    made = ["full_attention" if sees else "sliding_attention" for sees in sees_all]
    return {**config, "layer_types": config.get("layer_types") or made}


FLINT = Architecture(
    "flint",
    Llama.of(block_type=Block.of(attention_type=FlintAttention, mlp_type=Mixture)),
    "FlintForCausalLM",
    gguf="",
    in_gguf=False,  # the gguf package has no names for it yet
    joined={**GATED_SHARED, "self_attn.softmax_offset": ("self_attn.sinks",)},
    tensor_names={"self_attn.softmax_offset": Stored("", PARAMETER)},
    respelled=_respelled,
    reads={"sliding_window", "layer_types"},
    ignores={"router_aux_loss_coef"},
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513, "norm_topk_prob": True},
        **{"num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 1024, "decoder_sparse_step": 1, "mlp_only_layers": [0, 1]},
    },
    biases={"self_attn": "attention_bias"},
    lenses=(ROTATING_WINDOWS,),
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
        gguf_normalized=True,
        by_sigmoid=True,
        interval="decoder_sparse_step",
        dense="mlp_only_layers",
        d_shared="shared_expert_intermediate_size",
    ),
)
