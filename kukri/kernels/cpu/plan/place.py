"""Gives recorded ops their memory, and makes the plan that the executor runs.

Buffers that are never in use together share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.pack.layouts import ROWS
from kukri.kernels.cpu.plan.batch_memory import BatchMemory
from kukri.kernels.cpu.plan.ops import Addresses, Attend, Buffer, Op, RopeStore, Tap, Value, cut_of
from kukri.kernels.cpu.run.abi import OP_BYTES
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.specs import AttentionSpec

_LINE = 64  # bytes that a buffer's address and size are multiples of
_OPS_AHEAD = 6  # how far a waiting thread looks for weights to prefetch


@dataclass(frozen=True, eq=False)
class Segment:
    """Ops up to a tap, the tapped value, and the residual added to it."""

    stop: int  # one past the last op
    name: str
    value: Value
    residual: Value | None
    n_used: int | None  # see ops.Tap


class Plan(Addresses):
    """Ops placed in memory: int64 [n, OP_BYTES / 8] for the executor, and the taps between them.

    Attributes: ops; kernel_names, of each op; segments; ropes, whose rows must be there before a step;
    memory, of all buffers.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        result: Value,
        batch: BatchMemory,
        cache: PagedKV,
        kernels: KernelLibrary,
        n_threads: int,
    ) -> None:
        """Loads the kernels that are not loaded yet."""
        self._batch, self.batch, self.cache, self.n_threads = batch, batch.address, cache, n_threads
        self.memory, self._addresses = place(ops, result)
        self._ops = ops
        self._keep: list[Any] = []  # what records point into
        self.segments: list[Segment] = []
        self.ropes = list({op.rope: None for op in ops if isinstance(op, RopeStore) and op.rope is not None})
        calls: list[Op] = []
        for op in ops:
            if isinstance(op, Tap):
                self.segments.append(Segment(len(calls), op.name, op.x, op.residual, op.n_used))
            else:
                calls.append(op)
        self.kernel_names: list[str] = [op.kernel for op in calls]
        kernels.load([*dict.fromkeys(self.kernel_names), "run_plan", "check_batch"])
        records = [self._record(op, kernels[op.kernel].parameters) for op in calls]
        self._records = np.array([number for record in records for number in record], np.int64)
        self.ops = np.zeros((len(calls), OP_BYTES // 8), np.int64)
        start = address_of(self._records)
        streams = [op.streams(self) for op in calls]
        for i, op in enumerate(calls):
            soon = (stream for stream in streams[i + 1 : i + 1 + _OPS_AHEAD] if stream[0])
            weights = next(soon, (0, 0))
            self.ops[i] = kernels[op.kernel].address, start, 0, *weights
            start += 8 * len(records[i])

    def batch_of(self, spec: AttentionSpec) -> int:
        return self._batch.view(self.cache.pool_of[spec.kv_layer], cut_of(spec))

    def of(self, used: Value | Buffer) -> int:
        if isinstance(used, Value):
            return self._addresses[used.buffer] + used.offset
        return self._addresses[used]

    def of_array(self, array: np.ndarray[Any, Any]) -> int:
        array = np.ascontiguousarray(array)
        self._keep.append(array)
        return address_of(array)

    def is_cut(self, segment: Segment) -> bool:
        """Return True if the ops after a segment read no earlier value than the segment's own."""
        if segment.residual is not None:
            return False
        at = next(i for i, op in enumerate(self._ops) if isinstance(op, Tap) and op.name == segment.name)
        alive = {buffer for buffer, (first, last) in lifetimes(self._ops).items() if first < at < last}
        reads_others = any(isinstance(op, Attend) and op.spec.reads is not None for op in self._ops[at:])
        return alive <= {segment.value.buffer} and not reads_others

    def view(self, value: Value, n_rows: int) -> FloatArray:
        """The first rows of a value, [n_rows, width]."""
        start = self._addresses[value.buffer] - address_of(self.memory)
        rows = self.memory[start : start + n_rows * value.stride].view(np.float32)
        column = value.offset // 4
        return rows.reshape(n_rows, value.stride // 4)[:, column : column + value.width]

    def _record(self, op: Op, parameters: Sequence[str]) -> list[int]:
        own = op.record(self)
        return [own[name] if name in own else op.argument(name, self) for name in parameters]


def place(ops: Sequence[Op], result: Value) -> tuple[ByteArray, dict[Buffer, int]]:
    """Memory for all buffers, and the address of each. `result` is read after the last op."""
    spans = lifetimes(ops)
    spans[result.buffer] = (spans[result.buffer][0], len(ops))
    starts: dict[Buffer, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # start, end, first op, last op
    end = 0
    for buffer in sorted(spans, key=lambda b: -b.n_bytes):
        start, size, (first, last) = 0, _size(buffer), spans[buffer]
        alive = [(a, b) for a, b, born, dead in placed if born <= last and first <= dead]
        for other_start, other_end in sorted(alive):
            if start + size <= other_start:
                break
            start = max(start, other_end)
        starts[buffer] = start
        placed.append((start, start + size, first, last))
        end = max(end, start + size)
    memory = aligned_zeros(end + 4 * ROWS)  # a residual is read by whole tiles, as its sum is stored
    base = address_of(memory)
    return memory, {buffer: base + start for buffer, start in starts.items()}


def lifetimes(ops: Sequence[Op]) -> dict[Buffer, tuple[int, int]]:
    """The first and the last op that use each buffer, by their numbers."""
    spans: dict[Buffer, tuple[int, int]] = {}
    for i, op in enumerate(ops):
        for buffer in op.buffers():
            spans[buffer] = (spans.get(buffer, (i, i))[0], i)
    return spans


def _size(buffer: Buffer) -> int:
    return -(-max(buffer.n_bytes, _LINE) // _LINE) * _LINE
