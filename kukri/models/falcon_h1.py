"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side in each layer, and multipliers of matrices."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig, MultiplierConfig
from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, RecurrentKeys
from kukri.models.granite import Granite
from kukri.models.granitemoehybrid import MAMBA_NAMES, Mamba2, Steps, check_head_width
from kukri.models.keys import Keys
from kukri.models.layers import Attention, GatedMLP, Scaled
from kukri.models.lenses import Format, Lens, Number
from kukri.models.llama import Block
from kukri.models.recurrent import STATE_KEYS
from kukri.models.stored import Stored
from kukri.models.weights import WeightSource


def _scaled(ops: Ops, x: Tensor, factor: float) -> Tensor:
    """x * factor, x itself for 1."""
    return x if factor == 1 else ops.scale(x, factor)


def _last(linear: Any, factor: float) -> Any:
    """The last matrix of a part, multiplied."""
    return linear if factor == 1 else Scaled(linear, factor)


class FalconAttention(Attention):
    """Attention whose input and result are multiplied; `attention_scale` has the multiplier of keys."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.factors = config.multipliers
        self.out = _last(self.out, self.factors.attention_out)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        return super().__call__(ops, _scaled(ops, x, self.factors.attention_in), residual, batch)


class FalconMamba(Mamba2):
    """A state space whose inputs have factors. The convolution's taps include them."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer, entry=config.n_layers + layer)
        self.gate_factor, *inputs, self.step_factor = config.multipliers.state_inputs
        self.conv.multiply(np.repeat(np.array(inputs, np.float32), self.widths))
        self.out = _last(self.out, config.multipliers.state_out)

    def inputs(self, ops: Ops, x: Tensor) -> tuple[Tensor, ...]:
        z, xbc, dt = super().inputs(ops, x)
        return _scaled(ops, z, self.gate_factor), xbc, _scaled(ops, dt, self.step_factor)


class FalconMLP(GatedMLP):
    """An MLP whose gate and result are multiplied."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.gate_factor = config.multipliers.gate
        self.down = _last(self.down, config.multipliers.down)

    def activate(self, ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        """silu(factor * gate) * up."""
        return super().activate(ops, _scaled(ops, gate, self.gate_factor), up)


class FalconBlock(Block):
    """A layer: attention and a state space read the same normed stream, then an MLP does."""

    attention_type, mlp_type = FalconAttention, FalconMLP
    mlp_norm_name, mlp_name = "pre_ff_layernorm", "feed_forward"

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        self.mamba = FalconMamba(source, f"model.layers.{layer}.mamba", config, layer)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = self.mamba(ops, normed, x, batch)
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, normed, x, batch))
        normed = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, normed, x))


class FalconH1(Granite):
    """The whole model. Its cache has the keys and values of all layers, then their states."""

    block_type = FalconBlock
    norm_name = "model.final_layernorm"

    @property
    def cache_layout(self) -> tuple[KVLayer | StateLayer, ...]:
        """The cache entry of each layer's attention, then of each layer's state space."""
        return (*super().cache_layout, *(block.mamba.cache_layer for block in self.blocks))


_PARTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
_STATE_IN = "ssm_in_multiplier"
_D_STATE, _NORM, _BEFORE = "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"


_KEY = Number(
    *("attention_scale", "key_multiplier"),
    load=lambda factor, facts: factor * facts["d_head"] ** -0.5,
    store=lambda _, config: float(config.attention(0).scale * config.d_head**0.5),
)
# In GGUF files the matrices have them.
_NUMBERS = (
    Number("multipliers.attention_in", "attention_in_multiplier"),
    Number("multipliers.attention_out", "attention_out_multiplier"),
    Number("multipliers.state_out", "ssm_out_multiplier"),
    Number("embedding_scale", "embedding_multiplier"),
    Number(
        *("logits_divisor", "lm_head_multiplier"),
        load=lambda factor, facts: 1 / factor,
        store=lambda divisor, config: 1 / divisor,
    ),
    _KEY,
)


class _States(Lens):
    """Each layer's state, whose norm GGUF shows by its tensors, and the factors of several parts."""

    def keys(self, form: Format) -> Set[str]:
        return {"mamba_d_head", _NORM, _BEFORE, *_PARTS, _STATE_IN} if form == "hf" else frozenset()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        has_norm = keys.flag(_NORM) if form == "hf" else "blk.0.ssm_norm.weight" in keys.tensors
        facts["layers"] = tuple(
            replace(layer, is_recurrent=False, has_state=True) for layer in facts["layers"]
        )
        facts["recurrent"] = replace(facts["recurrent"], has_norm=has_norm)
        if form == "gguf":
            return
        facts["recurrent"] = replace(facts["recurrent"], norm_first=has_norm and keys.flag(_BEFORE, True))
        check_head_width(keys, facts)
        (gate, down), inputs = (_several(keys, key) for key in _PARTS)
        into = keys.positive(_STATE_IN, most=1e4)
        state_inputs = tuple(into * factor for factor in inputs)
        facts["multipliers"] = MultiplierConfig(state_inputs=state_inputs, gate=gate, down=down)

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        factors, own = config.multipliers, config.recurrent
        assert own is not None, "each layer has a state"
        if form == "gguf":
            if own.norm_first:
                raise UnsupportedError("a norm before the gate of a state is not supported by GGUF")
            keys["attention.head_count_kv"] = config.n_kv_heads
            return
        keys.pop("layer_types")
        keys |= {
            _STATE_IN: 1.0,
            "mlp_multipliers": [factors.gate, factors.down],
            "ssm_multipliers": [*factors.state_inputs],
            "mamba_d_head": own.d_head,
            _NORM: own.has_norm,
            _BEFORE: own.norm_first,
        }


