"""GLM-4.5's mixtures (Z.ai 2025): Llama with experts in groups, chosen by sigmoids and a bias."""

from __future__ import annotations

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.deepseek_v3 import EXPERTS
from kukri.models.layers import Attention
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.weights import WeightSource

_NORMED = "use_qk_norm"


def _attention(source: WeightSource, name: str, config: ModelConfig, layer: int) -> Attention:
    """Attention with norms of heads if the checkpoint has them."""
    kind = Qwen3Attention if source.has(f"{name}.q_norm.weight") else Attention
    return kind(source, name, config, layer)


GLM4_MOE = Architecture(
    "glm4_moe",
    Llama.of(block_type=Block.of(attention_type=staticmethod(_attention), mlp_type=Mixture)),
    "Glm4MoeForCausalLM",
    gguf="glm4moe",
    next_token="layer",
    partial_rotary=True,
    tensor_names={"post_attention_layernorm": "post_attention_norm"},
    reads={_NORMED},
    ignores={"num_nextn_predict_layers", "num_mtp_layers"},
    defaults={
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_group": 1},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "topk_group": 1, "norm_topk_prob": True},
        "first_k_dense_replace": 1,
    },
    biases={"self_attn.o_proj": False, "self_attn": "attention_bias"},
    experts=EXPERTS,
)
