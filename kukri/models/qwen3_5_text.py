"""Qwen3.5's language model (Qwen team 2026): the gated delta rule, with gated attention in each fourth layer.

The delta rule (Yang et al. 2024) keeps a matrix for each head: values are written under keys, in place of
what was found there, and queries read it; what is old decays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig, RecurrentConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import DeltaSpec
from kukri.kernels.weight_handles import Vector
from kukri.models.architecture import Architecture, RecurrentKeys
from kukri.models.layers import HeadNorm, Linear, stored_vector
from kukri.models.lenses import Given, Stated
from kukri.models.llama import Block, Llama
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.recurrent import STATE_KEYS, Convolution, state_layer
from kukri.models.stored import CHANNELS, LOG_OF_NEGATIVE, PARAMETER, STEP_BIAS, Order, Stored
from kukri.models.weights import WeightSource

_L2_EPS = 1e-6  # epsilon of the norms of queries and keys


class GatedAttention(Qwen3Attention):
    """Attention whose result is multiplied by the sigmoid of gates, further rows of q's matrix."""

    result_tap = "attn.hook_ungated_z"
    q_parts = 2

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + attention(x), both [T, D]. Writes the layer's keys and values to the cache."""
        both, k, v = self.qkv.parts(ops, x)
        n = self.spec.n_heads * self.spec.d_head
        q, gate = ops.split(both, (n, n))
        z = self.attend(ops, q, k, v, batch)
        gate = ops.tap("attn.hook_gate", self.layer, gate)
        z = ops.tap("attn.hook_z", self.layer, ops.map("gated_sigmoid", z, gate))
        return self.out(ops, z, residual, ("hook_attn_out", self.layer))


class GatedDeltaNet:
    """The gated delta rule after a convolution, its result normed and gated head by head."""

    in_names: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    conv_names: tuple[str, ...] = ("conv1d",)
    norm_name, out_name = "norm", "out_proj"
    norm_eps: float | None = None  # None: the model's
    strength = 1.0  # multiplies the written values

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        own = config.recurrent
        assert own is not None, "the configuration's readers see to that"
        n_keys, n_values = own.n_groups * own.d_state, own.n_heads * own.d_head
        self.layer, self.widths = layer, (n_keys, n_keys, n_values)
        self.outs = (sum(self.widths), n_values, own.n_heads, own.n_heads)
        names = [f"{name}.{part}" for part in self.in_names]
        widths = self.outs if len(names) == len(self.outs) else (*self.widths, *self.outs[1:])
        self.into = Linear(source, names, widths, config.d_model)
        parts = (self.outs[0],) if len(self.conv_names) == 1 else self.widths
        convs = {f"{name}.{part}": n for part, n in zip(self.conv_names, parts, strict=True)}
        self.conv = Convolution(source, convs, own.n_taps, layer, own.activation)
        a = stored_vector(source, f"{name}.A_log.weight", own.n_heads)
        dt_bias = stored_vector(source, f"{name}.dt_proj.bias", own.n_heads)
        self.spec = DeltaSpec(
            layer, own.n_heads, own.n_groups, own.d_state, own.d_head, a, dt_bias, own.are_tiled
        )
        eps = self.norm_eps or config.norm_eps
        self.norm = HeadNorm(source, f"{name}.{self.norm_name}", own.d_head, eps)
        self.out = Linear(source, [f"{name}.{self.out_name}"], (config.d_model,), n_values)
        self.cache_layer = state_layer(self.conv.states, (("delta", (own.n_heads, own.d_state, own.d_head)),))
        # x / sqrt(sum(x^2) + eps) by a norm whose mean has the d_state in it; queries are divided by its root
        self.eps = _L2_EPS / own.d_state
        # keys and values times the root of `strength` act as a rule that is `strength` times stronger
        self.root = self.strength**0.5
        self.of_keys = Vector(np.full(own.d_state, self.root * own.d_state**-0.5, np.float32))
        self.of_queries = Vector(np.full(own.d_state, 1 / own.d_state, np.float32))

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + this of x, both [T, D]. Writes the layer's states."""
        qkv, z, a, b = ops.split(self.into(ops, x), self.outs)
        qkv = ops.tap("linear_attn.hook_qkv", self.layer, self.conv(ops, qkv, batch))
        q, k, v = ops.split(qkv, self.widths)
        q, k = ops.head_norm(q, self.of_queries, self.eps), ops.head_norm(k, self.of_keys, self.eps)
        if self.root != 1:
            v = ops.scale(v, self.root)
        y = ops.tap("linear_attn.hook_read", self.layer, ops.delta_rule(q, k, v, a, b, self.spec, batch))
        y = ops.map("gated_silu", self.norm(ops, y), z)
        return self.out(ops, y, residual, ("hook_mixer_out", self.layer))


