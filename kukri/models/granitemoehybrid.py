"""Granite 4 (IBM 2025): Mamba-2 in most layers, attention in some, a mixture alongside an MLP for all tokens.

A state space (Dao and Gu 2024) keeps a matrix for each head: it decays, takes a token's value in under b, and
is read by c. Small models have no mixture, and some no state.
"""

from __future__ import annotations

from collections.abc import Set
from math import inf
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.dataclass import dataclass, replace
from kukri.errors import UnsupportedError, brief
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import ScanSpec
from kukri.kernels.weight_handles import Vector
from kukri.models.architecture import ExpertKeys, RecurrentKeys
from kukri.models.granite import GRANITE, Granite, GraniteBlock
from kukri.models.granitemoe import GraniteMoeBlock, ScaledMixture
from kukri.models.keys import Keys
from kukri.models.layers import Linear, stored_vector
from kukri.models.lenses import Format, Lens, set_rotating, state_rotating
from kukri.models.mixture import SharedMLP
from kukri.models.recurrent import STATE_KEYS, Convolution, state_layer
from kukri.models.stored import (
    CHANNELS,
    COLUMN,
    GROUPED,
    LOG_OF_NEGATIVE,
    PARAMETER,
    STEP_BIAS,
    Stored,
)
from kukri.models.weights import WeightSource


class Mamba2:
    """A state space after a convolution. Its result is gated and normed, group by group."""

    def __init__(
        self, source: WeightSource, name: str, config: ModelConfig, layer: int, entry: int | None = None
    ) -> None:
        """`entry` is its place in the cache; None: the layer's."""
        own = config.recurrent
        assert own is not None, "the configuration's readers see to that"
        n, n_heads, n_keys = own.n_heads * own.d_head, own.n_heads, own.n_groups * own.d_state
        self.layer, self.widths = layer, (n, n_keys, n_keys)
        entry = layer if entry is None else entry
        widths = (n, sum(self.widths), n_heads)
        self.into = Linear(source, [f"{name}.in_proj"], widths, config.d_model)
        self.conv = Convolution(source, {f"{name}.conv1d": widths[1]}, own.n_taps, entry, own.activation)
        a, d, dt_bias = (
            stored_vector(source, f"{name}.{part}", n_heads)
            for part in ("A_log.weight", "D.weight", "dt_proj.bias")
        )
        sizes = (n_heads, own.n_groups, own.d_state, own.d_head)
        self.spec = ScanSpec(entry, *sizes, a, d, dt_bias, own.steps)
        self.norms: list[Vector] = []
        if own.has_norm:
            stored = f"{name}.norm.weight"
            self.norms = [Vector(part, stored) for part in np.split(source.vector(stored, n), own.n_groups)]
        self.eps, self.norm_first = config.norm_eps, own.norm_first
        self.out: Any = Linear(source, [f"{name}.out_proj"], (config.d_model,), n)
        self.cache_layer = state_layer(self.conv.states, (("scan", (n_heads, own.d_state, own.d_head)),))

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + this of x, both [T, D]. Writes the layer's states."""
        z, xbc, dt = self.inputs(ops, x)
        xbc = ops.tap("mamba.hook_xbc", self.layer, self.conv(ops, xbc, batch))
        x, b, c = ops.split(xbc, self.widths)
        y = ops.tap("mamba.hook_read", self.layer, ops.scan(x, b, c, dt, self.spec, batch))
        y = self.normed(ops, y) if self.norm_first else y
        y = ops.map("gated_silu", y, z)
        y = y if self.norm_first else self.normed(ops, y)
        return self.out(ops, y, residual, ("hook_mixer_out", self.layer))

    def inputs(self, ops: Ops, x: Tensor) -> tuple[Tensor, ...]:
        """The gate, the convolution's inputs and the steps, of x [T, D]."""
        return self.into.parts(ops, x)

    def normed(self, ops: Ops, y: Tensor) -> Tensor:
        """y [T, n], each group after its norm, if there is one."""
        if not self.norms:
            return y
        groups = ops.split(y, [len(weight) for weight in self.norms])
        found = [ops.rms_norm(x, weight, self.eps) for x, weight in zip(groups, self.norms)]
        return found[0] if len(found) == 1 else ops.join_heads(found, 1)


class SharedMixture(ScaledMixture):
    """The sum of a mixture and an MLP for all tokens, multiplied before it joins the stream."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.shared = SharedMLP(source, f"{name.removesuffix('mlp')}shared_mlp", config, layer)


_MLP = {"shared_mlp.input_linear": ("gate_proj", "up_proj"), "shared_mlp.output_linear": ("down_proj",)}

_POSITION, _ROTATES = "position_embedding_type", "rope.scaling.finetuned"


class _Rotation(Lens):
    """Whether layers rotate, in GGUF by the key that llama.cpp uses for it."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        rotates = keys.flag(_ROTATES, True)
        if form == "hf":
            kind = keys.value(_POSITION)
            if kind not in (None, "nope", "rope"):
                raise keys.unsupported(_POSITION, f"is {brief(kind)}: only rope and nope are supported")
            check_head_width(keys, facts)
            rotates = kind == "rope"
        set_rotating(facts, [rotates] * facts["n_layers"])

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        if form == "hf":
            keys[_POSITION] = "rope" if config.layers[0].use_rope else "nope"
            return
        keys[_ROTATES] = rotates = any(layer.use_rope for layer in config.layers)
        state_rotating(config, keys, [rotates] * config.n_layers)


