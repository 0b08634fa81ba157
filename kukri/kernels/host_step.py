"""A step's logits where they are a NumPy array, and checks that backends on the host share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kukri.errors import CapacityError, ShapeError
from kukri.kernels.types import FloatArray, ForwardBatch, StepLimits


class HostLogits:
    """`Logits` of a float32 array [N, V]."""

    def __init__(self, array: FloatArray) -> None:
        self._array = array

    def __len__(self) -> int:
        """N."""
        return len(self._array)

    def take(self, rows: Sequence[int]) -> HostLogits:
        """See Logits.take. Rows that follow one another are not copied."""
        first, n = rows[0] if rows else 0, len(rows)
        if all(row == first + i for i, row in enumerate(rows)):
            return HostLogits(self._array[first : first + n])
        return HostLogits(self._array[list(rows)])

    def copy(self) -> HostLogits:
        """See Logits.copy."""
        return HostLogits(self._array.copy())

    def numpy(self) -> FloatArray:
        """See Logits.numpy."""
        return self._array

    def has_nan(self, row: int) -> bool:
        """See Logits.has_nan."""
        return bool(np.isnan(self._array[row].max()))

    def argmax(self) -> list[int]:
        """See Logits.argmax."""
        ids: list[int] = self._array.argmax(axis=1).tolist()
        return ids


def check_sizes(batch: ForwardBatch, limits: StepLimits) -> None:
    """Raises CapacityError on a step that is empty or larger than `limits`, ShapeError on a mask that the
    program was not compiled for.
    """
    sizes = (batch.n_tokens, batch.n_sequences, batch.n_logit_rows, batch.page_table.shape[1])
    most = (limits.max_tokens, limits.max_sequences, limits.max_logit_rows, limits.max_pages)
    if not sizes[0] or not sizes[1] or any(size > limit for size, limit in zip(sizes, most, strict=True)):
        raise CapacityError(f"a step of (T, S, N, pages) = {sizes}; it may have 1 to {most}")
    if batch.mask is not None or limits.mask_heads:
        _check_mask(batch, limits)


def _check_mask(batch: ForwardBatch, limits: StepLimits) -> None:
    shape = None if batch.mask is None else batch.mask.shape
    wanted = (limits.mask_heads, batch.n_tokens, int(batch.context_len[0])) if limits.mask_heads else None
    if shape != wanted or batch.n_sequences > 1:
        raise ShapeError(
            f"a step of {batch.n_sequences} sequences with a mask {shape}; the plan takes {wanted}"
        )
