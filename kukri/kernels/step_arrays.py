"""The arrays of a step: each is a field that says by what the array is counted and what it holds by default.

The batch and a program's inputs (`step.py`) inherit the fields. From a field follow the address where kernels
of the CPU find the array (`cpu/run/abi.py`), its copy on a device (`pytorch/step.py`) and its place in a
message between stages (`stages/messages.py`). All arrays are int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from kukri.dataclass import dataclass, field, fields
from kukri.kernels.arrays import IntArray

A = TypeVar("A")  # an array, or a tensor on a device

_LEFT_OUT: Any = None  # an array that a caller may leave out: `ForwardBatch` makes it


class StepCounts(NamedTuple):
    """The numbers of a step by which its arrays are counted."""

    tokens: int  # T
    sequences: int  # S
    bounds: int  # S + 1, of the places where sequences begin and end
    logit_rows: int  # N

    @classmethod
    def of(cls, n_tokens: int, n_sequences: int, n_logit_rows: int) -> StepCounts:
        """Return the counts of a step of T tokens, S sequences and N rows of logits."""
        return cls(n_tokens, n_sequences, n_sequences + 1, n_logit_rows)


@dataclass(frozen=True)
class StepArray:
    """The name of an array of a step, and what its field says."""

    name: str
    count: int  # the place in `StepCounts` of the number by which it is counted
    default: int | Literal["index"]  # the value of every entry; "index": each entry holds its own place
    is_table: bool  # each entry is a row of pages

    def filled(self, counts: StepCounts, n_pages: int) -> IntArray:
        """Return the array for a step of these counts with the default in all entries."""
        n = counts[self.count]
        if self.default == "index":
            return np.arange(n, dtype=np.int32)
        return np.full((n, n_pages) if self.is_table else n, self.default, np.int32)


class PoolPages(NamedTuple, Generic[A]):
    """The arrays of a step that say where its tokens lie in one pool of pages."""

    slots: A  # [T]
    page_table: A  # [S, max_pages]


def _by(count: str, default: int | Literal["index"] = 0, *, is_table: bool = False) -> Mapping[str, Any]:
    """Return the metadata of an array's field."""
    return {"count": StepCounts._fields.index(count), "default": default, "is_table": is_table}


@dataclass(eq=False)
class StepArrays(Generic[A]):
    """The arrays of a step. `slots` and `page_table` are of the cache's first pool (`cache.pool_windows`);
    `other_pools` has the slots and page tables of its other pools.
    """

    token_ids: A = field(metadata=_by("tokens"))
    positions: A = field(metadata=_by("tokens"))  # a token's place in its sequence
    slots: A = field(metadata=_by("tokens"))  # page * B + offset, where a token's key and value go
    query_start: A = field(metadata=_by("bounds"))  # the first token of each sequence, then T
    context_len: A = field(metadata=_by("sequences"))  # the tokens that can be seen, new ones included
    page_table: A = field(metadata=_by("sequences", is_table=True))  # the pages in order, then 0
    logit_rows: A = field(metadata=_by("logit_rows"))  # the tokens whose logits are wanted
    # 1 for a token of the second of a pair of texts
    token_types: A = field(default=_LEFT_OUT, metadata=_by("tokens"))
    adapters: A = field(default=_LEFT_OUT, metadata=_by("sequences", -1))  # an adapter's slot, -1 for none
    state_slots: A = field(default=_LEFT_OUT, metadata=_by("sequences", "index"))  # a state's slot
    # the slot to which the state is copied after a token, -1 for no copy
    state_saves: A = field(default=_LEFT_OUT, metadata=_by("tokens", -1))
    other_pools: tuple[PoolPages[A], ...] = ()

    def flat(self) -> list[A]:
        """Return all arrays in the order of `arrays_of`."""
        return [*_own(self), *chain.from_iterable(self.other_pools)]

    def beginnings(self, counts: StepCounts) -> tuple[Any, ...]:
        """Return the beginnings of the arrays for a step of these counts, as `arguments`."""
        arrays: list[Any] = self.flat()
        rows = arrays_of(1 + len(self.other_pools))
        return arguments([array[: counts[row.count]] for row, array in zip(rows, arrays)])

    @property
    def pools(self) -> list[PoolPages[A]]:
        """Slots and page table of each pool."""
        return [PoolPages(self.slots, self.page_table), *self.other_pools]

    def pages(self, pool: int) -> PoolPages[A]:
        """Slots and page table of a pool; without `other_pools` the first pool's stand for all."""
        if pool and self.other_pools:
            return self.other_pools[pool - 1]
        return PoolPages(self.slots, self.page_table)


STEP_ARRAYS = tuple(StepArray(each.name, **each.metadata) for each in fields(StepArrays) if each.metadata)
OPTIONAL_ARRAYS = tuple(row for row in STEP_ARRAYS if row.name in vars(StepArrays))  # a batch may lack them
_own = attrgetter(*(row.name for row in STEP_ARRAYS))


def arguments(arrays: Sequence[A]) -> tuple[Any, ...]:
    """Return arrays in the order of `StepArrays.flat` as the arguments that make a StepArrays."""
    n = len(STEP_ARRAYS)
    return (*arrays[:n], tuple(map(PoolPages, arrays[n::2], arrays[n + 1 :: 2])))


@cache
def arrays_of(n_pools: int) -> tuple[StepArray, ...]:
    """Return the rows of a step whose cache has this number of pools; further pools' arrays come last."""
    of_pool = [row for name in PoolPages._fields for row in STEP_ARRAYS if row.name == name]
    return (*STEP_ARRAYS, *of_pool * (n_pools - 1))
