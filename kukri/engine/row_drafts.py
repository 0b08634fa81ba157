"""What drafts that are made of rows have in common: rows that a model made of tokens, noted as steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kukri.engine.draft_model import model_drafts
from kukri.engine.scheduled_step import ScheduledChunk
from kukri.kernels.arrays import FloatArray

if TYPE_CHECKING:
    from kukri.models.next_token import RowReader


class RowDrafts:
    """One request's drafts that are made of rows, which its tokens from some place on have."""

    _rows: FloatArray | None = None  # [n, D]
    _first_row = 0  # the place of the first

    def note(self, chunk: ScheduledChunk, rows: FloatArray) -> None:
        """Takes the rows [n, D] that the model made of the request's tokens in a chunk."""
        raise NotImplementedError

    def rows(self, start: int, n: int) -> FloatArray:
        """The rows [n, D] of places from `start` on."""
        assert self._rows is not None, "drafts are made of rows that were noted"
        return self._rows[start - self._first_row :][:n]

    @property
    def _stop_row(self) -> int:
        """The place after the last row."""
        return self._first_row + (0 if self._rows is None else len(self._rows))


class StepRows:
    """Notes the rows of a step's requests that have drafts made of them."""

    def __init__(self, chunks: Sequence[ScheduledChunk], reader: RowReader) -> None:
        self._chunks, self._reader = chunks, reader
        self.names = frozenset(reader.taps)
        self._seen: list[FloatArray] = []  # rows of the taps that the step has come by

    def __call__(self, name: str, x: FloatArray) -> None:
        """Reads a tap's rows x [T, D]."""
        if name not in self.names:
            return
        if name != self._reader.taps[-1]:  # another layer writes where they are
            self._seen.append(x.copy())
            return
        row = 0
        for chunk in self._chunks:
            drafts, stop = model_drafts(chunk.request.drafts), row + chunk.n_tokens
            if isinstance(drafts, RowDrafts):
                drafts.note(chunk, self._reader.joined([each[row:stop] for each in (*self._seen, x)]))
            row = stop


def has_row_drafts(chunks: Sequence[ScheduledChunk]) -> bool:
    """True if a request of a step has drafts made of rows."""
    return any(isinstance(model_drafts(chunk.request.drafts), RowDrafts) for chunk in chunks)
