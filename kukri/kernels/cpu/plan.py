"""Records a model's ops into a plan: a flat list of kernel calls over preallocated buffers.

`Recorder` is an `Ops` whose values are buffer handles. Calling a model with it once writes the plan down;
running the plan calls kernels by address, with no Python in between. Sizes that change from step to step
(T, S, N) are read by the kernels from the batch, so one plan serves prompts and decoding alike.

Two things are fused on the way: whoever produces the input of a quantized linear writes its int8 panels at
once, and RoPE writes keys and values to the cache in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kukri.errors import MissingKernelError, ShapeError
from kukri.kernels.cpu.features import cpu_target
from kukri.kernels.cpu.jit import KernelLibrary
from kukri.kernels.cpu.kernel_cache import float_bits
from kukri.kernels.cpu.layouts import ROWS, TOKENS, PanelKind, linear_kernel, panel_bytes
from kukri.kernels.cpu.memory import address_of, aligned_zeros
from kukri.kernels.cpu.pack import PackedWeight, layout_of
from kukri.kernels.cpu.state import (
    CHUNK_TOKENS,
    LOGIT_ROWS,
    MAX_TILE_ROWS,
    N_LOGIT_ROWS,
    N_TOKENS,
    OP_BYTES,
    partial_bytes,
    query_tokens,
)
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.types import (
    AttentionSpec,
    ByteArray,
    RopeFrequencies,
    StepLimits,
    Vector,
    Weight,
    tap_name,
)

Rows = Literal["T", "N"]


@dataclass(eq=False)
class Buffer:
    """Memory of one value, or of its panels, while a step runs."""

    n_bytes: int
    first: int = -1  # ops between which it is in use
    last: int = -1
    address: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """float32 [T or N, width] in a buffer whose rows are `stride` bytes apart."""

    buffer: Buffer
    rows: Rows
    width: int
    stride: int
    offset: int = 0  # bytes from the start of a row


@dataclass(frozen=True)
class Ref:
    """An address inside a buffer, known once buffers are placed."""

    buffer: Buffer
    offset: int = 0


@dataclass(eq=False)
class Op:
    """One kernel call: its record's fields, some of them addresses still to come."""

    kernel: str
    fields: dict[str, int | Ref]
    weights: tuple[int, int] = (0, 0)  # address and bytes of what it streams from memory


@dataclass(eq=False)
class Segment:
    """Ops up to a tap."""

    stop: int  # one past the last op
    name: str
    value: Value
    residual: Value | None = None  # added to the value after the tap


@dataclass(eq=False)
class Plan:
    """A recorded model: ops int64 [n, 5] for the executor, and the taps between them."""

    ops: np.ndarray[Any, Any]
    segments: list[Segment]
    result: Value
    kernel_names: list[str]
    ropes: list[RopeRows]  # that records point into: each step's positions must be computed
    memory: ByteArray  # all buffers
    keep: list[Any] = field(default_factory=list)  # arrays that records point into


