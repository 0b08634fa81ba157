"""A step's batch as kernels read it: headers of numbers and addresses, and arrays at fixed addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.cpu.plan.ops import Cut
from kukri.kernels.cpu.run import abi
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.host_step import check_sizes
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.step_arrays import STEP_ARRAYS


class BatchMemory:
    """A step's batch as kernels read it: headers of numbers and addresses, and arrays at fixed addresses.

    Layers of one `Cut` whose pages are in one pool have a header of their own, with the slots and the page
    table of the pool, and work entries. Other kernels read the first header, which has none.
    """

    def __init__(self, limits: StepLimits, n_pools: int) -> None:
        n_tokens = limits.max_tokens
        self._limits = limits
        self._last: ForwardBatch | None = None  # whose sizes the headers have, and that brought no more
        self.inputs = inputs = StepInputs.zeros(limits, n_pools)
        self._arrays: dict[int, np.ndarray[Any, Any]] = {
            **{abi.ARRAY[row.name]: getattr(inputs, row.name) for row in STEP_ARRAYS},
            abi.ROPE_POSITIONS: np.zeros(n_tokens, np.int32),
            abi.MASK: np.zeros((limits.mask_heads, n_tokens, limits.max_pages * PAGE_TOKENS), np.float32),
        }
        self._rotated_by = {
            name: address_of(self._arrays[name]) for name in (abi.POSITIONS, abi.ROPE_POSITIONS)
        }
        self._headers: list[memoryview] = []  # NumPy takes longer for one number
        self._views: dict[tuple[int, Cut | None], int] = {}
        self._keep: list[np.ndarray[Any, Any]] = []
        self.address = self.view(0)

    def view(self, pool: int, cut: Cut | None = None) -> int:
        """The address of the header of a pool, and of layers of a cut."""
        address = self._views.get((pool, cut))
        if address is None:
            address = self._views[pool, cut] = self._add_header(pool, cut is not None)
        return address

    def _add_header(self, pool: int, has_work: bool) -> int:
        header = aligned_zeros(abi.BATCH_BYTES).view(np.int64)
        of_pool = self.inputs.pages(pool)._asdict()
        arrays = {**self._arrays, **{abi.ARRAY[name]: array for name, array in of_pool.items()}}
        if has_work:
            n_tokens = self._limits.max_tokens
            n_entries = n_tokens + max_partials(self._limits)
            arrays[abi.WORK] = np.zeros(n_entries * abi.WORK_BYTES, np.uint8)
            arrays[abi.TOKEN_PARTS] = np.zeros((n_tokens, abi.PARTS_BYTES // 8), np.int64)
        for offset, array in arrays.items():
            header[offset // 8] = address_of(array)
        header[abi.MAX_PAGES // 8] = self._limits.max_pages
        self._keep += [header, *arrays.values()]
        self._headers.append(header.data)
        return address_of(header)

    @property
    def n_positions(self) -> int:
        """Positions that the batch, once checked, rotates by: 0 to one less."""
        found: int = self._headers[0][abi.N_POSITIONS // 8]
        return found

    def fill(self, batch: ForwardBatch, limits: StepLimits) -> None:
        """Sets the batch of the next step. Raises as `check_sizes` does."""
        if batch is self._last:
            return
        check_sizes(batch, limits)
        self._last = None
        if batch.inputs is self.inputs:
            self._last = batch if batch.rope_positions is None and batch.mask is None else None
        else:
            self.inputs.copy(batch)
        rotated_by = abi.POSITIONS
        if batch.rope_positions is not None:
            rotated_by = abi.ROPE_POSITIONS
            own = batch.rope_positions
            self._arrays[rotated_by][: batch.n_tokens] = own if own.ndim == 1 else own.max(axis=0)
        for header in self._headers:
            header[0], header[1], header[2] = batch.n_tokens, batch.n_sequences, batch.n_logit_rows
            header[abi.ROPE_POSITIONS // 8] = self._rotated_by[rotated_by]
        if batch.mask is not None:
            self._fill_mask(batch.mask)

    def rotate_by_rows(self, first: int, n_tokens: int) -> None:
        """Makes the step, once checked, rotate its tokens by the rows of cos and sin from `first` on."""
        self._arrays[abi.ROPE_POSITIONS][:n_tokens] = np.arange(first, first + n_tokens)

    def _fill_mask(self, mask: FloatArray) -> None:
        """Copies a mask in, each row padded to whole pages with -inf."""
        n_heads, n_tokens, n_context = mask.shape
        width = -(-n_context // PAGE_TOKENS) * PAGE_TOKENS
        rows = self._arrays[abi.MASK].reshape(-1)[: n_heads * n_tokens * width].reshape(-1, width)
        rows[:, :n_context] = mask.reshape(-1, n_context)
        rows[:, n_context:] = -np.inf
        for header in self._headers:
            header[abi.MASK_STRIDE // 8] = 4 * width
            header[abi.MASK_HEAD_STRIDE // 8] = 4 * width * n_tokens if n_heads > 1 else 0


def max_partials(limits: StepLimits) -> int:
    """The most partial attention results that a step can have: every chunk of every sequence."""
    return limits.max_sequences * -(-limits.max_pages * PAGE_TOKENS // abi.CHUNK_TOKENS)
