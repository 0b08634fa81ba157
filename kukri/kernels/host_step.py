"""Logits in a NumPy array, and the checks of a step, for backends on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import CapacityError, HookError, ShapeError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Logits
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import AdapterSlots


class HostLogits(Logits):
    """`Logits` of a float32 array [N, V]."""

    def __init__(self, array: FloatArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def take(self, rows: Sequence[int]) -> HostLogits:
        """Rows that follow one another are not copied."""
        wanted = list(rows)
        first = wanted[0] if wanted else 0
        if wanted == list(range(first, first + len(wanted))):
            if len(wanted) == len(self._array):
                return self
            return HostLogits(self._array[first : first + len(wanted)])
        return HostLogits(self._array[wanted])

    def copy(self) -> HostLogits:
        return HostLogits(self._array.copy())

    def numpy(self) -> FloatArray:
        return self._array

    def has_nan(self, row: int) -> bool:
        return bool(np.isnan(self._array[row].max()))

    def logit(self, row: int, token_id: int) -> float:
        return float(self._array[row, token_id])

    def argmax(self) -> list[int]:
        ids: list[int] = self._array.argmax(axis=1).tolist()
        return ids


@dataclass(frozen=True)
class StateStep:
    """A sequence's tokens of a step, `start` to `stop` - 1, and the slot of its state.

    `begins`: the state counts as zeros. `saves`: (token, slot) of copies to keep, in order.
    """

    start: int
    stop: int
    slot: int
    begins: bool
    saves: tuple[tuple[int, int], ...]


def state_steps(batch: ForwardBatch) -> Iterator[StateStep]:
    """The sequences of a step, for recurrent layers that run op by op."""
    starts = batch.query_start.tolist()
    for s, n_context in enumerate(batch.context_len.tolist()):
        start, stop = starts[s], starts[s + 1]
        kept = enumerate(batch.state_saves[start:stop].tolist(), start)
        saves = tuple((t, target) for t, target in kept if target >= 0)
        yield StateStep(start, stop, int(batch.state_slots[s]), n_context == stop - start, saves)


class StoppedError(Exception):
    """Ends a step after its last tap, on backends that run op by op."""


def check_sizes(batch: ForwardBatch, limits: StepLimits) -> None:
    """Raises CapacityError on a step that is empty or larger than `limits`, ShapeError on a mask that the
    program was not compiled for.
    """
    t, s, n = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
    n_pages = batch.page_table.shape[1]
    if not (
        0 < t <= limits.max_tokens and 0 < s <= limits.max_sequences
        and n <= limits.max_logit_rows and n_pages <= limits.max_pages
    ):  # fmt: skip
        raise CapacityError(
            f"a step of {t} tokens, {s} sequences, {n} logit rows and {n_pages} pages; {limits}"
        )
    if batch.mask is not None or limits.mask_heads:
        _check_mask(batch, limits)


def batch_activations(batch: ForwardBatch, width: int) -> FloatArray:
    """The activations of a batch. Raises ShapeError unless they are [T, width]."""
    found = batch.activations
    if found is None or found.shape != (batch.n_tokens, width):
        shape = None if found is None else found.shape
        raise ShapeError(f"bad step: activations {shape} for {batch.n_tokens} tokens of width {width}")
    return found


def check_adapters(batch: ForwardBatch, adapters: AdapterSlots) -> None:
    """Raises ShapeError if a step names an adapter that its program does not have."""
    for slot in set(batch.adapters.tolist()) if adapters else ():
        if slot != -1 and not (0 <= slot < len(adapters) and adapters[slot] is not None):
            raise ShapeError(f"bad step: no adapter in slot {slot}")


def row_adapters(batch: ForwardBatch) -> IntArray | None:
    """The slot of the adapter of each token of a step, int32 [T]; None without adapters."""
    if batch.adapters.max() < 0:
        return None
    return np.repeat(batch.adapters, np.diff(batch.query_start))


def _check_mask(batch: ForwardBatch, limits: StepLimits) -> None:
    shape = None if batch.mask is None else batch.mask.shape
    wanted = (limits.mask_heads, batch.n_tokens, int(batch.context_len[0])) if limits.mask_heads else None
    if shape != wanted or batch.n_sequences > 1:
        raise ShapeError(
            f"a step of {batch.n_sequences} sequences with a mask {shape}; the plan takes {wanted}"
        )


def check_routes(weights: FloatArray, n_used: int) -> None:
    """Raises HookError if a listener gave a row of weights [T, E] more experts than `n_used`."""
    most = int((weights != 0).sum(axis=1).max(initial=0))
    if most > n_used:
        raise HookError(f"a hook must leave {n_used} experts of a token with a weight, not {most}")
