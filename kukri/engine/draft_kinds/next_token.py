"""The larger model's own layer for multi-token prediction (`kukri.models.next_token`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftSource, ModelDrafts
from kukri.engine.layer_drafts import LayerDrafts, LayerModel
from kukri.errors import ConfigError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import CompiledProgram, Logits
from kukri.kernels.step import rows_batch
from kukri.models.llama import Llama
from kukri.models.next_token import NextTokenLayer

_N_LAST, _MOST_RARE = 64, 8  # last tokens of a text, and how many may be rare for frequent ones to be drafted


class NextTokenDrafts(LayerDrafts):
    """The state of the model's own layer, which drafts frequent tokens unless the text has others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_rare = False  # True if rare tokens are likely: all are drafted then
        # set by the model: tokens that are not rare, and what a draft among all costs by one among these
        self.n_frequent, self.rare_factor = 0, 1.0

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        super().follow(tokens, n_tokens)
        n_rare = np.count_nonzero(tokens[max(n_tokens - _N_LAST, 0) : n_tokens] >= self.n_frequent)
        self.has_rare = bool(n_rare > _MOST_RARE)
        self.cost_factor = self.rare_factor if self.has_rare else 1.0


class NextTokenDraftModel(LayerModel):
    """Computes drafts by the model's own layer."""

    kind = NextTokenDrafts
    layer: NextTokenLayer
    _head: CompiledProgram | None = None  # for rare tokens, once there are some

    def drafts(self, *more: Any) -> NextTokenDrafts:
        made, layer = super().drafts(*more), self.layer
        assert isinstance(made, NextTokenDrafts)
        rest = (layer.config.n_vocab - layer.n_frequent) * layer.config.d_model / layer.n_parameters
        made.n_frequent, made.rare_factor = layer.n_frequent, 1 + rest
        return made

    def _chosen(self, logits: Logits, drafting: Sequence[ModelDrafts]) -> Sequence[int]:
        found = list(super()._chosen(logits, drafting))
        rare = [
            i for i, drafts in enumerate(drafting) if isinstance(drafts, NextTokenDrafts) and drafts.has_rare
        ]
        if rare and self._results is not None:
            for i, token in zip(rare, self._of_all(self._results[rare]), strict=True):
                found[i] = token
        return found

    def _of_all(self, results: FloatArray) -> Sequence[int]:
        """The likeliest of all tokens by results [n, D]."""
        self._head = self._head or self._compiled(self.layer.of_all, self._runner.limits.max_sequences)
        return self._head(rows_batch(results)).argmax()


def _read(path: Path, larger: LargerModel) -> DraftSource:
    """Raises ConfigError if the files of the model have no such layer."""
    model = larger.model
    try:
        if not isinstance(model, Llama):
            raise UnsupportedError("the model has no layer for multi-token prediction that is supported")
        with open_checkpoint(path, larger.quantize) as checkpoint:
            layer = NextTokenLayer(checkpoint.weights(model.config), model)
    except UnsupportedError as error:
        option = f"--draft-model {NEXT_TOKEN.word}"
        raise ConfigError(f"{path} cannot draft for itself ({option}): {error}; leave it out") from None
    return DraftSource(layer, NextTokenDraftModel)


NEXT_TOKEN = DraftKind(_read, word="mtp")
