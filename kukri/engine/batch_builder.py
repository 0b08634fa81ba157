"""Fills a step's arrays from scheduled chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kukri.kernels.types import ForwardBatch, IntArray, StepInputs


class CachedSequence(Protocol):
    """A token sequence and its row of the page table; the types of its tokens, or None: all 0."""

    tokens: IntArray
    page_row: IntArray
    token_types: IntArray | None


@dataclass(eq=False, slots=True)  # frozen ones take 2 us to make
class Chunk:
    """Tokens `start` to `start + n_tokens - 1` of a sequence; the last `n_logits` of them want logits.

    The last `n_drafts` are draft tokens, which lie in its `tokens` beyond its own; or `n_after` tokens follow
    those that want logits.
    """

    sequence: CachedSequence
    start: int
    n_tokens: int
    n_logits: int
    n_drafts: int = 0
    n_after: int = 0


class BatchBuilder:
    """Fills a program's inputs, token types only if the model `has_types`."""

    def __init__(self, inputs: StepInputs, page_tokens: int, *, has_types: bool = False) -> None:
        self._inputs, self._page_tokens, self._has_types = inputs, page_tokens, has_types
        self._counting = np.arange(inputs.page_table.shape[1] * page_tokens, dtype=np.int32)

    def build(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """The batch of one step: tokens and rows of logits in the order of chunks, the drafts' rows last."""
        inputs, page_tokens = self._inputs, self._page_tokens
        t = n_rows = 0
        draft_rows: list[int] = []
        for s, chunk in enumerate(chunks):
            sequence, start, n_tokens = chunk.sequence, chunk.start, chunk.n_tokens
            stop = start + n_tokens
            if n_tokens == 1:  # a decode step: scalars cost less than slices
                inputs.token_ids[t] = sequence.tokens[start]
                inputs.positions[t] = start
                inputs.slots[t] = sequence.page_row[start // page_tokens] * page_tokens + start % page_tokens
            else:
                positions = self._counting[start:stop]
                inputs.token_ids[t : t + n_tokens] = sequence.tokens[start:stop]
                inputs.positions[t : t + n_tokens] = positions
                pages = sequence.page_row[positions // page_tokens]
                inputs.slots[t : t + n_tokens] = pages * page_tokens + positions % page_tokens
            if self._has_types:
                types = sequence.token_types
                inputs.token_types[t : t + n_tokens] = 0 if types is None else types[start:stop]
            t += n_tokens
            inputs.query_start[s + 1] = t
            inputs.context_len[s] = stop
            inputs.page_table[s] = sequence.page_row
            stop_row = t - chunk.n_drafts - chunk.n_after
            for row in range(t - chunk.n_logits - chunk.n_after, stop_row):
                inputs.logit_rows[n_rows] = row
                n_rows += 1
            if chunk.n_drafts:
                draft_rows += range(t - chunk.n_drafts, t)
        if draft_rows:
            inputs.logit_rows[n_rows : n_rows + len(draft_rows)] = draft_rows
            n_rows += len(draft_rows)
        return inputs.batch(t, len(chunks), n_rows)
