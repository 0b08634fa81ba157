"""From scheduled chunks to the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kukri.kernels.types import ForwardBatch, IntArray, StepLimits


class PagedText(Protocol):
    """Tokens, and the pages that hold their keys and values, in order."""

    tokens: IntArray
    page_row: IntArray


Chunk = tuple[PagedText, int, int, int, int]  # a text, and the numbers of `ScheduledChunk`


class BatchBuilder:
    """Fills arrays made once; a batch is views of them, valid until the next `build`."""

    def __init__(self, limits: StepLimits, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._token_ids, self._positions, self._slots = np.zeros((3, limits.max_tokens), np.int32)
        self._query_start = np.zeros(limits.max_sequences + 1, np.int32)
        self._context_len = np.zeros(limits.max_sequences, np.int32)
        self._page_table = np.zeros((limits.max_sequences, limits.max_pages), np.int32)
        self._logit_rows = np.zeros(limits.max_logit_rows, np.int32)
        self._counting = np.arange(limits.max_pages * page_tokens, dtype=np.int32)
        self._sizes = (-1, -1, -1)
        self._batch: ForwardBatch

    def build(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """The batch of one step: tokens and rows of logits in the order of chunks, the guesses' rows last."""
        page_tokens = self._page_tokens
        t = n_rows = 0
        draft_rows: list[int] = []
        for s, (text, start, n_tokens, n_logits, n_drafts) in enumerate(chunks):
            stop = start + n_tokens
            if n_tokens == 1:  # a decode step: scalars cost less than slices
                self._token_ids[t] = text.tokens[start]
                self._positions[t] = start
                self._slots[t] = text.page_row[start // page_tokens] * page_tokens + start % page_tokens
            else:
                positions = self._counting[start:stop]
                self._token_ids[t : t + n_tokens] = text.tokens[start:stop]
                self._positions[t : t + n_tokens] = positions
                pages = text.page_row[positions // page_tokens]
                self._slots[t : t + n_tokens] = pages * page_tokens + positions % page_tokens
            t += n_tokens
            self._query_start[s + 1] = t
            self._context_len[s] = stop
            self._page_table[s] = text.page_row
            for row in range(t - n_logits, t - n_drafts):
                self._logit_rows[n_rows] = row
                n_rows += 1
            if n_drafts:
                draft_rows += range(t - n_drafts, t)
        if draft_rows:
            self._logit_rows[n_rows : n_rows + len(draft_rows)] = draft_rows
            n_rows += len(draft_rows)
        sizes = (t, len(chunks), n_rows)
        if sizes != self._sizes:
            self._sizes, self._batch = sizes, self._views(*sizes)
        return self._batch

    def _views(self, n_tokens: int, n_sequences: int, n_rows: int) -> ForwardBatch:
        return ForwardBatch(
            self._token_ids[:n_tokens],
            self._positions[:n_tokens],
            self._slots[:n_tokens],
            self._query_start[: n_sequences + 1],
            self._context_len[:n_sequences],
            self._page_table[:n_sequences],
            self._logit_rows[:n_rows],
        )
