"""OLMo 2 (Walsh et al. 2024): Llama with its norms after attention and MLP, and with normed q and k.

Attention and MLP read the residual stream without a norm, and their outputs are normed before they are added.
One norm runs over all query heads together, one over all key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import Attention, Composite, GatedMLP, HeadNorm, PostNormed, RMSNorm
from kukri.models.llama import Llama
from kukri.models.weights import WeightSource


class Olmo2Attention(Attention):
    """Attention with a norm of all queries of a token, and one of all its keys."""

    def norms(self, source: WeightSource, name: str, config: ModelConfig) -> tuple[Any, Any]:
        """Norms of all queries and of all keys, as of one wide head."""
        n_q, n_kv = self.spec.n_heads * self.spec.d_head, self.spec.n_kv_heads * self.spec.d_head
        size = {"q_norm": n_q, "k_norm": n_kv}
        q_norm, k_norm = (HeadNorm(source, f"{name}.{x}", n, config.norm_eps) for x, n in size.items())
        return q_norm, k_norm


class Olmo2Block(Composite):
    """One layer: attention and MLP, the result of each normed and added to the residual stream."""

    attention_type: Callable[..., Any] = Olmo2Attention
    attention_norm_name = "post_attention_layernorm"

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, eps = f"model.layers.{layer}", config.norm_eps
        self.layer = layer
        self.attention = self.attention_type(source, f"{name}.self_attn", config, layer)
        self.mlp = GatedMLP(source, f"{name}.mlp", config, layer)
        # TransformerLens calls these norms ln1 and ln2, wherever they stand
        self.attention_norm = RMSNorm(source, f"{name}.{self.attention_norm_name}", config.d_model, eps)
        self.mlp_norm = RMSNorm(source, f"{name}.post_feedforward_layernorm", config.d_model, eps)
        self.attention.out = PostNormed(self.attention.out, self.attention_norm, "ln1.hook_normalized")
        self.mlp.down = PostNormed(self.mlp.down, self.mlp_norm, "ln2.hook_normalized")

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, x, x, batch))
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, x, x))


OLMO2 = Architecture(
    "olmo2",
    Llama.of(block_type=Olmo2Block),
    "Olmo2ForCausalLM",
    full_interval=4,
    local_rope=True,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    defaults={"rms_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias"},
)
