"""A step: the batch of new tokens, the arrays that hold it, and its largest sizes.

Shape letters: T tokens in the step, S sequences, N rows with logits, B page size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kukri.kernels.arrays import FloatArray, IntArray


class PoolPages(NamedTuple):
    """Where the tokens of a step lie in a pool of pages, int32: see `ForwardBatch`."""

    slots: IntArray  # [T]
    page_table: IntArray  # [S, max_pages]


@dataclass(frozen=True)
class ForwardBatch:
    """One step: T new tokens of S sequences, back to back, no padding. All arrays int32.

    `slots[t]` = page * B + offset says where token t's key and value go. Sequence s owns tokens
    query_start[s] to query_start[s + 1]; its context_len[s] counts visible tokens, the new ones included. An
    encoder's last new tokens may lie beyond those: they see the others and are seen by none; or those may lie
    beyond, amid tokens that are in the cache.
    `page_table[s]` lists its pages in order (unused entries are 0). Both are of the cache's first pool
    (`cache.pool_windows`); `other_pools` has the others', where entries before the window are 0 too. Without
    any the first pool's stand for all. `logit_rows` are the tokens (indices into T) whose logits are wanted.

    `positions` count a sequence's tokens; if RoPE is to rotate by other numbers, `rope_positions` has them:
    one for each token, or one for each of the axes of its frequencies.
    `mask` is for a step of one sequence and a program compiled for it (StepLimits.mask_heads): float32
    [1 or H, T, context_len[0]], added to scores in place of causality and windows; a token that sees nothing
    gets zeros. `token_types` say to which of a pair of texts a token belongs; None: all to the first.
    `adapters[s]` is the slot of sequence s's adapter, -1 for none; None: no sequence has one.

    Recurrent layers read and write the state in slot `state_slots[s]` of sequence s (None: slot s); it counts
    as zeros for a sequence that begins, whose first token in the step has position 0. After token t they
    also copy it to slot `state_saves[t]`, -1 for no copy (None: none).

    `activations` [T, D] are the output of the preceding layers, for a program that starts after them
    (`StageOps`).
    """

    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    slots: IntArray  # [T]
    query_start: IntArray  # [S + 1]
    context_len: IntArray  # [S]
    page_table: IntArray  # [S, max_pages]
    logit_rows: IntArray  # [N]
    rope_positions: IntArray | None = None  # [T], or [axes, T]
    mask: FloatArray | None = None
    token_types: IntArray | None = None  # [T]
    adapters: IntArray | None = None  # [S]
    state_slots: IntArray | None = None  # [S]
    state_saves: IntArray | None = None  # [T]
    activations: FloatArray | None = None  # [T, D]
    other_pools: tuple[PoolPages, ...] = ()
    inputs: StepInputs | None = None  # whose arrays these are, so that none is copied; None: others

    def pages(self, pool: int) -> PoolPages:
        """Slots and page table of a pool."""
        if pool and self.other_pools:
            return self.other_pools[pool - 1]
        return PoolPages(self.slots, self.page_table)

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.context_len)

    @property
    def n_logit_rows(self) -> int:
        """N."""
        return len(self.logit_rows)


@dataclass(frozen=True)
class StepLimits:
    """The largest step a compiled program must take: T, S, N and pages per sequence.

    `mask_heads` is the first size of the mask that every step brings, 1 or H; 0 for steps without one.
    With `free_contexts` the contexts of an encoder may end before their sequences or, of backends that begin
    at taps, after them.
    """

    max_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_pages: int
    mask_heads: int = 0
    free_contexts: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class StepInputs:
    """The arrays that a program reads its steps from, int32 at their largest sizes (see `ForwardBatch`).

    Fill the beginning of each, and give the program a `batch` of that many: nothing is copied then.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_start: IntArray
    context_len: IntArray
    page_table: IntArray
    logit_rows: IntArray
    token_types: IntArray
    adapters: IntArray
    state_slots: IntArray
    state_saves: IntArray
    other_pools: tuple[PoolPages, ...] = ()
    _batch: ForwardBatch | None = None

    @classmethod
    def zeros(cls, limits: StepLimits, n_pools: int = 1) -> StepInputs:
        """Arrays for steps within `limits`, of a cache with so many pools."""
        t, s, n = limits.max_tokens, limits.max_sequences, limits.max_logit_rows
        token_ids, positions, slots, logit_rows, types = (np.zeros(n, np.int32) for n in (t, t, t, n, t))
        page_table = np.zeros((s, limits.max_pages), np.int32)
        starts, lengths, adapters = (np.zeros(n, np.int32) for n in (s + 1, s, s))
        states, saves = np.arange(s, dtype=np.int32), np.full(t, -1, np.int32)
        others = tuple(PoolPages(np.zeros_like(slots), np.zeros_like(page_table)) for _ in range(1, n_pools))
        more = (types, adapters, states, saves, others)
        return cls(token_ids, positions, slots, starts, lengths, page_table, logit_rows, *more)

    @property
    def pages(self) -> list[PoolPages]:
        """Slots and page table of each pool."""
        return [PoolPages(self.slots, self.page_table), *self.other_pools]

    def batch(self, n_tokens: int, n_sequences: int, n_logit_rows: int) -> ForwardBatch:
        """The arrays' contents as a step: views of them, valid until they are filled again.

        Steps of one size share one batch: what belongs to one of them goes into a `replace` of it.
        """
        last, sizes = self._batch, (n_tokens, n_sequences, n_logit_rows)
        if last is not None and (len(last.token_ids), len(last.context_len), len(last.logit_rows)) == sizes:
            return last
        self._batch = batch = ForwardBatch(
            self.token_ids[:n_tokens],
            self.positions[:n_tokens],
            self.slots[:n_tokens],
            self.query_start[: n_sequences + 1],
            self.context_len[:n_sequences],
            self.page_table[:n_sequences],
            self.logit_rows[:n_logit_rows],
            token_types=self.token_types[:n_tokens],
            adapters=self.adapters[:n_sequences],
            state_slots=self.state_slots[:n_sequences],
            state_saves=self.state_saves[:n_tokens],
            other_pools=tuple(
                PoolPages(pool.slots[:n_tokens], pool.page_table[:n_sequences]) for pool in self.other_pools
            ),
            inputs=self,
        )
        return batch

    def copy(self, batch: ForwardBatch) -> None:
        """Copies a batch of other arrays in, but for its mask and RoPE positions."""
        n_tokens, n_sequences, n_pages = batch.n_tokens, batch.n_sequences, batch.page_table.shape[1]
        self.token_ids[:n_tokens] = batch.token_ids
        self.positions[:n_tokens] = batch.positions
        for i, (slots, page_table) in enumerate(self.pages):
            slots[:n_tokens] = batch.pages(i).slots
            page_table[:n_sequences, :n_pages] = batch.pages(i).page_table
        self.query_start[: n_sequences + 1] = batch.query_start
        self.context_len[:n_sequences] = batch.context_len
        self.logit_rows[: batch.n_logit_rows] = batch.logit_rows
        self.token_types[:n_tokens] = 0 if batch.token_types is None else batch.token_types
        self.adapters[:n_sequences] = -1 if batch.adapters is None else batch.adapters
        own = np.arange(n_sequences, dtype=np.int32)
        self.state_slots[:n_sequences] = own if batch.state_slots is None else batch.state_slots
        self.state_saves[:n_tokens] = -1 if batch.state_saves is None else batch.state_saves
