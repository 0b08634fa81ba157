"""A step: the batch of new tokens, the inputs that hold its arrays (`step_arrays`), and its largest sizes.

Shape letters: T tokens in the step, S sequences, N rows with logits, B page size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kukri.dataclass import dataclass, field, replace
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.step_arrays import OPTIONAL_ARRAYS, PoolPages, StepArrays, StepCounts, arguments, arrays_of


@dataclass(eq=False, kw_only=True)  # a frozen one takes 2 us more to make
class ForwardBatch(StepArrays[IntArray]):
    """One step: T new tokens of S sequences, back to back, no padding.

    Sequence s owns tokens query_start[s] to query_start[s + 1]; its context_len[s] counts visible tokens, the
    new ones included. An encoder's last new tokens may lie beyond those: they see the others and are seen by
    none; or those may lie beyond, amid tokens that are in the cache. In the page tables of `other_pools`
    entries before the window are 0 too.

    If RoPE is to rotate by other numbers than `positions`, `rope_positions` has them: one for each token, or
    one for each of the axes of its frequencies.
    `mask` is for a step of one sequence and a program compiled for it (StepLimits.mask_heads): it is added to
    scores in place of causality and windows; a token that sees nothing gets zeros.

    Recurrent layers read and write the state in slot `state_slots[s]` of sequence s; it counts as zeros for a
    sequence that begins, whose first token in the step has position 0. After token t they also copy it to
    slot `state_saves[t]`.

    `activations` are the output of the preceding layers, for a program that starts after them (`StageOps`).
    """

    rope_positions: IntArray | None = None  # [T], or [axes, T]
    mask: FloatArray | None = None  # [1 or H, T, context_len[0]]
    activations: FloatArray | None = None  # [T, D]
    inputs: StepInputs | None = None  # they own these arrays, so that none is copied; None: none do

    def __post_init__(self) -> None:
        for row in OPTIONAL_ARRAYS:
            if getattr(self, row.name) is None:
                setattr(self, row.name, row.filled(self.counts, 0))

    @property
    def counts(self) -> StepCounts:
        """T, S and N."""
        return StepCounts.of(self.n_tokens, self.n_sequences, self.n_logit_rows)

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

    @classmethod
    def of_rows(cls, n_rows: int) -> StepLimits:
        """The limits of a program that has no cache, for steps made by `rows_batch`."""
        return cls(n_rows, n_rows, n_rows, 1)

    @property
    def counts(self) -> StepCounts:
        """The largest T, S and N."""
        return StepCounts.of(self.max_tokens, self.max_sequences, self.max_logit_rows)


@dataclass(eq=False)
class StepInputs(StepArrays[IntArray]):
    """The arrays that a program reads its steps from, at their largest sizes.

    Fill the beginning of each, and give the program a `batch` of that many: nothing is copied then.
    """

    _batch: ForwardBatch | None = field(default=None, init=False)

    @classmethod
    def zeros(cls, limits: StepLimits, n_pools: int = 1) -> StepInputs:
        """Arrays for steps within `limits`, of a cache with this number of pools, with their defaults."""
        arrays = [row.filled(limits.counts, limits.max_pages) for row in arrays_of(n_pools)]
        return cls(*arguments(arrays))

    def batch(
        self,
        n_tokens: int,
        n_sequences: int,
        n_logit_rows: int,
        *,
        rope_positions: IntArray | None = None,
        activations: FloatArray | None = None,
    ) -> ForwardBatch:
        """The arrays' contents as a step: views of them, valid until they are filled again.

        Steps of one size that bring no arrays of their own share one batch.
        """
        is_shared = rope_positions is None and activations is None
        last, sizes = self._batch, (n_tokens, n_sequences, n_logit_rows)
        if (
            is_shared
            and last is not None
            and (len(last.token_ids), len(last.context_len), len(last.logit_rows)) == sizes
        ):
            return last
        batch = ForwardBatch(
            *self.beginnings(StepCounts.of(*sizes)),
            rope_positions=rope_positions,
            activations=activations,
            inputs=self,
        )
        if is_shared:
            self._batch = batch
        return batch

    def copy(self, batch: ForwardBatch) -> None:
        """Copies a batch of other arrays in, but for its mask and RoPE positions."""
        if not batch.other_pools:
            batch = replace(batch, other_pools=(batch.pages(0),) * len(self.other_pools))
        for own, array in zip(self.flat(), batch.flat(), strict=True):
            own[tuple(map(slice, array.shape))] = array


def plain_batch(
    lengths: Sequence[int] | IntArray,
    page_tokens: int,
    page_tables: Sequence[IntArray] = (),
    *,
    starts: Sequence[int] | IntArray = (),
    token_ids: IntArray | None = None,
    logit_rows: IntArray | None = None,
) -> ForwardBatch:
    """The batch of sequences of new tokens, `lengths` of them, the first at `starts` (0) in its sequence.

    `page_tables` has one [S, max_pages] for each pool of the cache; without any, each sequence has pages of
    its own, one after another. Without `token_ids` all are 0, without `logit_rows` all rows are wanted.
    """
    sizes = np.asarray(lengths, np.int32)
    ends = sizes + np.asarray(starts, np.int32) if len(starts) else sizes
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    every = np.arange(bounds[-1], dtype=np.int32)
    positions = every + np.repeat(ends - bounds[1:], sizes)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    pools = [
        PoolPages((table[rows, positions // page_tokens] * page_tokens + positions % page_tokens), table)
        for table in page_tables or [_own_pages(-(-ends // page_tokens))]
    ]
    return ForwardBatch(
        np.zeros_like(every) if token_ids is None else token_ids,
        positions,
        pools[0].slots,
        bounds,
        ends,
        pools[0].page_table,
        every if logit_rows is None else logit_rows,
        other_pools=tuple(pools[1:]),
    )


def rows_batch(activations: FloatArray) -> ForwardBatch:
    """The batch of a program that reads rows [N, width] and has no cache: each row is a sequence."""
    counted, zeros = np.arange(len(activations) + 1, dtype=np.int32), np.zeros(len(activations), np.int32)
    return ForwardBatch(
        *(zeros, zeros, zeros, counted, zeros + 1, zeros[:, None], counted[:-1]), activations=activations
    )


def _own_pages(n_pages: IntArray) -> IntArray:
    """A page table of sequences with these numbers of pages, one after another; the last is repeated."""
    first = np.cumsum(n_pages, dtype=np.int32) - n_pages
    return first[:, None] + np.minimum(np.arange(n_pages.max(), dtype=np.int32), n_pages[:, None] - 1)
