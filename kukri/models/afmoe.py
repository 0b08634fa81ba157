"""Arcee's Trinity models (2025): gated attention, most of it in windows, four norms, experts by sigmoids.

Layers that see all do not rotate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.gemma2 import Gemma2Block
from kukri.models.layers import GatedMLP, Linear, RMSNorm
from kukri.models.lenses import ROTATING_WINDOWS, Number
from kukri.models.llama import Llama
from kukri.models.mixture import Mixture
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.weights import WeightSource


class AfmoeAttention(Qwen3Attention):
    """Attention whose result is multiplied by the sigmoid of gates, which have a matrix of their own."""

    result_tap = "attn.hook_ungated_z"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.gate = self.gates(source, name, config)

    def gates(self, source: WeightSource, name: str, config: ModelConfig) -> Linear:
        """A row for each channel of the result."""
        width = self.spec.n_heads * self.spec.d_head
        return Linear(source, [f"{name}.gate_proj"], (width,), config.d_model)

    def gate_of(self, ops: Ops, x: Tensor) -> Tensor:
        """The gates of the attention's result, before their sigmoid [T, H * K]."""
        return ops.tap("attn.hook_gate", self.layer, self.gate(ops, x))

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + attention(x), both [T, D]. Writes the layer's keys and values to the cache."""
        q, k, v = self.qkv.parts(ops, x)
        z = self.attend(ops, q, k, v, batch)
        z = ops.tap("attn.hook_z", self.layer, ops.map("gated_sigmoid", z, self.gate_of(ops, x)))
        return self.out(ops, z, residual, ("hook_attn_out", self.layer))


class AfmoeBlock(Gemma2Block):
    """A layer with a mixture, or one of the first with an MLP, between four norms."""

    attention_type = AfmoeAttention
    mlp_type: Callable[..., Any] = Mixture
    dense_type = GatedMLP
    mlp_norm_name = "pre_mlp_layernorm"
    post_norm_names = ("post_attention_layernorm", "post_mlp_layernorm")

    def norm_mlp(self, norm: RMSNorm) -> None:
        if isinstance(self.mlp, Mixture):
            self.mlp.finish = partial(_normed, norm, self.layer)
        else:
            super().norm_mlp(norm)


def _normed(norm: RMSNorm, layer: int, ops: Ops, x: Tensor) -> Tensor:
    return ops.tap("ln2_post.hook_normalized", layer, norm(ops, x))


class Afmoe(Llama):
    """The whole model."""

    block_type = AfmoeBlock

    def embed(self, ops: Ops, batch: Any) -> Tensor:
        """The embeddings, multiplied [T, D]."""
        x, factor = self.embedding(ops, batch), self.config.embedding_scale
        return x if factor == 1 else ops.scale(x, factor)


AFMOE = Architecture(
    "afmoe",
    Afmoe,
    "AfmoeForCausalLM",
    full_interval=4,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "self_attn.gate_proj": "attn_gate",
    },
    joined={"mlp.router.gate": ("mlp.gate",), "mlp.expert": ("mlp.gate.e_score_correction",)},
    reads={"sliding_window", "layer_types"},
    ignores={"global_attn_every_n_layers", "load_balance_coeff", "use_grouped_mm"},
    fixed={
        **{"n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1},
        **{"score_func": "sigmoid", "route_norm": True},
    },
    defaults={
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024},
        **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        **{"num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.0},
    },
    biases={"self_attn.gate_proj": False, "self_attn": "attention_bias"},
    lenses=(
        ROTATING_WINDOWS,
        Number(
            *("embedding_scale", "mup_enabled", "", True, bool),
            load=lambda is_on, facts: facts["d_model"] ** 0.5 if is_on else 1.0,
            store=lambda scale, config: scale != 1,
        ),
    ),
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", True),
        gguf_normalized=True,
        by_sigmoid=True,
        bias=True,
        scale="route_scale",
        n_shared="num_shared_experts",
        n_dense="num_dense_layers",
    ),
)
