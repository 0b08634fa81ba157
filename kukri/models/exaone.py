"""EXAONE 3 and 3.5 (LG AI Research 2024): Llama under GPT-2's names."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

_ATTENTION = {**{f"{part}_proj": f"{part}_proj" for part in "qkv"}, "out_proj": "o_proj"}
_MLP = {"c_fc_0": "gate_proj", "c_fc_1": "up_proj", "c_proj": "down_proj"}

EXAONE = Architecture(
    "exaone",
    Llama,
    "ExaoneForCausalLM",
    hf_prefix="transformer.",
    hf_names={"embed_tokens.": "wte.", "layers.": "h.", "norm.": "ln_f."},
    joined={
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        **{f"attn.attention.{stored}": (f"self_attn.{own}",) for stored, own in _ATTENTION.items()},
        **{f"mlp.{stored}": (f"mlp.{own}",) for stored, own in _MLP.items()},
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    ignores={"embed_dropout", "pretraining_tp"},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
