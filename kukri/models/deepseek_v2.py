"""DeepSeek-V2-Lite (DeepSeek-AI 2024): latent attention, and small experts next to an MLP for all tokens."""

from __future__ import annotations

from kukri.models import latent
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.lenses import Fixed
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture

DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    Llama.of(block_type=Block.of(attention_type=latent.LatentAttention, mlp_type=Mixture)),
    "DeepseekV2ForCausalLM",
    gguf="deepseek2",
    interleaved_rope=True,
    hf_interleaved_rope=True,
    keys={"d_head": ("attention.key_length", latent.ROTARY)},
    tensor_names=latent.TENSOR_NAMES,
    ignores={
        *("head_dim", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("n_group", "topk_group", "rope_interleave", "qk_head_dim"),
    },
    fixed={"scoring_func": "softmax", "moe_layer_freq": 1},
    defaults={
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"moe_intermediate_size": 1407, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    },
    biases=latent.BIASES,
    experts=ExpertKeys(
        *("n_routed_experts", "moe_intermediate_size", False),
        gguf_normalized=False,
        scale="routed_scaling_factor",
        n_shared="n_shared_experts",
        n_dense="first_k_dense_replace",
    ),
    lenses=(
        latent.Latent(),
        Fixed("hf", "topk_method", "greedy"),
        Fixed("hf", "norm_topk_prob", False),
    ),
)
