"""Phi-1, 1.5 and 2 (Li et al. 2023): attention and MLP side by side after one LayerNorm, with biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import MLP, Attention, Composite, HeadLayerNorms, LayerNorm
from kukri.models.llama import Llama
from kukri.models.weights import WeightSource


class PhiAttention(Attention):
    """Attention whose output matrix has another name, with norms of heads if the checkpoint has them."""

    out_name = "dense"
    head_norm_type: Callable[..., Any] = LayerNorm
    has_norm_per_head = False  # False: one norm for all query heads, one for all key heads

    def norms(self, source: WeightSource, name: str, config: ModelConfig) -> tuple[Any, Any]:

        def norm(part: str, n_heads: int) -> Any:
            names = [f"{name}.{part}_layernorm"] * n_heads
            if self.has_norm_per_head:
                names = [f"{own}.norms.{head}" for head, own in enumerate(names)]
            if not source.has(f"{names[0]}.weight"):
                return None
            size, eps = self.spec.d_head, config.norm_eps
            made = {own: self.head_norm_type(source, own, size, eps) for own in dict.fromkeys(names)}
            return HeadLayerNorms([made[own] for own in names])

        return norm("q", self.spec.n_heads), norm("k", self.spec.n_kv_heads)


class PhiBlock(Composite):
    """One layer: attention and MLP read the same normed stream, and both add to the residual."""

    norm_type: Callable[..., Any] = LayerNorm
    attention_type: Callable[..., Any] = PhiAttention
    mlp_type: Callable[..., Any] = MLP

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.layer = layer
        self.norm = self.norm_type(source, f"{name}.input_layernorm", config.d_model, config.norm_eps)
        self.attention = self.attention_type(source, f"{name}.self_attn", config, layer)
        self.mlp = self.mlp_type(source, f"{name}.mlp", config, layer)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.norm(ops, x))
        x = self.attention(ops, normed, x, batch)
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, normed, x))


PHI = Architecture(
    "phi",
    Llama.of(block_type=PhiBlock, norm_name="model.final_layernorm"),
    "PhiForCausalLM",
    gguf="phi2",
    gguf_epsilon="attention.layer_norm_epsilon",
    tensor_names={
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "model.final_layernorm": "output_norm",
    },
    hf_epsilon="layer_norm_eps",
    activation="gelu_new",
    defaults={"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    reads={"qk_layernorm"},
    lenses=(),
    biases={"self_attn": True, "mlp": True},
    partial_rotary=True,
)
