"""Gemma 4's assistants (Google 2026): small models that draft by the keys and values of a larger one.

All layers read the keys and values that the model's last layers of their kind have in the cache, so an
assistant reads no text and stores nothing. Its input is the model's embedding of the last token and the
model's hidden state of the token before. It gives a draft, and a state that replaces the hidden state for the
next draft. All drafts of a step are made at the position of the last token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import LayerConfig, ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.gemma4_text import Gemma4, Gemma4Block
from kukri.models.layers import Embedding, Linear, RMSNorm
from kukri.models.next_token import RESULT, LastRowReader, ShiftedLayers
from kukri.models.weights import TakenWeights, WeightSource


class Assistant(LastRowReader):
    """The program: `assistant(ops, batch)` returns logits [N, V] and taps RESULT, which replaces the model's
    state.

    It runs on the model's cache. `batch.activations` [T, D] are hidden states of the model, D wide, and
    `token_ids` the tokens that follow each.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, model: Gemma4) -> None:
        """`config` describes its layers. Raises UnsupportedError if they do not fit the model's."""
        super().__init__(model)
        n, d_model = model.config.n_layers, config.d_model
        layers = (*_stated(model.config), *_reading(config, model.config))
        self.config = replace(
            config, n_layers=len(layers), layers=layers, max_context=model.config.max_context
        )
        taken = TakenWeights(source)
        shifted: Any = ShiftedLayers(taken, -n)
        width = model.config.d_model
        self._joined = Linear(taken, ["pre_projection"], (d_model,), 2 * width)
        self._head = Embedding(taken, "model.embed_tokens", config.n_vocab, d_model)
        self.blocks = [Gemma4Block(shifted, self.config, i) for i in range(n, len(layers))]
        for block in self.blocks:  # the model keeps what its next token sees: one key less before that
            spec = block.attention.spec
            if spec.window is not None:
                block.attention.spec = replace(spec, window=max(spec.window - 1, 1))
        self.norm = RMSNorm(taken, "model.norm", d_model, config.norm_eps)
        self._made = Linear(taken, ["post_projection"], (width,), d_model)
        self.parameters = tuple(taken.parameters.values())
        self.vectors = tuple(taken.vectors.values())

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        hidden = ops.activations(batch, self._model.config.d_model)  # type: ignore[attr-defined]
        embedded = self._model.embed(ops, batch)
        x = self.through_blocks(ops, self._joined(ops, ops.join_heads((embedded, hidden), 1)), batch)
        x = self.norm(ops, ops.logit_rows(x, batch))
        ops.tap(RESULT, None, self._made(ops, x))
        return self._head.logits(ops, x)


def _stated(config: ModelConfig) -> list[LayerConfig]:
    """A model's layers, which say themselves what its configuration says for all."""
    return [
        replace(layer, n_kv_heads=own.n_kv_heads, d_head=own.d_head, rope=own.rope, attention_scale=own.scale)
        for layer, own in zip(config.layers, map(config.attention, range(config.n_layers)))
    ]


def _reading(config: ModelConfig, model: ModelConfig) -> list[LayerConfig]:
    """An assistant's layers, which read the keys and values of the model's last layers of their kinds."""
    found = []
    for layer in _stated(config):
        own = [
            i
            for i, other in enumerate(model.layers)
            if other.window == layer.window and other.kv_from is None
        ]
        if not own or model.attention(own[-1]).d_head != layer.d_head:
            raise UnsupportedError(
                "it is not supported with this model, which does not have the keys that its layers read"
            )
        n_kv = model.attention(own[-1]).n_kv_heads
        found.append(replace(layer, kv_from=own[-1], n_kv_heads=n_kv, keys_are_values=False))
    return found
