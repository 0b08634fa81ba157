"""StarCoder2 (Lozhkov et al. 2024): Llama with LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kukri.config import ModelConfig
from kukri.kernels.types import Ops, RopeTable, Tensor
from kukri.models.layers import MLP, Attention, LayerNorm, Linear, Parameter
from kukri.models.llama import Llama

if TYPE_CHECKING:
    from kukri.formats.weights import WeightSource


class Starcoder2MLP(MLP):
    """The MLP under the names that GPT-2 gave its matrices."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.up = Linear(source, [f"{name}.c_fc"], (config.d_ffn,), config.d_model)
        self.down = Linear(source, [f"{name}.c_proj"], (config.d_model,), config.d_ffn)
        self.parameters = self.up.parameters + self.down.parameters


class Starcoder2Block:
    """One layer: attention, then the MLP, each behind its norm."""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int, rope: RopeTable) -> None:
        name, eps = f"model.layers.{layer}", config.norm_eps
        self.layer = layer
        self.attention_norm = LayerNorm(source, f"{name}.input_layernorm", config.d_model, eps)
        self.attention = Attention(source, f"{name}.self_attn", config, layer, rope)
        self.mlp_norm = LayerNorm(source, f"{name}.post_attention_layernorm", config.d_model, eps)
        self.mlp = Starcoder2MLP(source, f"{name}.mlp", config, layer)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, normed, x, batch))
        normed = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, normed, x))

    @property
    def parameters(self) -> list[Parameter]:
        """Every tensor of the layer."""
        parts = (self.attention_norm, self.attention, self.mlp_norm, self.mlp)
        return [parameter for part in parts for parameter in part.parameters]


class Starcoder2(Llama):
    """The whole model."""

    block_type = Starcoder2Block
    norm_type = LayerNorm