def _several(keys: Keys, key: str) -> list[float]:
    """The factors of a key, one for each part; 1 if the key is absent or null."""
    if keys.value(key) is None:
        return [1.0] * _PARTS[key]
    stated = keys.items(key, object)
    if len(stated) != _PARTS[key]:
        raise keys.error(key, f"must have {_PARTS[key]} numbers, not {len(stated)}")
    return [keys.as_positive(key, factor, most=1e4) for factor in stated]


def _gguf_factors(config: ModelConfig, module: str) -> float | FloatArray:
    """The factor of a matrix, or of its rows: GGUF files hold matrices multiplied, and no key."""
    factors, own = config.multipliers, config.recurrent
    if module == "mamba.in_proj":
        assert own is not None, "each layer has a state"
        n, n_keys = own.n_heads * own.d_head, own.n_groups * own.d_state
        return np.repeat(np.array(factors.state_inputs, np.float32), (n, n, n_keys, n_keys, own.n_heads))
    return {
        "model.embed_tokens": config.embedding_scale,
        "lm_head": 1 / config.logits_divisor,
        "self_attn.q_proj": factors.attention_in,
        "self_attn.k_proj": factors.attention_in * float(_KEY.store(None, config)),
        "self_attn.v_proj": factors.attention_in,
        "self_attn.o_proj": factors.attention_out,
        "mamba.out_proj": factors.state_out,
        "feed_forward.gate_proj": factors.gate,
        "feed_forward.down_proj": factors.down,
    }.get(module, 1.0)


FALCON_H1 = Architecture(
    "falcon_h1",
    FalconH1,
    "FalconH1ForCausalLM",
    gguf="falcon-h1",
    tensor_names={
        **MAMBA_NAMES,
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        "pre_ff_layernorm": Stored("ffn_norm", is_bare=True),
        "model.final_layernorm": "output_norm",
    },
    ignores={"mamba_expand", "mamba_chunk_size", "num_logits_to_keep", "layers_block_type", "mamba_use_mlp"},
    defaults={
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, _D_STATE: 1024, "mamba_n_heads": 128},
        **{"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_d_head": "auto"},
        **{
            "mamba_conv_bias": True,
            **dict.fromkeys((_STATE_IN, *(number.hf for number in _NUMBERS)), 1.0),
        },
    },
    fixed={"mamba_proj_bias": False},  # a bias that only some of the multipliers of its matrix are for
    biases={
        **{"self_attn": "attention_bias", "feed_forward": "mlp_bias", "mamba.conv1d": "mamba_conv_bias"},
        "mamba.out_proj": "projectors_bias",
    },
    recurrent=RecurrentKeys(
        ("hybrid",),
        STATE_KEYS,
        {
            **{"n_taps": "mamba_d_conv", "n_heads": "mamba_n_heads", "n_groups": "mamba_n_groups"},
            **{"d_state": "mamba_d_state", "d_inner": _D_STATE},
        },
    ),
    gguf_factors=_gguf_factors,
    lenses=(_States(), *_NUMBERS, Steps("time_step_limit")),
)
