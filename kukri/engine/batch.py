"""From scheduled chunks to the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kukri.kernels.types import ForwardBatch, IntArray, StepInputs


class PagedText(Protocol):
    """Tokens, and the pages that hold their keys and values, in order."""

    tokens: IntArray
    page_row: IntArray


Chunk = tuple[PagedText, int, int, int, int]  # a text, and the numbers of `ScheduledChunk`


class BatchBuilder:
    """Fills a program's inputs."""

    def __init__(self, inputs: StepInputs, page_tokens: int) -> None:
        self._inputs, self._page_tokens = inputs, page_tokens
        self._counting = np.arange(inputs.page_table.shape[1] * page_tokens, dtype=np.int32)

    def build(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """The batch of one step: tokens and rows of logits in the order of chunks, the guesses' rows last."""
        inputs, page_tokens = self._inputs, self._page_tokens
        t = n_rows = 0
        draft_rows: list[int] = []
        for s, (text, start, n_tokens, n_logits, n_drafts) in enumerate(chunks):
            stop = start + n_tokens
            if n_tokens == 1:  # a decode step: scalars cost less than slices
                inputs.token_ids[t] = text.tokens[start]
                inputs.positions[t] = start
                inputs.slots[t] = text.page_row[start // page_tokens] * page_tokens + start % page_tokens
            else:
                positions = self._counting[start:stop]
                inputs.token_ids[t : t + n_tokens] = text.tokens[start:stop]
                inputs.positions[t : t + n_tokens] = positions
                pages = text.page_row[positions // page_tokens]
                inputs.slots[t : t + n_tokens] = pages * page_tokens + positions % page_tokens
            t += n_tokens
            inputs.query_start[s + 1] = t
            inputs.context_len[s] = stop
            inputs.page_table[s] = text.page_row
            for row in range(t - n_logits, t - n_drafts):
                inputs.logit_rows[n_rows] = row
                n_rows += 1
            if n_drafts:
                draft_rows += range(t - n_drafts, t)
        if draft_rows:
            inputs.logit_rows[n_rows : n_rows + len(draft_rows)] = draft_rows
            n_rows += len(draft_rows)
        return inputs.batch(t, len(chunks), n_rows)
