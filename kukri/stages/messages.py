"""The messages of a pipeline: a kind, a number of bytes, and that many bytes. Nothing in them is code.

Numbers are little-endian. Every size is checked against the step limits that the stage was opened with,
before anything is read by it; a program then checks each index (see `StepInputs`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from operator import gt
from typing import Any

import numpy as np

from kukri.errors import StageError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits

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
    t, s, n = limits.max_tokens, limits.max_sequences, limits.max_logit_rows
    return {
        Kind.ERROR: _MAX_TEXT,
        Kind.LOST: _MAX_TEXT,
        Kind.STEP: _STEP.size + 4 * (4 * t + (s + 1) + 2 * s + n_pools * (t + s * limits.max_pages) + n),
        Kind.ACTIVATIONS: _ROWS.size + 4 * t * width,
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
    """A step's batch, with the pages that its contexts use. A step has no mask, and no adapters."""
    n_pages = -(-int(batch.context_len.max()) // page_tokens)
    t, s = batch.n_tokens, batch.n_sequences
    types, saves, states = batch.token_types, batch.state_saves, batch.state_slots
    pools = [batch.pages(pool) for pool in range(1 + len(batch.other_pools))]
    arrays = (
        *(batch.token_ids, batch.positions),
        np.zeros(t, np.int32) if types is None else types,
        np.full(t, -1, np.int32) if saves is None else saves,
        *(batch.query_start, batch.context_len),
        np.arange(s, dtype=np.int32) if states is None else states,
        *(pages.slots for pages in pools),
        *(pages.page_table[:, :n_pages].reshape(-1) for pages in pools),
        batch.logit_rows,
    )
    return (
        _STEP.pack(t, s, batch.n_logit_rows, n_pages, len(pools))
        + np.concatenate(arrays, dtype="<i4").tobytes()
    )


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
    n_numbers = 4 * t + s + 1 + 2 * s + n_pools * (t + s * n_pages) + n
    if (
        any(map(gt, sizes, largest))
        or n_pools != len(inputs.pages)
        or len(body) != _STEP.size + 4 * n_numbers
    ):
        raise StageError(
            f"a step of {t} tokens, {s} sequences, {n} rows, {n_pages} pages of {n_pools} pools in "
            f"{len(body)} bytes"
        )
    numbers = np.frombuffer(body, "<i4", offset=_STEP.size)
    start = 0
    for array, size in (
        *((inputs.token_ids, t), (inputs.positions, t)),
        *((inputs.token_types, t), (inputs.state_saves, t)),
        *((inputs.query_start, s + 1), (inputs.context_len, s), (inputs.state_slots, s)),
        *((slots, t) for slots, _ in inputs.pages),
    ):
        array[:size] = numbers[start : start + size]
        start += size
    for _, page_table in inputs.pages:
        page_table[:s, :n_pages] = numbers[start : start + s * n_pages].reshape(s, n_pages)
        start += s * n_pages
    inputs.logit_rows[:n] = numbers[start:]
    inputs.adapters[:s] = -1
    return replace(inputs.batch(t, s, n), activations=activations)


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
