"""Fills a step's arrays from scheduled chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

import numpy as np

from kukri.dataclass import dataclass
from kukri.engine.spans.embedding_spans import EmbeddingSpans
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.step import ForwardBatch, StepInputs


class CachedSequence(Protocol):
    """A token sequence: its tokens and their types (None: all 0), its rows of the page tables, the slot of
    its recurrent state.

    `page_rows` has a row for each pool of the cache, or one that stands for all. `adapter_slot` is the
    slot of its adapter, -1 for none. `spans` are the spans among its tokens.
    """

    tokens: IntArray
    token_types: IntArray | None
    state_slot: int

    @property
    def page_rows(self) -> Sequence[IntArray]:
        """See the class."""

    @property
    def adapter_slot(self) -> int:
        """See the class."""

    @property
    def spans(self) -> EmbeddingSpans:
        """See the class."""


@dataclass(eq=False, slots=True)  # frozen ones take 2 us to make
class Chunk:
    """Tokens `start` to `start + n_tokens - 1` of a sequence; the last `n_logits` of them want logits.

    The last `n_drafts` are draft tokens, which lie in its `tokens` beyond its own; or `n_after` tokens follow
    the rows that want logits. No token sees the last `n_unseen`. `saves`: (number of tokens, slot) of each
    copy of the state after that number of tokens.
    """

    sequence: CachedSequence
    start: int
    n_tokens: int
    n_logits: int
    n_drafts: int = 0
    n_after: int = 0
    n_unseen: int = 0
    saves: Sequence[tuple[int, int]] = ()


class BatchBuilder:
    """Fills a program's inputs: token types only if the model `has_types`, recurrent states if it
    `has_states`, adapters if it `has_adapters`, positions of several axes if it `has_axes`.
    """

    def __init__(
        self,
        inputs: StepInputs,
        page_tokens: int,
        *,
        has_types: bool = False,
        has_states: bool = False,
        has_adapters: bool = False,
        has_axes: bool = False,
    ) -> None:
        self._inputs, self._page_tokens = inputs, page_tokens
        self._has_types, self._has_states, self._has_adapters = has_types, has_states, has_adapters
        self._has_axes = has_axes
        self._last: Sequence[Chunk] | None = None  # the chunks of the last batch, if of one token each
        # memoryviews take less time for one number than NumPy
        arrays = inputs.token_ids, inputs.positions, inputs.slots, inputs.context_len
        self._token_ids, self._positions, self._slots, self._context_len = (a.data for a in arrays)
        self._pools = inputs.pools
        others = enumerate(inputs.other_pools, 1)
        self._others = [(pages.slots.data, pages.page_table, pool) for pool, pages in others]
        self._counting = np.arange(inputs.page_table.shape[1] * page_tokens, dtype=np.int32)

    def build(self, chunks: Sequence[Chunk], activations: FloatArray | None = None) -> ForwardBatch:
        """The batch of one step: tokens and rows of logits in the order of chunks, the drafts' rows last.

        Of the list of chunks that the last batch had, which advanced by a token each, only what differs is
        written: nobody else may have written to the inputs. `activations` [T, D] are the batch's.
        """
        if chunks is self._last:
            return self._advance(chunks)
        inputs, page_tokens = self._inputs, self._page_tokens
        t = n_rows = 0
        draft_rows: list[int] = []
        for s, chunk in enumerate(chunks):
            sequence, start, n_tokens = chunk.sequence, chunk.start, chunk.n_tokens
            stop = start + n_tokens
            if n_tokens == 1:  # a decode step: scalars cost less than slices
                inputs.token_ids[t] = sequence.tokens[start]
                inputs.positions[t] = start
            else:
                positions = self._counting[start:stop]
                inputs.token_ids[t : t + n_tokens] = sequence.tokens[start:stop]
                inputs.positions[t : t + n_tokens] = positions
            if sequence.spans.inputs:
                sequence.spans.blank(inputs.token_ids[t : t + n_tokens], start)
            for (slots, page_table), pages in zip(self._pools, cycle(sequence.page_rows)):
                page_table[s] = pages
                if n_tokens == 1:
                    slots[t] = pages[start // page_tokens] * page_tokens + start % page_tokens
                else:
                    own = pages[positions // page_tokens] * page_tokens + positions % page_tokens
                    slots[t : t + n_tokens] = own
            if self._has_types:
                types = sequence.token_types
                inputs.token_types[t : t + n_tokens] = 0 if types is None else types[start:stop]
            if self._has_states:
                inputs.state_slots[s] = sequence.state_slot
                inputs.state_saves[t : t + n_tokens] = -1
                for n_past, slot in chunk.saves:
                    inputs.state_saves[t + n_past - start - 1] = slot
            t += n_tokens
            inputs.query_start[s + 1] = t
            inputs.context_len[s] = stop - chunk.n_unseen
            if self._has_adapters:
                inputs.adapters[s] = sequence.adapter_slot
            stop_row = t - chunk.n_drafts - chunk.n_after
            for row in range(t - chunk.n_logits - chunk.n_after, stop_row):
                inputs.logit_rows[n_rows] = row
                n_rows += 1
            if chunk.n_drafts:
                draft_rows += range(t - chunk.n_drafts, t)
        if draft_rows:
            inputs.logit_rows[n_rows : n_rows + len(draft_rows)] = draft_rows
            n_rows += len(draft_rows)
        rotated_by = _rotated_by(chunks, inputs.positions[:t]) if self._has_axes else None
        is_plain = t == n_rows == len(chunks) and not (self._has_types or self._has_states)
        self._last = chunks if is_plain and rotated_by is None else None
        return inputs.batch(t, len(chunks), n_rows, rope_positions=rotated_by, activations=activations)

    def forget(self) -> None:
        """Keeps nothing of the last batch's requests."""
        self._last = None

    def _advance(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """`build` of chunks of one token each, which were the chunks of the last batch, a token ago."""
        size = self._page_tokens
        for s, chunk in enumerate(chunks):
            sequence, start = chunk.sequence, chunk.start
            index, place = divmod(start, size)
            row = sequence.page_rows[0]
            if place == 0:
                self._inputs.page_table[s] = row
            self._slots[s] = row.item(index) * size + place
            for slots, page_table, pool in self._others:
                row = sequence.page_rows[pool if len(sequence.page_rows) > 1 else 0]
                if place == 0:
                    page_table[s] = row
                slots[s] = row.item(index) * size + place
            self._token_ids[s] = sequence.tokens.item(start)
            self._positions[s] = start
            self._context_len[s] = start + 1
        n = len(chunks)
        return self._inputs.batch(n, n, n)


def _rotated_by(chunks: Sequence[Chunk], positions: IntArray) -> IntArray | None:
    """The positions that RoPE rotates by: [3, T] if tokens in spans have several, [T] if spans before
    them moved theirs, None if positions count tokens.
    """
    found: IntArray | None = None
    t, is_mixed = 0, False
    for chunk in chunks:
        start, stop = chunk.start, chunk.start + chunk.n_tokens
        own = chunk.sequence.spans.positions(start, stop)
        if own is not None:
            found = np.array([positions] * 3) if found is None else found
            found[:, t : t + chunk.n_tokens] = own
            is_mixed = is_mixed or chunk.sequence.spans.has_rows(start, stop)
        t += chunk.n_tokens
    return found if found is None or is_mixed else found[0]
