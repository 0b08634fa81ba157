"""The layer for multi-token prediction that comes with a model (DeepSeek-AI 2024), as a program that drafts.

It predicts token i + 2 from the model's state of token i, after the last norm, and the embedding of token
i + 1, by one further layer of the model's kind and the model's head. Its own result takes the place of
the model's when it drafts more than one token. Names are DeepSeek's: the layer is that after the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import Vector, Weight
from kukri.models.layers import Linear, RMSNorm
from kukri.models.llama import Llama
from kukri.models.weights import Parameter, TakenWeights, WeightSource

# Tokens that are drafted unless a text has many others, the first of the vocabulary. Ids follow the order in
# which a tokenizer's merges were learned, so these are the frequent ones of languages in Latin letters: to
# read all 248,320 rows would cost a quarter of a step of 2B.
MOST_DRAFTED = 1 << 16
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
RESULT = "ln_final.hook_normalized"  # the tap of the program's own result [N, D]


class RowReader(Llama):
    """A draft model that reads the model's states of tokens: the rows of `taps`, joined by `joined`."""

    taps: tuple[str, ...] = ()  # in the order in which a step comes by them
    vectors: Sequence[FloatArray] = ()

    def joined(self, rows: Sequence[FloatArray]) -> FloatArray:
        """Return the joined states [R, width] of R tokens, given the rows of each tap [R, D]."""
        raise NotImplementedError


class LastRowReader(RowReader):
    """One that reads the rows after the model's last norm."""

    def __init__(self, model: Llama) -> None:
        """Raises UnsupportedError if the model's last norm is of another kind."""
        if type(model.norm) is not RMSNorm:
            raise UnsupportedError("multi-token prediction is not supported for this architecture")
        self._model, self.embedding = model, model.embedding
        self.taps = (tap_name("hook_resid_post", model.config.n_layers - 1),)

    def joined(self, rows: Sequence[FloatArray]) -> FloatArray:
        """The rows [R, D] of the tap after the model's last norm."""
        (x,) = rows
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        norm = self._model.norm
        y: FloatArray = x / np.sqrt(mean_square + np.float32(norm.eps)) * norm.weight.data
        return y


class NextTokenLayer(LastRowReader):
    """A model of one layer: `layer(ops, batch)` gives logits [N, MOST_DRAFTED] of the frequent tokens.

    `batch.activations` [T, D] are hidden states, and `token_ids` the tokens that follow each. Attributes, as
    of other models: config, of one layer; parameters and vectors that a draft reads; embedding, the model's.
    """

    def __init__(self, source: WeightSource, model: Llama) -> None:
        """Raises UnsupportedError if the source has no such layer, or the model another kind of norm."""
        super().__init__(model)
        config = model.config
        if not has_next_token_layer(source, config):
            raise UnsupportedError("a layer for multi-token prediction that is supported was not found")
        last = next(layer for layer in reversed(config.layers) if not layer.is_recurrent)
        self.config = replace(config, n_layers=1, layers=(last,))
        taken = TakenWeights(source)
        first = ShiftedLayers(taken, config.n_layers)
        name, d_model, eps = "model.layers.0", config.d_model, config.norm_eps
        self._embedding_norm = RMSNorm(first, f"{name}.enorm", d_model, eps)
        self._hidden_norm = RMSNorm(first, f"{name}.hnorm", d_model, eps)
        self._joined = Linear(first, [f"{name}.eh_proj"], (d_model,), 2 * d_model)
        self.blocks = [model.block_type(first, self.config, 0)]
        self.norm = RMSNorm(first, f"{name}.shared_head.norm", d_model, eps)
        self.n_frequent = min(MOST_DRAFTED, config.n_vocab)
        self._head, self._bias = _first_rows(model, self.n_frequent)
        head = Parameter("head", self._head.shape, self._head.type.name, self._head.stored.nbytes)
        self.parameters = (*taken.parameters.values(), head)
        self.vectors = tuple(taken.vectors.values())

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """See the class. Writes the batch's tokens to the cache."""
        embedded = self._embedding_norm(ops, self._model.embed(ops, batch))
        hidden = self._hidden_norm(ops, ops.activations(batch, self.config.d_model))  # type: ignore[attr-defined]
        x = self.through_blocks(ops, self._joined(ops, ops.join_heads((embedded, hidden), 1)), batch)
        x = ops.tap(RESULT, None, self.norm(ops, ops.logit_rows(x, batch)))
        return self._model.adjust_logits(ops, ops.linear(x, (self._head,), self._bias))

    def of_all(self, ops: Ops, batch: Any) -> Tensor:
        """Logits [N, V] of all tokens, by the results that are the batch's activations."""
        x = ops.logit_rows(ops.activations(batch, self.config.d_model), batch)  # type: ignore[attr-defined]
        model, head = self._model, self._model.head
        y = model.embedding.logits(ops, x, model.head_bias) if head is None else head(ops, x)
        return model.adjust_logits(ops, y)


def is_after_last(name: str, n_layers: int) -> bool:
    """True for a tensor of a layer after the model's, by its name here or in a GGUF file, or in `mtp`."""
    match = _LAYER.match(name)
    return name.startswith("mtp.") or (match is not None and int(match[1]) >= n_layers)


def has_next_token_layer(source: WeightSource, config: ModelConfig) -> bool:
    """True if a checkpoint has a layer for multi-token prediction."""
    return source.has(f"model.layers.{config.n_layers}.eh_proj.weight")


def take_next_token_layer(source: WeightSource, model: Llama) -> None:
    """Take all tensors of a checkpoint's layer, also an embedding and a head of its own, which nothing reads.

    Raises UnsupportedError as `NextTokenLayer` does.
    """
    NextTokenLayer(source, model)
    config = model.config
    for module in ("embed_tokens", "shared_head.head"):
        name = f"model.layers.{config.n_layers}.{module}.weight"
        if source.has(name):
            source.matrix(name, (config.n_vocab, config.d_model))


def _first_rows(model: Llama, n: int) -> tuple[Weight, Vector | None]:
    """Return the first rows of a model's head, and of its bias."""
    head = model.head
    whole = head.weights[0] if isinstance(head, Linear) else model.embedding.weight
    bias = head.bias if isinstance(head, Linear) else model.head_bias
    rows = Weight(whole.data[:n], whole.type, (n, whole.shape[1]), "head", whole.per_token)
    return rows, None if bias is None else Vector(bias.data[:n], "head.bias")


class ShiftedLayers:
    """A `WeightSource` whose layers are another's, `shift` later."""

    def __init__(self, source: WeightSource, shift: int) -> None:
        self._source, self._shift = source, shift

    def __getattr__(self, name: str) -> Any:
        """A method whose first argument is a tensor's name."""
        method = getattr(self._source, name)
        return lambda tensor, *others: method(_LAYER.sub(self._other, tensor), *others)

    def _other(self, match: re.Match[str]) -> str:
        return f"model.layers.{int(match[1]) + self._shift}."
