"""EXAONE 3 for transformers 5.23, which lacks it: Llama, saved under the names that published files have."""

from __future__ import annotations

from typing import ClassVar

import transformers as tr
from huggingface_hub.dataclasses import strict
from transformers import conversion_mapping
from transformers.core_model_loading import WeightRenaming


@strict
class ExaoneConfig(tr.LlamaConfig):
    """EXAONE's keys and their defaults."""

    model_type = "exaone"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    default_theta = 5e5
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5


class ExaoneModel(tr.LlamaModel):
    """Llama without its head."""

    config_class = ExaoneConfig


class ExaoneForCausalLM(tr.LlamaForCausalLM):
    """Llama."""

    config_class = ExaoneConfig


tr.AutoConfig.register("exaone", ExaoneConfig, exist_ok=True)
tr.AutoModel.register(ExaoneConfig, ExaoneModel, exist_ok=True)
tr.AutoModelForCausalLM.register(ExaoneConfig, ExaoneForCausalLM, exist_ok=True)
conversion_mapping.register_checkpoint_conversion_mapping(
    "exaone",
    [
        WeightRenaming(r"^transformer\.wte\.", "model.embed_tokens."),
        WeightRenaming(r"^transformer\.h\.", "model.layers."),
        WeightRenaming(r"^transformer\.ln_f\.", "model.norm."),
        WeightRenaming(r"\.attn\.attention\.", ".self_attn."),
        WeightRenaming(r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        WeightRenaming(r"\.ln_1\.", ".input_layernorm."),
        WeightRenaming(r"\.ln_2\.", ".post_attention_layernorm."),
        WeightRenaming(r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        WeightRenaming(r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        WeightRenaming(r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ],
    overwrite=True,
)