class Recorder:
    """The op set, writing a plan. `pack` gives the tiles of weights of one type, `rope_rows` cos and sin."""

    def __init__(
        self,
        cache: PagedKV,
        limits: StepLimits,
        taps: frozenset[str],
        batch_address: int,
        pack: Callable[[tuple[Weight, ...]], PackedWeight],
        rope_rows: Callable[[RopeFrequencies], RopeRows],
    ) -> None:
        self._cache, self._limits, self._taps, self._batch = cache, limits, taps, batch_address
        self._pack, self._rope_rows = pack, rope_rows
        self._ops: list[Op] = []
        self._buffers: list[Buffer] = []
        self._segments: list[Segment] = []
        self._panels: dict[tuple[Value, PanelKind], Buffer] = {}
        self._producers: dict[Value, Op] = {}  # ops that could write their result's q8 panels as well
        self._partials: Buffer | None = None
        self._group_tokens = 0
        self._ropes: list[RopeRows] = []
        self._keep: list[Any] = []
        self.n_vocab = 0

    # --- the op set ---

    def embed(self, weight: Weight, batch: Any) -> Value:
        """See Ops.embed. Rows are read from the file, as it is."""
        layout = layout_of(weight)
        self.n_vocab = weight.shape[0]
        y = self._value("T", weight.shape[1])
        data = np.ascontiguousarray(weight.data)
        self._emit(
            f"embed_{weight.type.name}",
            batch=self._batch,
            w=self._kept(data),
            n_blocks=weight.shape[1] // layout.block_size,
            y=Ref(y.buffer),
            y_stride=y.stride,
        )
        return y

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        """See Ops.rms_norm."""
        return self._row_op("rms_norm", "the model width", x, weight=self._array(weight), eps=float_bits(eps))

    def head_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        """See Ops.head_norm."""
        self._require_multiple("the head size", len(weight), 16)
        self._emit(
            "head_norm",
            rows=self._count(x.rows),
            x=Ref(x.buffer, x.offset),
            x_stride=x.stride,
            n_heads=x.width // len(weight),
            d_head=len(weight),
            weight=self._array(weight),
            eps=float_bits(eps),
        )
        return x

    def layer_norm(self, x: Value, weight: Vector, bias: Vector, eps: float) -> Value:
        """See Ops.layer_norm."""
        arrays = {"weight": self._array(weight), "bias": self._array(bias)}
        return self._row_op("layer_norm", "the model width", x, **arrays, eps=float_bits(eps))

    def gelu(self, x: Value) -> Value:
        """See Ops.gelu."""
        return self._row_op("gelu", "the FFN width", x)

    def linear(
        self,
        x: Value,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Value | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Value:
        """See Ops.linear. Neighbouring weights of one type become one kernel call."""
        if tap is not None and tap_name(*tap) in self._taps:
            y = self.tap(*tap, self.linear(x, weights, bias))
            self._segments[-1].residual = residual
            return y
        groups = _by_type(weights)
        width = sum(w.shape[0] for w in weights)
        last = sum(w.shape[0] for w in groups[-1])
        y = self._value(x.rows, width, width - last + -(-last // ROWS) * ROWS)
        bias_address = 0
        if bias is not None:
            padded = np.zeros(width + TOKENS * 2, np.float32)
            padded[:width] = bias.data
            bias_address = self._kept(padded)
        column = 0
        for group in groups:
            packed = self._pack(group)
            kind: PanelKind = packed.panel
            if kind == "q8" and x.rows == "N":
                kind = "q8x2" if cpu_target().has_int8_dot else "q16"
            panel = self._panel(x, kind)
            op = self._emit(
                linear_kernel(packed.type_name, kind),
                rows=self._count(x.rows),
                w=address_of(packed.tiles),
                x=Ref(panel),
                n_row_tiles=packed.n_row_tiles,
                n_blocks=packed.n_blocks,
                y=Ref(y.buffer, 4 * column),
                y_stride=y.stride,
                bias=bias_address + 4 * column if bias_address else 0,
                residual=Ref(residual.buffer, residual.offset + 4 * column) if residual else 0,
                residual_stride=residual.stride if residual else 0,
            )
            op.weights = address_of(packed.tiles), packed.tiles.nbytes
            column += packed.n_rows
        return y

    def split(self, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        """See Ops.split."""
        if sum(widths) != x.width:
            raise ShapeError(f"cannot split {x.width} columns into {tuple(widths)}")
        starts = np.cumsum([0, *widths[:-1]])
        return tuple(
            Value(x.buffer, x.rows, width, x.stride, x.offset + 4 * int(start))
            for width, start in zip(widths, starts, strict=True)
        )

    def rope(
        self, q: Value, k: Value, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Value, Value]:
        """See Ops.rope."""
        rows = self._rope_rows(rope)
        if rows not in self._ropes:
            self._ropes.append(rows)
        self._rope_store(
            q, k, k, spec,
            cos=address_of(rows.cos), sin=address_of(rows.sin), half=rope.rotary_dim // 2,
            keys=0, values=0,
        )  # fmt: skip
        return q, k

    def attention(self, q: Value, k: Value, v: Value, spec: AttentionSpec, batch: Any) -> Value:
        """See Ops.attention. The cache write joins the RoPE before it when nothing lies between."""
        group = spec.n_heads // spec.n_kv_heads
        self._require_multiple("the head size", spec.d_head, 16)
        kv_type = self._cache.kv_type
        if kv_type == "f32":
            raise MissingKernelError("a KV cache of f32; the CPU backend runs f16 and q8_0")
        if group > MAX_TILE_ROWS:
            raise MissingKernelError(
                f"{group} query heads per key head; the CPU backend runs up to {MAX_TILE_ROWS}"
            )
        keys = address_of(self._cache.keys[spec.layer])
        values = address_of(self._cache.values[spec.layer])
        last = self._ops[-1]
        ends_segment = self._segments and self._segments[-1].stop == len(self._ops)
        if (
            last.kernel == f"rope_store_{kv_type}"
            and last.fields["k"] == Ref(k.buffer, k.offset)
            and not ends_segment
        ):
            last.fields |= {"v": Ref(v.buffer, v.offset), "keys": keys, "values": values}
            self._touch(last)
        else:
            self._rope_store(q, k, v, spec, cos=0, sin=0, half=0, keys=keys, values=values)
        y = self._value("T", spec.n_heads * spec.d_head)
        if self._limits.mask_heads:
            self._attend_masked(q, y, spec, keys, values)
            return y
        partials = Ref(self._partial_buffer(spec, group))
        self._emit(
            f"attend_{kv_type}[{group},{spec.d_head}]",
            batch=self._batch,
            q=Ref(q.buffer, q.offset),
            q_stride=q.stride,
            scale=float_bits(spec.scale),
            n_kv_heads=spec.n_kv_heads,
            keys=keys,
            values=values,
            page_stride=self._cache.page_stride,
            window=spec.window or 1 << 40,
            partials=partials,
            y=Ref(y.buffer),
            y_stride=y.stride,
        )
        op = self._emit(
            f"attend_finish[{group},{spec.d_head}]",
            batch=self._batch,
            n_kv_heads=spec.n_kv_heads,
            partials=partials,
            y=Ref(y.buffer),
            y_stride=y.stride,
            panels=0,
        )
        self._producers[y] = op
        return y

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """See Ops.silu_mul. Both must be column views of one buffer."""
        if gate.stride != up.stride:
            raise ShapeError("silu_mul needs gate and up side by side")
        self._require_multiple("the FFN width", gate.width, 16)
        y = self._value(gate.rows, gate.width)
        op = self._emit(
            "silu_mul",
            rows=self._count(gate.rows),
            gate=Ref(gate.buffer, gate.offset),
            up=Ref(up.buffer, up.offset),
            x_stride=gate.stride,
            n=gate.width,
            y=Ref(y.buffer),
            y_stride=y.stride,
            panels=0,
        )
        self._producers[y] = op
        return y

    def logit_rows(self, x: Value, batch: Any) -> Value:
        """See Ops.logit_rows."""
        y = self._value("N", x.width)
        self._emit(
            "gather_rows",
            rows=self._count("N"),
            indices=self._batch + LOGIT_ROWS,
            x=Ref(x.buffer, x.offset),
            x_stride=x.stride,
            n=x.width,
            y=Ref(y.buffer),
            y_stride=y.stride,
        )
        return y

    def tap(self, name: str, layer: int | None, x: Value) -> Value:
        """See Ops.tap. A tap that the plan is for ends a segment; of others nothing is recorded."""
        full_name = tap_name(name, layer)
        if full_name in self._taps:
            self._segments.append(Segment(len(self._ops), full_name, x))
            self._use(x.buffer, len(self._ops) - 1)
            # the listener may edit the buffer: nothing derived from it before stays valid
            self._producers = {v: op for v, op in self._producers.items() if v.buffer is not x.buffer}
            self._panels = {key: b for key, b in self._panels.items() if key[0].buffer is not x.buffer}
        return x

    # --- writing the plan down ---

    def finish(self, result: Value, kernels: KernelLibrary) -> Plan:
        """Places buffers, loads kernels and resolves addresses."""
        self._drop_unread()
        self._use(result.buffer, len(self._ops))
        for segment in self._segments:
            self._use(segment.value.buffer, segment.stop)
            if segment.residual is not None:
                self._use(segment.residual.buffer, segment.stop)
        memory = _place(self._buffers)
        names = list(dict.fromkeys(op.kernel for op in self._ops))
        kernels.load([*names, "run_plan", "check_batch"])
        n_fields = [len(kernels[op.kernel].parameters) for op in self._ops]
        records = np.zeros(sum(n_fields), np.int64)
        ops = np.zeros((len(self._ops), OP_BYTES // 8), np.int64)
        start = 0
        for i, op in enumerate(self._ops):
            kernel = kernels[op.kernel]
            values = [_resolve(op.fields[name]) for name in kernel.parameters]
            records[start : start + len(values)] = values
            ops[i, 0], ops[i, 1] = kernel.address, address_of(records) + 8 * start
            ops[i, 3], ops[i, 4] = op.weights
            start += len(values)
        return Plan(ops, self._segments, result, names, self._ropes, memory, [records, *self._keep])

    def _emit(self, kernel: str, **fields: int | Ref) -> Op:
        op = Op(kernel, fields)
        self._ops.append(op)
        self._touch(op)
        return op

    def _row_op(self, kernel: str, what: str, x: Value, **fields: int) -> Value:
        """Rows of x to rows of the same width, by a kernel that can write their q8 panels as well."""
        self._require_multiple(what, x.width, 16)
        y = self._value(x.rows, x.width)
        self._producers[y] = self._emit(
            kernel,
            rows=self._count(x.rows),
            x=Ref(x.buffer, x.offset),
            x_stride=x.stride,
            n=x.width,
            y=Ref(y.buffer),
            y_stride=y.stride,
            panels=0,
            **fields,
        )
        return y

    def _attend_masked(self, q: Value, y: Value, spec: AttentionSpec, keys: int, values: int) -> None:
        if self._cache.kv_type != "f16":
            raise MissingKernelError(f"masks over a KV cache of {self._cache.kv_type}: they need f16")
        self._emit(
            f"attend_masked[{spec.d_head}]",
            batch=self._batch,
            q=Ref(q.buffer, q.offset),
            q_stride=q.stride,
            scale=float_bits(spec.scale),
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            keys=keys,
            values=values,
            page_stride=self._cache.page_stride,
            y=Ref(y.buffer),
            y_stride=y.stride,
        )

    def _touch(self, op: Op) -> None:
        index = self._ops.index(op) if self._ops[-1] is not op else len(self._ops) - 1
        for value in op.fields.values():
            if isinstance(value, Ref):
                self._use(value.buffer, index)

    def _use(self, buffer: Buffer, index: int) -> None:
        buffer.first = index if buffer.first < 0 else min(buffer.first, index)
        buffer.last = max(buffer.last, index)

    def _buffer(self, n_bytes: int) -> Buffer:
        buffer = Buffer(n_bytes)
        self._buffers.append(buffer)
        return buffer

    def _max_rows(self, rows: Rows) -> int:
        return self._limits.max_tokens if rows == "T" else self._limits.max_logit_rows

    def _value(self, rows: Rows, width: int, stored_width: int = 0) -> Value:
        """A new value; kernels store `stored_width` columns of it, whole tiles, where that is more."""
        stride = 4 * (-(-max(width, stored_width) // ROWS) * ROWS)
        return Value(self._buffer(self._max_rows(rows) * stride), rows, width, stride)

    def _count(self, rows: Rows) -> int:
        return self._batch + (N_TOKENS if rows == "T" else N_LOGIT_ROWS)

    def _array(self, vector: Vector) -> int:
        return self._kept(np.ascontiguousarray(vector.data))

    def _kept(self, array: np.ndarray[Any, Any]) -> int:
        self._keep.append(array)
        return address_of(array)

    def _require_multiple(self, what: str, n: int, factor: int) -> None:
        if n % factor:
            raise MissingKernelError(f"{what} is {n}; the CPU backend runs multiples of {factor}")

    def _panel(self, x: Value, kind: PanelKind) -> Buffer:
        panel = self._panels.get((x, kind))
        if panel is None:
            n_panels = -(-self._max_rows(x.rows) // TOKENS)
            panel = self._panels[x, kind] = self._buffer(n_panels * panel_bytes(kind, x.width))
            producer = self._producers.get(x)
            if kind == "q8" and producer is not None:
                producer.fields["panels"] = Ref(panel)
                self._touch(producer)
            else:
                self._emit(
                    f"panel_{kind}",
                    rows=self._count(x.rows),
                    x=Ref(x.buffer, x.offset),
                    x_stride=x.stride,
                    n=x.width,
                    panels=Ref(panel),
                )
        return panel

    def _rope_store(self, q: Value, k: Value, v: Value, spec: AttentionSpec, **fields: int) -> None:
        if not q.stride == k.stride == v.stride:
            raise ShapeError("attention needs q, k and v side by side")
        self._emit(
            f"rope_store_{self._cache.kv_type}",
            batch=self._batch,
            q=Ref(q.buffer, q.offset),
            k=Ref(k.buffer, k.offset),
            v=Ref(v.buffer, v.offset),
            stride=q.stride,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            d_head=spec.d_head,
            page_stride=self._cache.page_stride,
            **fields,
        )

    def _partial_buffer(self, spec: AttentionSpec, group: int) -> Buffer:
        if self._partials is None:
            self._group_tokens = query_tokens(group)
            self._ops.insert(
                0, Op("attention_work", {"batch": self._batch, "group_tokens": self._group_tokens})
            )
            for buffer in self._buffers:
                buffer.first, buffer.last = buffer.first + 1, buffer.last + 1
            for segment in self._segments:
                segment.stop += 1
            slot = partial_bytes(group * self._group_tokens, spec.d_head) * spec.n_kv_heads
            self._partials = self._buffer(max_partials(self._limits) * slot)
        if self._group_tokens != query_tokens(group):
            raise MissingKernelError("layers with different numbers of query heads per key head")
        return self._partials

    def _drop_unread(self) -> None:
        """Producers whose float result nobody reads write only their panels."""
        read = {segment.value.buffer for segment in self._segments}
        for op in self._ops:
            read |= {at.buffer for name, at in op.fields.items() if isinstance(at, Ref) and name != "y"}
        for value, op in self._producers.items():
            writes_panels = op.fields["panels"] != 0 and not op.kernel.startswith("attend")
            if writes_panels and value.buffer not in read:
                op.fields["y"] = 0


def max_partials(limits: StepLimits) -> int:
    """The most partial attention results a step can have: every chunk of every sequence."""
    return limits.max_sequences * -(-limits.max_pages * PAGE_TOKENS // CHUNK_TOKENS)


def _resolve(value: int | Ref) -> int:
    return value.buffer.address + value.offset if isinstance(value, Ref) else value


def _by_type(weights: Sequence[Weight]) -> list[tuple[Weight, ...]]:
    groups: list[list[Weight]] = []
    for weight in weights:
        layout_of(weight)
        last = groups[-1][0] if groups else weight
        is_like_it = (last.type, last.per_token) == (weight.type, weight.per_token)
        if groups and is_like_it and sum(w.shape[0] for w in groups[-1]) % ROWS == 0:
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return [tuple(group) for group in groups]


def _place(buffers: list[Buffer]) -> ByteArray:
    """Gives each buffer an address, sharing memory between those that are never in use together."""
    placed: list[tuple[int, Buffer]] = []
    end = 0
    for buffer in sorted(buffers, key=lambda b: -b.n_bytes):
        size = -(-max(buffer.n_bytes, 64) // 64) * 64
        start = 0
        for other_start, other in sorted((p for p in placed if _overlap(p[1], buffer)), key=lambda p: p[0]):
            if start + size <= other_start:
                break
            start = max(start, other_start + -(-max(other.n_bytes, 64) // 64) * 64)
        buffer.address = start
        placed.append((start, buffer))
        end = max(end, start + size)
    memory = aligned_zeros(end + 4 * ROWS)  # a residual is read by whole tiles, as its sum is stored
    for buffer in buffers:
        buffer.address += address_of(memory)
    return memory


def _overlap(a: Buffer, b: Buffer) -> bool:
    return a.first <= b.last and b.first <= a.last
