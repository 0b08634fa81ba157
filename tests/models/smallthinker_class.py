"""SmallThinker for transformers, whose class is on the hub alone: SmolLM3 with mixtures in its layers."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tr
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer


@strict
class SmallThinkerConfig(tr.LlamaConfig):
    """SmallThinker's keys, and those by which SmolLM3's layers have windows and rotate."""

    model_type = "smallthinker"
    rope_layout: list[int] | None = None
    sliding_window_layout: list[int] | None = None
    sliding_window_size: int = 4096
    moe_num_primary_experts: int = 32
    moe_num_active_primary_experts: int = 4
    moe_ffn_hidden_size: int = 768
    moe_primary_router_apply_softmax: bool = False

    def __post_init__(self, **more: Any) -> None:
        """The layouts of a model without windows, if none are given."""
        self.rope_layout = self.rope_layout or [1] * self.num_hidden_layers
        self.sliding_window_layout = self.sliding_window_layout or [0] * self.num_hidden_layers
        super().__post_init__(**more)

    no_rope_layers = property(lambda self: self.rope_layout)
    use_sliding_window = property(lambda self: any(self.sliding_window_layout))
    sliding_window = property(lambda self: self.sliding_window_size)
    layer_types = property(
        lambda self: [("full_attention", "sliding_attention")[on] for on in self.sliding_window_layout]
    )


class _Expert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d_model, d_ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.gate = nn.Linear(d_model, d_ffn, bias=False)
        self.up = nn.Linear(d_model, d_ffn, bias=False)
        self.down = nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class _Mixture(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        n, self.n_used = config.moe_num_primary_experts, config.moe_num_active_primary_experts
        self.by_softmax = config.moe_primary_router_apply_softmax
        self.primary_router = nn.Linear(config.hidden_size, n, bias=False)
        self.experts = nn.ModuleList(_Expert(config) for _ in range(n))

    def forward(self, routed_by: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """All experts of all tokens, most of them times 0."""
        best = self.primary_router(routed_by).topk(self.n_used, dim=-1)
        scores = best.values.softmax(-1) if self.by_softmax else best.values.sigmoid()
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(
            -1, best.indices, scores / scores.sum(-1, keepdim=True)
        )
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class _Layer(SmolLM3DecoderLayer):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self.mlp
        self.block_sparse_moe = _Mixture(config)

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        """The router reads the input of the layer."""
        found, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)
        x = hidden_states + found
        return x + self.block_sparse_moe(hidden_states, self.post_attention_layernorm(x))


class SmallThinkerModel(tr.SmolLM3Model):
    """SmolLM3 with these layers."""

    config_class = SmallThinkerConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class SmallThinkerForCausalLM(tr.SmolLM3ForCausalLM):
    """The same with its head."""

    config_class = SmallThinkerConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = SmallThinkerModel(config)
        self.post_init()


tr.AutoConfig.register("smallthinker", SmallThinkerConfig)
tr.AutoModel.register(SmallThinkerConfig, SmallThinkerModel)
tr.AutoModelForCausalLM.register(SmallThinkerConfig, SmallThinkerForCausalLM)
