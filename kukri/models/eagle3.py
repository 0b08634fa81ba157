"""EAGLE-3's draft layers (Li et al. 2025, arXiv 2503.01840), as programs that draft a chain.

One layer and a head of its own predict token i + 2 from the embedding of token i + 1 and from the model's
residual stream for token i at three depths, joined and projected to a row. The state before the head's
norm takes the row's place when more is drafted. The head knows a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.taps import tap_name
from kukri.models.layers import Attention, Linear, RMSNorm
from kukri.models.llama import Block, Llama
from kukri.models.next_token import RESULT, RowReader
from kukri.models.weights import TakenWeights, WeightSource

N_ROWS = 3  # rows of the model's stream that are joined


class _JoinedBlock(Block):
    """The layer. With `norms_residual` the row is normed before the layer's results are added to it."""

    attention_type = Attention.of(n_inputs=2)  # the embedding and the row, side by side

    def __init__(self, source: WeightSource, config: ModelConfig, *, norms_residual: bool) -> None:
        super().__init__(source, config, 0)
        self._hidden_norm = RMSNorm(source, "model.layers.0.hidden_norm", config.d_model, config.norm_eps)
        self._norms_residual = norms_residual

    def join(self, ops: Ops, embedded: Tensor, row: Tensor, batch: Any) -> Tensor:
        """Embeddings and rows, both [T, D] -> [T, D]."""
        normed = self._hidden_norm(ops, row)
        x = ops.join_heads((self.attention_norm(ops, embedded), normed), 1)
        x = self.attention(ops, x, normed if self._norms_residual else row, batch)
        return self.mlp(ops, self.mlp_norm(ops, x), x)  # type: ignore[no-any-return]


class Eagle3(RowReader):
    """The layer: `layer(ops, batch)` gives logits [N, V] of the head's tokens, which `to_target` names.

    `batch.activations` [T, D] are rows that `reduced` made, or that it showed RESULT itself, and `token_ids`
    the tokens that follow each.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        model: Llama,
        depths: Sequence[int],
        to_target: IntArray,
        *,
        norms_residual: bool,
    ) -> None:
        """`depths`: the model's layers before which its stream is read, in order. `to_target` [V]."""
        self.config, self._model, self.embedding = config, model, model.embedding
        self.taps = tuple(tap_name("hook_resid_pre", layer) for layer in depths)
        self.to_target, d_model = to_target, config.d_model
        taken = TakenWeights(source)
        self._fc = Linear(taken, ["fc"], (d_model,), N_ROWS * d_model)
        self._block = _JoinedBlock(taken, config, norms_residual=norms_residual)
        self.blocks = [self._block]
        self.norm = RMSNorm(taken, "model.norm", d_model, config.norm_eps)
        self._head = Linear(taken, ["lm_head"], (len(to_target),), d_model)
        self.parameters = tuple(taken.parameters.values())
        self.vectors = tuple(taken.vectors.values())

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """See the class. Writes the batch's tokens to the cache."""
        row = ops.activations(batch, self.config.d_model)  # type: ignore[attr-defined]
        x = self._block.join(ops, self.embedding(ops, batch), row, batch)
        x = ops.tap(RESULT, None, ops.logit_rows(x, batch))
        return self._head(ops, self.norm(ops, x))

    def reduced(self, ops: Ops, batch: Any) -> Tensor:
        """Rows [N, D] of the model's, joined, that are the batch's activations [N, N_ROWS * D]."""
        x = ops.activations(batch, N_ROWS * self.config.d_model)  # type: ignore[attr-defined]
        return self._fc(ops, ops.logit_rows(x, batch))

    def joined(self, rows: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate(rows, axis=1)
