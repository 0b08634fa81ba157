"""GLM-4-0414 (Z.ai 2025): Llama with norms on both sides of attention and MLP, and gate and up in one matrix.

Half of each head rotates. Rows of q and k are in pairs in both formats.
"""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.gemma2 import Gemma2Block
from kukri.models.llama import Llama
from kukri.models.phi3 import Phi3MLP

GLM4 = Architecture(
    "glm4",
    Llama.of(
        block_type=Gemma2Block.of(
            mlp_type=Phi3MLP,
            mlp_norm_name="post_attention_layernorm",
            post_norm_names=("post_self_attn_layernorm", "post_mlp_layernorm"),
        )
    ),
    "Glm4ForCausalLM",
    interleaved_rope=True,
    hf_interleaved_rope=True,
    partial_rotary=True,
    tensor_names={
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    defaults={
        **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
        "partial_rotary_factor": 0.5,
    },
    biases={"self_attn.o_proj": False, "self_attn": "attention_bias"},
)
