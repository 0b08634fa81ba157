"""The arrays of a step: what a batch leaves out, batches of plain rows, and programs without a cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import ShapeError
from kukri.kernels import make_backend
from kukri.kernels.cpu.plan.batch_memory import BatchMemory
from kukri.kernels.cpu.run import abi
from kukri.kernels.cpu.run.memory import address_of
from kukri.kernels.step import StepInputs, StepLimits, plain_batch, rows_batch
from kukri.kernels.step_arrays import STEP_ARRAYS

LIMITS = StepLimits(max_tokens=9, max_sequences=4, max_logit_rows=5, max_pages=3)


def test_arrays_that_a_batch_leaves_out_hold_their_defaults() -> None:
    """Catches an adapter for everybody, a shared state, and defaults that inputs have and batches lack."""
    batch, inputs = plain_batch([2, 1], 16), StepInputs.zeros(LIMITS)
    assert batch.adapters.tolist() == [-1, -1]
    assert batch.state_slots.tolist() == [0, 1]
    assert batch.state_saves.tolist() == [-1] * 3
    assert batch.token_types.tolist() == [0] * 3
    inputs.copy(batch)
    for row, own, array in zip(STEP_ARRAYS, inputs.flat(), batch.flat(), strict=False):
        assert own.dtype == array.dtype == np.int32, row.name
        np.testing.assert_array_equal(own[tuple(map(slice, array.shape))], array, row.name)


def test_a_batch_of_one_pool_is_copied_to_all() -> None:
    """Catches pools of the inputs that keep the pages of the step before."""
    inputs = StepInputs.zeros(LIMITS, 3)
    batch = plain_batch([3, 2], 2, [np.array([[5, 6], [7, 0]], np.int32)])
    inputs.copy(batch)
    assert len(inputs.pools) == 3
    for slots, page_table in inputs.pools:
        assert slots[:5].tolist() == [10, 11, 12, 14, 15]
        assert page_table[:2, :2].tolist() == [[5, 6], [7, 0]]


def test_a_batch_that_brings_activations_is_not_kept() -> None:
    """Catches activations of one step that the next step of the same size still has."""
    inputs = StepInputs.zeros(LIMITS)
    plain = inputs.batch(2, 1, 1)
    more = inputs.batch(2, 1, 1, activations=np.ones((2, 8), np.float32))
    assert more.activations is not None
    assert inputs.batch(2, 1, 1) is plain
    assert plain.activations is None
    assert plain.inputs is more.inputs is inputs


def test_kernels_find_every_array_where_it_lies() -> None:
    """Catches an address that belongs to another array, in the header of the second pool too."""
    memory = BatchMemory(LIMITS, 2)
    memory.view(1)
    for header, pool in zip(memory._headers, memory.inputs.pools, strict=True):
        for row in STEP_ARRAYS:
            array = getattr(pool if row.name in pool._fields else memory.inputs, row.name)
            assert header[abi.ARRAY[row.name] // 8] == address_of(array), row.name
    assert len({*abi.ARRAY.values()}) == len(STEP_ARRAYS)


def test_plain_rows_lie_where_their_positions_say() -> None:
    """Catches starts that are added twice, rows of another sequence's page, and pages that two share."""
    table = np.array([[4, 9, 0], [1, 2, 3]], np.int32)
    batch = plain_batch([3, 2], 4, [table, table + 10], starts=[3, 9], token_ids=np.arange(5, dtype=np.int32))
    assert batch.positions.tolist() == [3, 4, 5, 9, 10]
    assert batch.slots.tolist() == [19, 36, 37, 13, 14]
    assert batch.pages(1).slots.tolist() == [59, 76, 77, 53, 54]
    assert batch.query_start.tolist() == [0, 3, 5]
    assert batch.context_len.tolist() == [6, 11]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    own = plain_batch([5, 1, 8], 4)
    assert own.slots.tolist() == [0, 1, 2, 3, 4, 8, *range(12, 20)]
    assert own.page_table.tolist() == [[0, 1], [2, 2], [3, 4]]


@pytest.mark.parametrize("name", ["reference", "cpu", "torch"])
def test_a_program_without_a_cache_runs(name: str) -> None:
    """Catches a backend that needs pages to add two rows, and activations of another number of rows."""
    if name == "torch":
        pytest.importorskip("torch")
    program = make_backend(name, n_threads=1).compile(
        lambda ops, batch: ops.scale(ops.activations(batch, 32), 0.5), None, StepLimits.of_rows(5)
    )
    for n in (5, 1, 3):
        x = np.random.default_rng(n).normal(size=(n, 32)).astype(np.float32)
        np.testing.assert_array_equal(program(rows_batch(x)).numpy(), x / 2)
    with pytest.raises(ShapeError, match="activations"):
        program(replace(rows_batch(x), activations=x[:2]))