# a layer: the delta rule or attention, and an MLP, each after its norm
Qwen35Block = Block.of(
    attention_type=GatedAttention, recurrent_type=GatedDeltaNet, recurrent_name="linear_attn"
)

# In GGUF the value heads that read one key head lie n_groups apart.


def _head_order(own: RecurrentConfig) -> npt.NDArray[np.int64]:
    return np.arange(own.n_heads).reshape(own.n_groups, -1).T.reshape(-1)


def _tiled_heads(own: RecurrentConfig) -> tuple[Order, Order]:
    return _head_order(own), None


def _tiled_values(own: RecurrentConfig) -> npt.NDArray[np.int64]:
    """The numbers of all heads' values."""
    return (_head_order(own)[:, None] * own.d_head + np.arange(own.d_head)).reshape(-1)


def _tiled_qkv(own: RecurrentConfig) -> tuple[Order, Order]:
    """Queries and keys, which stay, then values."""
    n_keys = 2 * own.n_groups * own.d_state
    return np.concatenate([np.arange(n_keys), n_keys + _tiled_values(own)]), None


QWEN3_5_TEXT = Architecture(
    "qwen3_5_text",
    Llama.of(block_type=Qwen35Block),
    "Qwen3_5ForCausalLM",
    gguf="qwen35",
    lenses=(
        Given("has_gates", True),
        Stated("gguf", "rope.dimension_sections", np.array([11, 11, 10, 0], np.int32)),
    ),
    interleaved_rope=True,
    hf_interleaved_rope=True,
    hf_norm_offset=1.0,
    partial_rotary=True,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": Stored("attn_qkv", tiles=_tiled_qkv),
        "linear_attn.in_proj_z": Stored("attn_gate", tiles=lambda own: (_tiled_values(own), None)),
        "linear_attn.in_proj_a": Stored("ssm_alpha", tiles=_tiled_heads),
        "linear_attn.in_proj_b": Stored("ssm_beta", tiles=_tiled_heads),
        "linear_attn.conv1d": Stored("ssm_conv1d", hf=CHANNELS, is_small=True, tiles=_tiled_qkv),
        "linear_attn.A_log": Stored("ssm_a", PARAMETER, LOG_OF_NEGATIVE, is_bare=True, tiles=_tiled_heads),
        "linear_attn.dt_proj": Stored("ssm_dt", STEP_BIAS, tiles=_tiled_heads),
        "linear_attn.norm": Stored("ssm_norm"),
        "linear_attn.out_proj": Stored("ssm_out", tiles=lambda own: (None, _tiled_values(own))),
    },
    reads={"full_attention_interval"},
    ignores={
        *("mamba_ssm_dtype", "attn_output_gate", "output_gate_type"),
        *("mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    },
    next_token="mtp",
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
        "mrope_interleaved": True,
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    },
    biases={"self_attn": "attention_bias"},
    recurrent=RecurrentKeys(
        ("linear_attention",),
        STATE_KEYS,
        {
            **{"n_taps": "linear_conv_kernel_dim", "n_heads": "linear_num_value_heads"},
            **{"n_groups": "linear_num_key_heads", "d_state": "linear_key_head_dim"},
            "d_head": "linear_value_head_dim",
        },
        gguf_interval=4,
    ),
)
