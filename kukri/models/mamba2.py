"""Mamba-2 (Dao and Gu 2024) and Codestral Mamba: a state space in each layer, and nothing else.

The heads and the MLP width of its `ModelConfig` are the heads and the width of the states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig, RopeConfig
from kukri.models.architecture import RecurrentKeys
from kukri.models.granitemoehybrid import Mamba2, Steps
from kukri.models.keys import Keys
from kukri.models.lenses import Format, Lens
from kukri.models.nemotron_h import NEMOTRON_H, NO_ROTATION, NemotronBlock, NemotronH
from kukri.models.recurrent import STATE_KEYS

CONTEXT = 1 << 20  # the value in files without a bound


class _Sizes(Lens):
    """The model's heads and widths, which are the heads and widths of the states."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        own = facts["recurrent"]
        width = own.n_heads * own.d_head
        if form == "hf" and facts["d_head"] != own.d_head:
            message = f"is {facts['d_head']}, but {own.n_heads} heads of a width of {width} have {own.d_head}"
            raise keys.error("head_dim", message)
        facts |= {"n_kv_heads": own.n_heads, "d_head": own.d_head, "d_ffn": width}
        facts["rope"] = RopeConfig(rotary_dim=own.d_head)

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        unread: tuple[str, ...] = ("layer_types", "intermediate_size", "rope_theta", "rope_scaling")
        if form == "gguf":
            unread = ("attention.head_count_kv",)
            keys |= {"attention.head_count": 0, "feed_forward_length": 0}
        for key in unread:
            keys.pop(key)


MAMBA2 = replace(
    NEMOTRON_H,
    name="mamba2",
    model=NemotronH.of(block_type=NemotronBlock.of(recurrent_type=Mamba2)),
    hf_class="Mamba2ForCausalLM",
    gguf="mamba2",
    gguf_epsilon="attention.layer_norm_rms_epsilon",
    gguf_defaults={"attention.head_count_kv": 0},
    gguf_reads={"attention.head_count", "feed_forward_length"},
    keys={
        "n_heads": ("ssm.time_step_rank", "num_heads"),
        "n_kv_heads": ("attention.head_count_kv", "num_heads"),
        "d_ffn": ("ssm.inner_size", "intermediate_size"),
    },
    hf_prefix="backbone.",
    joined={stored: modules for stored, modules in NEMOTRON_H.joined.items() if "mamba." in modules[0]}
    | {"norm": ("input_layernorm",)},
    hf_activation="hidden_act",
    activation="silu",
    respelled=dict,
    reads={"head_dim"},
    ignores={
        *("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min"),
        *(
            "time_step_max",
            "time_step_floor",
            "num_attention_heads",
            "num_key_value_heads",
            "norm_before_gate",
        ),
    },
    defaults={
        **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
        **{"use_conv_bias": True, "layer_norm_epsilon": 1e-5},
        **{"intermediate_size": 1, "max_position_embeddings": CONTEXT},
    },
    biases={key: rule for key, rule in NEMOTRON_H.biases.items() if rule != "mlp_bias"},
    recurrent=RecurrentKeys(
        ("linear_attention",),
        STATE_KEYS,
        {
            **{"n_taps": "conv_kernel", "n_heads": "num_heads", "n_groups": "n_groups"},
            **{"d_state": "state_size", "expansion": "expand"},
        },
    ),
    lenses=(NO_ROTATION, _Sizes(), Steps("time_step_limit")),
)
