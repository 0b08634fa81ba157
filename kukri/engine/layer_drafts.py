"""Drafts by a layer that reads the larger model's rows: the base of its own layer's and of EAGLE-3's.

The layer is a draft model whose tokens are a request's, one later. For each it reads the rows of taps for the
token before, noted as steps run. Its sequence begins where a request's first step does, so it does not see
what a cached prefix holds. A draft may be worse for that, but no answer differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kukri.engine.batch_builder import Chunk
from kukri.engine.draft_model import DraftModel, DraftSetup, ModelDrafts, chunk_of, model_drafts
from kukri.engine.row_drafts import RowDrafts
from kukri.engine.scheduled_step import ScheduledChunk
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import CompiledProgram
from kukri.kernels.op_set import Program
from kukri.kernels.step import StepLimits
from kukri.models.next_token import RESULT, RowReader

_MOST_UNREAD = 64  # rows of a request that wait for others, whether drafts are wanted or not


class LayerDrafts(RowDrafts, ModelDrafts):
    """A layer's state for one request, whose tokens are the request's from `first` on."""

    keeps_accepted = False  # its cache entries of drafts come from its own rows, not from the model's rows

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first = 0  # the token after the first whose row was noted; 0 before there is one
        self.own_row: FloatArray | None = None  # [1, D], of its last token, in place of the model's

    def note(self, chunk: ScheduledChunk, rows: FloatArray) -> None:
        start = chunk.start
        place = start + 1 - self.first
        if self._rows is None or not 0 <= place <= self._stop_row:
            self.release()
            self.first, place = start + 1, 0
        if self._rows is None or place <= self._first_row:
            self._rows = rows[max(self._first_row - place, 0) :].copy()
        else:
            self._rows = np.concatenate([self._rows[: place - self._first_row], rows])

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        super().follow(tokens[self.first :], max(n_tokens - self.first, 0) if self.first else 0)
        if self._rows is not None and self.n_cached > self._first_row:
            self._rows = self._rows[self.n_cached - self._first_row :]
            self._first_row = self.n_cached

    def chances(self, n: int) -> Iterator[float]:
        """See Drafts.chances: none while the row of the last token is missing."""
        return super().chances(n if 0 < self.n_tokens <= self._stop_row else 0)

    def release(self) -> None:
        super().release()
        self._rows, self.own_row, self.first, self._first_row, self.n_tokens = None, None, 0, 0, 0


class LayerModel(DraftModel):
    """Computes drafts by a layer, of rows that `StepRows` notes."""

    kind = LayerDrafts

    def __init__(self, layer: RowReader, setup: DraftSetup) -> None:
        super().__init__(layer, setup)
        self.layer: RowReader = layer
        self._results: FloatArray | None = None  # the rows that the last run made
        self._runner.hooks.add({RESULT: self._keep})

    def read_ahead(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Reads what is known of requests of which much is unread, such as prompts: all but the last row."""
        n_left, reading, read = self._max_tokens, list[Chunk](), list[tuple[LayerDrafts, int]]()
        for chunk in chunks:
            sequence, drafts = chunk.sequence, model_drafts(chunk.request.drafts)
            if not isinstance(drafts, LayerDrafts):
                continue
            drafts.follow(sequence.tokens, min(sequence.n_cached + 1, sequence.n_tokens))
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
        sequences: list[Any] = [chunk.sequence for chunk in chunks]
        if chunks[0].start >= sequences[0].n_tokens:  # drafts, of all sequences
            self._activations = np.concatenate([drafts.own_row for drafts in sequences])
        else:
            rows = [drafts.rows(chunk.start, chunk.n_tokens) for drafts, chunk in zip(sequences, chunks)]
            self._activations = self._read(np.concatenate(rows))
        super()._run(chunks, drafting)
        for drafts, row in zip(drafting, () if self._results is None else self._results):
            assert isinstance(drafts, LayerDrafts)
            drafts.own_row = row[None]

    def _read(self, rows: FloatArray) -> FloatArray:
        """What the layer reads [T, D] of the model's rows: the rows."""
        return rows

    def _compiled(self, program: Program, n_most: int) -> CompiledProgram:
        """A program of at most `n_most` rows."""
        return self._runner.backend.compile(program, None, StepLimits.of_rows(n_most))

    def _keep(self, name: str, x: FloatArray) -> None:
        self._results = x.copy()
