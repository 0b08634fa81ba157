"""LFM2 both ways for transformers, whose class is on the hub alone: no causal mask, centred convolutions."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tr
from huggingface_hub.dataclasses import strict


@strict
class Lfm2BidirectionalConfig(tr.Lfm2Config):
    """LFM2's keys, under its model_type."""


class Lfm2BidirectionalModel(tr.Lfm2Model):
    """LFM2 without its head; the middle tap of a convolution is the token's own."""

    config_class = Lfm2BidirectionalConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.layers:
            if not layer.is_attention_layer:
                layer.conv.forward = _centred(layer.conv)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        """Tokens see each other, but those of which the mask [B, T] is 0."""
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        added = torch.where(seen[:, None, None] > 0, 0.0, float("-inf"))
        return super().forward(input_ids, {"full_attention": added, "conv": seen}, use_cache=False, **more)


def _centred(conv: Any) -> Any:
    def forward(hidden_states: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> torch.Tensor:
        b, c, x = conv.in_proj(hidden_states * attention_mask[..., None]).transpose(1, 2).chunk(3, dim=1)
        weight, size = conv.conv.weight, conv.conv.weight.shape[-1]
        y = torch.nn.functional.conv1d(b * x, weight, conv.conv.bias, padding=size // 2, groups=len(weight))
        return conv.out_proj((c * y).transpose(1, 2))

    return forward
