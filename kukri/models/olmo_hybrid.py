"""OLMo Hybrid (Ai2 2026): OLMo 3's attention in each fourth layer, and the gated delta rule in the others.

Layers with the rule have their norms before its parts, and what it writes counts double, so that states
may change sign (Grazzi et al. 2024). Published checkpoints do not rotate.
"""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture, RecurrentKeys
from kukri.models.keys import Keys
from kukri.models.lenses import set_rotating
from kukri.models.llama import Block, Llama
from kukri.models.olmo2 import Olmo2Block
from kukri.models.qwen3_5_text import GatedDeltaNet
from kukri.models.stored import CHANNELS, LOG_OF_NEGATIVE, PARAMETER, STEP_BIAS, Stored
from kukri.models.weights import WeightSource


class OlmoDeltaNet(GatedDeltaNet):
    """The rule under OLMo's names."""

    in_names = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    conv_names = ("q_conv1d", "k_conv1d", "v_conv1d")
    norm_name, out_name = "o_norm", "o_proj"
    norm_eps, strength = 1e-5, 2.0


class OlmoRecurrentBlock(Block):
    """A layer with the rule: Llama's order."""

    attention_type, attention_name = OlmoDeltaNet, "linear_attn"
    attention_norm_name, mlp_norm_name = "attention_layer_norm", "feedforward_layer_norm"


# a layer that attends, its norm renamed as transformers does when it saves
OlmoRenamedBlock = Olmo2Block.of(attention_norm_name=OlmoRecurrentBlock.mlp_norm_name)


class OlmoHybrid(Llama):
    """The whole model."""

    @staticmethod
    def block_type(source: WeightSource, config: ModelConfig, layer: int) -> Any:
        """Return the layer by its kind and its names."""
        if config.layers[layer].is_recurrent:
            return OlmoRecurrentBlock(source, config, layer)
        is_renamed = source.has(f"model.layers.{layer}.{OlmoRenamedBlock.attention_norm_name}.weight")
        return (OlmoRenamedBlock if is_renamed else Olmo2Block)(source, config, layer)


_RULE = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
_NOPE = "no_rope"


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes that follow from others, and a theta of null as a key of its own."""
    made, n_heads = dict(config), config.get("num_attention_heads", 30)
    for key in _RULE[:2]:
        made[key] = made.get(key) or n_heads
    made[_RULE[2]] = made.get(_RULE[2]) or int(0.75 * made.get("hidden_size", 3840) / made[_RULE[0]])
    made[_RULE[3]] = made.get(_RULE[3]) or 2 * made[_RULE[2]]
    rope = made.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None:
        made[_NOPE] = bool(made.pop("rope_parameters"))
    return made


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    if keys.flag(_NOPE):
        set_rotating(facts, [False] * facts["n_layers"])


OLMO_HYBRID = Architecture(
    "olmo_hybrid",
    OlmoHybrid,
    "OlmoHybridForCausalLM",
    respelled=_respelled,
    read_hf=_read_hf,
    in_gguf=False,
    tensor_names={
        **{f"linear_attn.{part}_conv1d": Stored("", hf=CHANNELS, is_small=True) for part in "qkv"},
        "linear_attn.A_log": Stored("", PARAMETER, LOG_OF_NEGATIVE),
        "linear_attn.dt_proj": Stored("", STEP_BIAS),
    },
    reads={"full_attention_interval", _NOPE},
    ignores={
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    },
    fixed={"linear_allow_neg_eigval": True},
    defaults={"linear_conv_kernel_dim": 4},
    biases={"self_attn": "attention_bias"},
    recurrent=RecurrentKeys(
        ("linear_attention",),
        {},
        {
            **{"n_taps": "linear_conv_kernel_dim", "n_groups": _RULE[0], "n_heads": _RULE[1]},
            **{"d_state": _RULE[2], "d_head": _RULE[3]},
        },
    ),
)
