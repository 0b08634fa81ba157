"""Jina Embeddings v2's model in PyTorch, by its description: its class is on the hub alone.

BERT of transformers with the positions taken out, symmetric ALiBi added to scores, and a gated MLP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel


class JinaV2Config(BertConfig):
    """BERT's, saved as the model's own."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{**keys, "position_embedding_type": "alibi", "feed_forward_type": "geglu"})


def slopes(n_heads: int) -> list[float]:
    """Of each head, by the paper: those of every second head of twice as many follow for the rest."""
    n = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    rest = [2 ** (-8 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return first + rest[: n_heads - n]


class GatedMLP(nn.Module):
    """layernorm(x + wo(gelu(gate) * up)), gate and up one matrix, gate first."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Any) -> Any:
        """x [B, T, D] -> the same shape."""
        gate, up = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(x + self.wo(nn.functional.gelu(gate) * up))


class Attention(nn.Module):
    """BERT's heads over the whole text, biased by distance."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n_heads = config.num_attention_heads
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, x: Any, *rest: Any, **more: Any) -> Any:
        """x [B, T, D] -> the heads' results, and no pattern."""
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        steps = torch.arange(x.shape[1])
        distances = (steps[None] - steps[:, None]).abs()
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores - torch.tensor(slopes(self.n_heads))[:, None, None] * distances
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), None


def _changed(bert: Any) -> None:
    """Makes a BertModel one of Jina's."""
    config = bert.config
    table = bert.embeddings.position_embeddings
    del bert.embeddings.position_embeddings
    bert.embeddings.position_embeddings = lambda positions: torch.zeros(table.embedding_dim)
    for layer in bert.encoder.layer:
        layer.attention.self = Attention(config)
        layer.mlp = GatedMLP(config)
        del layer.intermediate, layer.output
        layer.feed_forward_chunk = layer.mlp.forward
    bert.init_weights()


class JinaV2Model(BertModel):
    """The encoder."""

    config_class = JinaV2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _changed(self)


class JinaV2ForSequenceClassification(BertForSequenceClassification):
    """With a pooler and a classifier."""

    config_class = JinaV2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _changed(self.bert)
