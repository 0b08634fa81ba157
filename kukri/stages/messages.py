"""The messages of a pipeline: a kind, a number of bytes, and that many bytes. Nothing in them is code.

Numbers are little-endian. Every size is checked against the step limits that the stage was opened with,
before anything is read by it; a program then checks each index (see `StepInputs`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from operator import gt
from typing import Any

import numpy as np

from kukri.errors import StageError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.step_arrays import StepCounts, arrays_of

_STEP = struct.Struct("<5I")  # tokens, sequences, rows of logits, pages of the longest context, pools
_ROWS = struct.Struct("<2If")  # rows, width, seconds that stages computed
_MAX_TEXT = 1 << 20  # bytes of a message in JSON


class Kind(IntEnum):
    """The kinds of messages, and who sends them."""

    FACTS = 1  # a stage, when it is connected: JSON
    OPEN = 2  # to a stage: the model and its layers, JSON
    READY = 3  # a stage that has loaded them: JSON
    ERROR = 4  # a stage that cannot continue: why, as text
    STEP = 5  # to all stages: a batch
    ACTIVATIONS = 6  # from stage to stage: float32 [T, D], and the seconds that all stages so far computed
    COPY_PAGE = 7  # to all stages: int32 source, target, pool
    COPY_STATE = 8  # int32 source, target
    LOST = 9  # a stage that cannot continue because it lost another: text


def text_bounds() -> dict[Kind, int]:
    """The most bytes of the messages before a stage is open."""
    return dict.fromkeys((Kind.FACTS, Kind.OPEN, Kind.READY, Kind.ERROR, Kind.LOST), _MAX_TEXT)


def step_bounds(limits: StepLimits, width: int, n_pools: int) -> dict[Kind, int]:
    """The most bytes of each message, for steps within `limits` of a model of this width."""
    return {
        Kind.ERROR: _MAX_TEXT,
        Kind.LOST: _MAX_TEXT,
        Kind.STEP: _STEP.size + _n_bytes(limits.counts, limits.max_pages, n_pools),
        Kind.ACTIVATIONS: _ROWS.size + 4 * limits.max_tokens * width,
        Kind.COPY_PAGE: 12,
        Kind.COPY_STATE: 8,
    }


def to_text(facts: Mapping[str, Any]) -> bytes:
    """A JSON object as bytes."""
    return json.dumps(facts).encode()


def from_text(body: memoryview) -> dict[str, Any]:
    """The JSON object of a message. Raises StageError if it is not one."""
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StageError("a stage sent no JSON object")
    return found


def step_to_bytes(batch: ForwardBatch, page_tokens: int) -> bytes:
    """A step's arrays, with the pages that its contexts use. A step has no mask."""
    n_pages = -(-int(batch.context_len.max()) // page_tokens)
    n_pools = 1 + len(batch.other_pools)
    arrays = [
        array[:, :n_pages].reshape(-1) if row.is_table else array
        for row, array in zip(arrays_of(n_pools), batch.flat())
    ]
    sizes = batch.n_tokens, batch.n_sequences, batch.n_logit_rows, n_pages, n_pools
    return _STEP.pack(*sizes) + np.concatenate(arrays, dtype="<i4").tobytes()


def step_from_bytes(
    body: bytes | memoryview, limits: StepLimits, inputs: StepInputs, activations: FloatArray | None
) -> ForwardBatch:
    """The batch of `step_to_bytes` in a program's `inputs`, with its activations: valid until the next.

    Raises StageError on one that breaks `limits`, which are the program's.
    """
    if len(body) < _STEP.size:
        raise StageError("a step's message is too short")
    *sizes, n_pools = t, s, n, n_pages, _ = _STEP.unpack_from(body)
    largest = (limits.max_tokens, limits.max_sequences, limits.max_logit_rows, limits.max_pages)
    counts = StepCounts.of(t, s, n)
    if (
        any(map(gt, sizes, largest))
        or n_pools != len(inputs.pools)
        or len(body) != _STEP.size + _n_bytes(counts, n_pages, n_pools)
    ):
        raise StageError(
            f"a step of {t} tokens, {s} sequences, {n} rows, {n_pages} pages of {n_pools} pools in "
            f"{len(body)} bytes"
        )
    batch = inputs.batch(t, s, n, activations=activations)
    numbers = np.frombuffer(body, "<i4", offset=_STEP.size)
    start = 0
    for row, own in zip(arrays_of(n_pools), batch.flat(), strict=True):
        own = own[:, :n_pages] if row.is_table else own
        own[...] = numbers[start : start + own.size].reshape(own.shape)
        start += own.size
    return batch


def _n_bytes(counts: StepCounts, n_pages: int, n_pools: int) -> int:
    """Bytes of the arrays of a step."""
    rows = arrays_of(n_pools)
    return 4 * sum(counts[row.count] * (n_pages if row.is_table else 1) for row in rows)


def rows_to_bytes(rows: FloatArray, computed_s: float = 0.0) -> tuple[bytes, memoryview]:
    """Activations [T, D]: their sizes and the time that they took, and their bytes, which are not copied."""
    found = np.ascontiguousarray(rows, "<f4")
    return _ROWS.pack(*found.shape, computed_s), found.data.cast("B")


def rows_from_bytes(body: memoryview) -> tuple[FloatArray, float]:
    """The activations of `rows_to_bytes` and their time. Raises StageError if the sizes do not agree."""
    if len(body) < _ROWS.size:
        raise StageError("a message of activations is too short")
    n_rows, width, computed_s = _ROWS.unpack_from(body)
    if len(body) != _ROWS.size + 4 * n_rows * width:
        raise StageError(f"activations [{n_rows}, {width}] in {len(body)} bytes")
    rows = np.frombuffer(body, "<f4", offset=_ROWS.size).astype(np.float32, copy=False)
    return rows.reshape(n_rows, width), computed_s


def numbers_to_bytes(*numbers: int) -> bytes:
    """Numbers of a change to the cache."""
    return np.array(numbers, "<i4").tobytes()


def numbers_from_bytes(body: memoryview) -> IntArray:
    """The numbers of a change to the cache. Raises StageError on a part of one."""
    if len(body) % 4:
        raise StageError(f"numbers in {len(body)} bytes")
    return np.frombuffer(body, "<i4").astype(np.int32, copy=False)
