"""Drafts by the model's own layer for multi-token prediction (models/next_token.py).

A draft model whose tokens are a request's, one later, and which reads what the model made of the token before
each: the rows of a tap, noted as steps run. Its sequence begins where a request's first step does: what a
cached prefix holds it does not see. So a draft may be worse, and no answer differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.engine.batch_builder import Chunk
from kukri.engine.draft_model import DraftModel, ModelDrafts, chunk_of, model_drafts
from kukri.engine.row_drafts import RowDrafts
from kukri.engine.scheduled_step import ScheduledChunk
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import CompiledProgram, Logits
from kukri.kernels.step import ForwardBatch
from kukri.models import Model
from kukri.models.next_token import RESULT, NextTokenLayer

_MOST_UNREAD = 64  # rows of a request that wait for others, whether drafts are wanted or not
_N_LAST, _MOST_RARE = 64, 8  # last tokens of a text, and how many may be rare for frequent ones to be drafted


class NextTokenDrafts(RowDrafts, ModelDrafts):
    """The layer's state for one request, whose tokens are the request's from `first` on."""

    keeps_accepted = False  # what it read of drafts it made of its own rows, not of the model's

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first = 0  # the token after the first whose row was noted; 0 before there is one
        self.has_rare = False  # True if rare tokens are likely: all are drafted then
        # set by the model: tokens that are not rare, and what a draft costs among these and among all
        self.n_frequent, self.costs = 0, (0.0, 0.0)

    def note(self, chunk: ScheduledChunk, rows: FloatArray) -> None:
        """Takes the rows [n, D] that the model made of the request's tokens in a chunk.

        Those of drafts that were rejected are overwritten by the next.
        """
        start = chunk.start
        place = start + 1 - self.first
        if self._rows is None or not 0 <= place <= self._stop_row:
            self.release()
            self.first, place = start + 1, 0
        self._put(place, rows)

    def add_own(self, row: FloatArray) -> None:
        """Takes the row that the layer made of its last token, in place of the model's."""
        self._put(self.n_cached, row[None])

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """See Drafts.follow."""
        super().follow(tokens[self.first :], max(n_tokens - self.first, 0) if self.first else 0)
        n_rare = np.count_nonzero(tokens[max(n_tokens - _N_LAST, 0) : n_tokens] >= self.n_frequent)
        self.has_rare = bool(n_rare > _MOST_RARE)
        self.relative_cost = self.costs[self.has_rare]
        if self._rows is not None and self.n_cached > self._first_row:
            self._rows = self._rows[self.n_cached - self._first_row :]
            self._first_row = self.n_cached

    def chances(self, n: int) -> Iterator[float]:
        """See Drafts.chances: none while the row of the last token is missing."""
        return super().chances(n if 0 < self.n_tokens <= self._stop_row else 0)

    def release(self) -> None:
        """See Drafts.release."""
        super().release()
        self._rows, self.first, self._first_row, self.n_tokens = None, 0, 0, 0

    def _put(self, place: int, rows: FloatArray) -> None:
        """Makes rows those from `place` on, and the last."""
        if self._rows is None or place <= self._first_row:
            self._rows = rows[max(self._first_row - place, 0) :].copy()
        else:
            self._rows = np.concatenate([self._rows[: place - self._first_row], rows])


class NextTokenDraftModel(DraftModel):
    """Computes drafts by the layer, of rows that `StepRows` notes."""

    kind = NextTokenDrafts
    layer: NextTokenLayer

    def __init__(self, layer: Model, *args: Any) -> None:
        """`args` are those of DraftModel after the model."""
        super().__init__(layer, *args)
        assert isinstance(layer, NextTokenLayer), "other models draft without rows"
        self.layer = layer
        self._results: FloatArray | None = None  # what the last run made
        self._head: CompiledProgram | None = None  # for rare tokens, once there are some
        self._runner.hooks.add({RESULT: self._keep})

    def drafts(self, *more: Any) -> NextTokenDrafts:
        """See DraftModel.drafts."""
        made, layer = super().drafts(*more), self.layer
        assert isinstance(made, NextTokenDrafts)
        rest = (layer.config.n_vocab - layer.n_frequent) * layer.config.d_model / layer.n_parameters
        made.n_frequent, made.costs = layer.n_frequent, (made.relative_cost, made.relative_cost * (1 + rest))
        return made

    def read_ahead(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Reads what is known of requests of which much is unread, such as prompts: all but the last row."""
        n_left, reading, read = self._max_tokens, list[Chunk](), list[tuple[NextTokenDrafts, int]]()
        for chunk in chunks:
            request, drafts = chunk.request, model_drafts(chunk.request.drafts)
            if not isinstance(drafts, NextTokenDrafts):
                continue
            drafts.follow(request.tokens, min(request.n_cached + 1, request.n_tokens))
            n = min(drafts.n_tokens - 1 - drafts.n_cached, n_left)
            if n < _MOST_UNREAD:
                continue
            if not self.make_room(drafts, drafts.n_cached + n):
                drafts.release()
                continue
            reading.append(chunk_of(drafts, drafts.n_cached, drafts.n_cached + n))
            read.append((drafts, drafts.n_cached + n))
            n_left -= n
        if reading:
            self._run(reading, [])
        for drafts, n_cached in read:
            drafts.n_cached = n_cached

    def _run(self, chunks: list[Chunk], drafting: list[ModelDrafts]) -> None:
        rows = [chunk.sequence.rows(chunk.start, chunk.n_tokens) for chunk in chunks]  # type: ignore[attr-defined]
        self._activations = np.concatenate(rows)
        super()._run(chunks, drafting)
        for drafts, row in zip(drafting, () if self._results is None else self._results):
            assert isinstance(drafts, NextTokenDrafts)
            drafts.add_own(row)

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
        if self._head is None:
            limits = replace(self._runner.limits, max_tokens=self._runner.limits.max_sequences)
            self._head = self._runner.backend.compile(self.layer.of_all, self._runner.cache, limits)
        counted = np.arange(len(results) + 1, dtype=np.int32)
        rows, none = counted[:-1], np.zeros(len(results), np.int32)
        batch = ForwardBatch(none, none, none, counted, none + 1, none[:, None], rows, activations=results)
        return self._head(batch).argmax()

    def _keep(self, name: str, x: FloatArray) -> None:
        self._results = x.copy()