def check_head_width(keys: Keys, facts: dict[str, Any]) -> None:
    """Raises FormatError unless the width of a state's head, which follows from others, says so."""
    width, own = keys.value("mamba_d_head", "auto"), facts["recurrent"]
    if width not in ("auto", own.d_head):
        message = f"is {brief(width)}, but {own.n_heads} heads of a width of {own.n_heads * own.d_head}"
        raise keys.error("mamba_d_head", f"{message} have {own.d_head}")


@dataclass(frozen=True)
class Steps(Lens):
    """The bounds of a state space's steps, or the lower one; GGUF has no key, and means `usual`."""

    key: str
    usual: tuple[float, float] = (0.0, inf)

    def keys(self, form: Format) -> Set[str]:
        return {self.key} if form == "hf" else set()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        stated = keys.value(self.key) if form == "hf" else None
        bounds: list[Any] = [*stated] if isinstance(stated, list | tuple) else [stated, inf]
        bounds = [*self.usual] if stated is None else bounds
        if len(bounds) != 2 or not all(
            type(bound) in (int, float) and (0 <= bound < 1e30 or bound == inf) for bound in bounds
        ):
            raise keys.error(self.key, f"must be the least and the largest step, not {brief(stated)}")
        facts["recurrent"] = replace(facts["recurrent"], steps=tuple(map(float, bounds)))

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        assert config.recurrent is not None, "the model has states"
        if config.recurrent.steps != self.usual:
            if form == "gguf":
                raise UnsupportedError(
                    f"key '{self.key}' of {config.recurrent.steps} is not supported by GGUF"
                )
            low, high = config.recurrent.steps
            keys[self.key] = low if self.usual[0] else [low, high]


MAMBA_NAMES: dict[str, str | Stored] = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": Stored("ssm_conv1d", hf=CHANNELS, is_small=True),
    "mamba.A_log": Stored("ssm_a", PARAMETER, LOG_OF_NEGATIVE, COLUMN, is_bare=True),
    "mamba.D": Stored("ssm_d", PARAMETER, in_gguf=COLUMN, is_bare=True),
    "mamba.dt_proj": Stored("ssm_dt", STEP_BIAS),
    "mamba.norm": Stored("ssm_norm", in_gguf=GROUPED),
    "mamba.out_proj": "ssm_out",
}
GRANITEMOEHYBRID = replace(
    GRANITE,
    name="granitemoehybrid",
    model=Granite.of(
        block_type=GraniteMoeBlock.of(mlp_type=SharedMixture, recurrent_type=Mamba2, recurrent_name="mamba")
    ),
    hf_class="GraniteMoeHybridForCausalLM",
    gguf="granitehybrid",
    lenses=(_Rotation(), Steps("time_step_limit")),
    tensor_names={
        **MAMBA_NAMES,
        "shared_mlp.gate_proj": "ffn_gate_shexp",
        "shared_mlp.up_proj": "ffn_up_shexp",
        "shared_mlp.down_proj": "ffn_down_shexp",
    },
    joined={
        **{stored: tuple(f"shared_mlp.{part}" for part in parts) for stored, parts in _MLP.items()},
        "block_sparse_moe.router.layer": ("mlp.gate",),
        "block_sparse_moe.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
        "block_sparse_moe.output_linear": ("mlp.experts.down_proj",),
    },
    keys={"d_ffn": ("expert_shared_feed_forward_length", "shared_intermediate_size")},
    reads={_POSITION, "mamba_d_head"},
    ignores={"mamba_chunk_size", "init_method"},
    fixed={"normalization_function": "rmsnorm"},
    defaults={
        **{"shared_intermediate_size": 1024, "attention_multiplier": 1.0},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "mamba_n_heads": 128, "mamba_n_groups": 1},
        **{"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_head": "auto"},
        **{"mamba_conv_bias": True},
    },
    biases={
        **{"self_attn": "attention_bias", "mamba.conv1d": "mamba_conv_bias"},
        **{"mamba.in_proj": "mamba_proj_bias", "mamba.out_proj": "mamba_proj_bias"},
    },
    experts=ExpertKeys("num_local_experts", "intermediate_size", True, True, "feed_forward_length"),
    recurrent=RecurrentKeys(
        ("mamba", "linear_attention"),
        STATE_KEYS,
        {
            **{"n_taps": "mamba_d_conv", "n_heads": "mamba_n_heads", "n_groups": "mamba_n_groups"},
            **{"d_state": "mamba_d_state", "expansion": "mamba_expand"},
        },
        attention_type="attention",
    ),
)

GRANITEMOEHYBRID_DENSE = replace(
    GRANITEMOEHYBRID,
    name="granitemoehybrid_dense",
    model=Granite.of(block_type=GraniteBlock.of(recurrent_type=Mamba2, recurrent_name="mamba")),
    hf_type="granitemoehybrid",
    hf_mark=("num_local_experts", 0),
    joined={stored: tuple(f"mlp.{part}" for part in parts) for stored, parts in _MLP.items()},
    keys={"d_ffn": ("feed_forward_length", "shared_intermediate_size")},
    ignores=GRANITEMOEHYBRID.ignores
    | {"intermediate_size", "num_local_experts", "num_experts_per_tok"}
    | {"output_router_logits", "router_aux_loss_coef"},
    experts=None,
)
