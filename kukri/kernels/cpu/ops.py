"""Typed ops of a recorded plan: each is one kernel call, on values whose addresses are not known yet.

An op is a dataclass. Its fields of type `Value` and `Buffer` are what it uses in memory, `y` being what it
writes and does not read, and `in_place` naming those that it edits. `kernel` is the kernel's name, `record`
the numbers and addresses that the kernel takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from kukri.kernels.cpu.abi import LOGIT_ROWS, N_LOGIT_ROWS, N_TOKENS, query_tokens
from kukri.kernels.cpu.kernel_cache import float_bits
from kukri.kernels.cpu.layouts import PanelKind, linear_kernel
from kukri.kernels.cpu.memory import address_of
from kukri.kernels.cpu.pack import PackedWeight
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.types import AttentionSpec, FloatArray, KVType, Vector, Weight

Rows = Literal["T", "N"]


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of one value, of its panels, or of partial results, while ops need it."""

    n_bytes: int


@dataclass(frozen=True, eq=False)
class Value:
    """float32 [T or N, width] in a buffer whose rows are `stride` bytes apart."""

    buffer: Buffer
    rows: Rows
    width: int
    stride: int
    offset: int = 0  # bytes from the start of a row


class Addresses(Protocol):
    """Addresses of buffers and arrays: see `kukri.kernels.cpu.place.Plan`."""

    batch: int  # the step's batch (`abi.BATCH_BYTES`)
    cache: PagedKV

    def of(self, used: Value | Buffer) -> int:
        """The address of a value's first row, or of a buffer."""

    def of_array(self, array: Any) -> int:
        """The address of a NumPy array, which the plan keeps."""


class Op:
    """One kernel call."""

    in_place: ClassVar[tuple[str, ...]] = ()  # fields of values that it edits

    kernel: Any  # the name of its kernel, or a property that gives it

    def record(self, at: Addresses) -> dict[str, int]:
        """The kernel's parameters by name."""
        raise NotImplementedError

    def streams(self, at: Addresses) -> tuple[int, int]:
        """Address and bytes of the weights that it streams from memory."""
        return 0, 0

    def buffers(self) -> set[Buffer]:
        """Everything that it uses in memory."""
        used = self._values()
        return {part.buffer if isinstance(part, Value) else part for _, part in used}

    def read_buffers(self) -> set[Buffer]:
        """The buffers that it reads or edits."""
        used = self._values()
        return {part.buffer if isinstance(part, Value) else part for name, part in used if name != "y"}

    def edits(self, buffer: Buffer) -> bool:
        """True if it changes a buffer that it did not make."""
        return any(getattr(self, name).buffer is buffer for name in self.in_place)

    def _values(self) -> Iterator[tuple[str, Value | Buffer]]:
        for name, part in vars(self).items():
            if isinstance(part, (Value, Buffer)):
                yield name, part


@dataclass(eq=False)
class Producer(Op):
    """An op that can write the int8 panels of its result y beside it, or in its place if nothing reads y."""

    y: Value | None
    panels: Buffer | None = field(default=None, kw_only=True)

    def outputs(self, at: Addresses) -> dict[str, int]:
        """The parameters of its results: 0 for those that are not wanted."""
        return {
            "y": 0 if self.y is None else at.of(self.y),
            "y_stride": 0 if self.y is None else self.y.stride,
            "panels": 0 if self.panels is None else at.of(self.panels),
        }


@dataclass(eq=False)
class Embed(Op):
    """Rows of a matrix, as it is in its file, for the step's tokens."""

    weight: Weight
    y: Value

    @property
    def kernel(self) -> str:
        return f"embed_{self.weight.type.name}"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "batch": at.batch,
            "w": at.of_array(self.weight.data),
            "n_blocks": self.weight.shape[1] // self.weight.type.block_size,
            "y": at.of(self.y),
            "y_stride": self.y.stride,
        }


@dataclass(eq=False)
class RMSNorm(Producer):
    """x / rms(x) * weight."""

    x: Value
    weight: Vector
    eps: float
    kernel = "rms_norm"

    def record(self, at: Addresses) -> dict[str, int]:
        norm = {"weight": at.of_array(self.weight.data), "eps": float_bits(self.eps)}
        return _rows_of(self.x, at) | self.outputs(at) | norm


@dataclass(eq=False)
class LayerNorm(Producer):
    """(x - mean) / deviation * weight + bias."""

    x: Value
    weight: Vector
    bias: Vector
    eps: float
    kernel = "layer_norm"

    def record(self, at: Addresses) -> dict[str, int]:
        arrays = {"weight": at.of_array(self.weight.data), "bias": at.of_array(self.bias.data)}
        return _rows_of(self.x, at) | self.outputs(at) | arrays | {"eps": float_bits(self.eps)}


@dataclass(eq=False)
class Gelu(Producer):
    """GELU, by tanh."""

    x: Value
    kernel = "gelu"

    def record(self, at: Addresses) -> dict[str, int]:
        return _rows_of(self.x, at) | self.outputs(at)


@dataclass(eq=False)
class SiluMul(Producer):
    """silu(gate) * up, both columns of one buffer."""

    gate: Value
    up: Value
    kernel = "silu_mul"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "rows": _count(self.gate.rows, at),
            "gate": at.of(self.gate),
            "up": at.of(self.up),
            "x_stride": self.gate.stride,
            "n": self.gate.width,
        } | self.outputs(at)


@dataclass(eq=False)
class HeadNorm(Op):
    """An RMSNorm of each head of x, in place."""

    x: Value
    weight: Vector
    eps: float
    kernel = "head_norm"
    in_place = ("x",)

    def record(self, at: Addresses) -> dict[str, int]:
        return _rows_of(self.x, at) | {
            "n_heads": self.x.width // len(self.weight),
            "d_head": len(self.weight),
            "weight": at.of_array(self.weight.data),
            "eps": float_bits(self.eps),
        }


@dataclass(eq=False)
class Quantize(Op):
    """The rows of x as panels, the input of a matrix product."""

    x: Value
    kind: PanelKind
    y: Buffer

    @property
    def kernel(self) -> str:
        return f"panel_{self.kind}"

    def record(self, at: Addresses) -> dict[str, int]:
        return _rows_of(self.x, at) | {"panels": at.of(self.y)}


@dataclass(eq=False)
class Linear(Op):
    """The product of panels with a matrix, to columns of y from `column` on; `bias` and `residual` added."""

    panels: Buffer
    kind: PanelKind
    weight: PackedWeight
    y: Value
    column: int
    bias: FloatArray | None  # float32, of whole tiles
    residual: Value | None

    @property
    def kernel(self) -> str:
        return linear_kernel(self.weight.type_name, self.kind)

    def record(self, at: Addresses) -> dict[str, int]:
        start = 4 * self.column
        return {
            "rows": _count(self.y.rows, at),
            "w": at.of_array(self.weight.tiles),
            "x": at.of(self.panels),
            "n_row_tiles": self.weight.n_row_tiles,
            "n_blocks": self.weight.n_blocks,
            "y": at.of(self.y) + start,
            "y_stride": self.y.stride,
            "bias": 0 if self.bias is None else at.of_array(self.bias) + start,
            "residual": 0 if self.residual is None else at.of(self.residual) + start,
            "residual_stride": 0 if self.residual is None else self.residual.stride,
        }

    def streams(self, at: Addresses) -> tuple[int, int]:
        return at.of_array(self.weight.tiles), self.weight.tiles.nbytes


@dataclass(eq=False)
class RopeStore(Op):
    """Rotates q and k in place if `rope` is there, and writes k and v to the cache if `v` is."""

    q: Value
    k: Value
    v: Value | None
    spec: AttentionSpec
    kv_type: KVType
    rope: RopeRows | None
    in_place = ("q", "k")

    @property
    def kernel(self) -> str:
        return f"rope_store_{self.kv_type}"

    def record(self, at: Addresses) -> dict[str, int]:
        spec, rope, cache = self.spec, self.rope, at.cache
        return {
            "batch": at.batch,
            "q": at.of(self.q),
            "k": at.of(self.k),
            "v": at.of(self.k if self.v is None else self.v),
            "stride": self.q.stride,
            "n_heads": spec.n_heads,
            "n_kv_heads": spec.n_kv_heads,
            "d_head": spec.d_head,
            "page_stride": cache.page_stride,
            "cos": 0 if rope is None else at.of_array(rope.cos),
            "sin": 0 if rope is None else at.of_array(rope.sin),
            "half": 0 if rope is None else rope.frequencies.rotary_dim // 2,
            "keys": 0 if self.v is None else address_of(cache.keys[spec.layer]),
            "values": 0 if self.v is None else address_of(cache.values[spec.layer]),
        }


@dataclass(eq=False)
class AttentionWork(Op):
    """Cuts the step's attention into work entries of `group_tokens` tokens for `Attend`."""

    group_tokens: int
    kernel = "attention_work"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"batch": at.batch, "group_tokens": self.group_tokens}


@dataclass(eq=False)
class Attend(Op):
    """Causal attention over the cache; contexts that are cut into chunks leave partial results."""

    q: Value
    y: Value
    spec: AttentionSpec
    kv_type: KVType
    partials: Buffer

    @property
    def kernel(self) -> str:
        return f"attend_{self.kv_type}[{self.spec.group},{self.spec.d_head}]"

    def record(self, at: Addresses) -> dict[str, int]:
        return _attention(self.q, self.y, self.spec, at) | {
            "window": self.spec.window or 1 << 40,
            "partials": at.of(self.partials),
        }


@dataclass(eq=False)
class AttendFinish(Producer):
    """Combines the partial results of `Attend`, if there are any, into the rest of `attended`."""

    attended: Value  # what y is too: it is read and written
    partials: Buffer
    spec: AttentionSpec

    @property
    def kernel(self) -> str:
        return f"attend_finish[{self.spec.group},{self.spec.d_head}]"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "batch": at.batch,
            "n_kv_heads": self.spec.n_kv_heads,
            "partials": at.of(self.partials),
        } | self.outputs(at)


@dataclass(eq=False)
class AttendMasked(Op):
    """Attention by the step's mask."""

    q: Value
    y: Value
    spec: AttentionSpec

    @property
    def kernel(self) -> str:
        return f"attend_masked[{self.spec.d_head}]"

    def record(self, at: Addresses) -> dict[str, int]:
        return _attention(self.q, self.y, self.spec, at) | {"n_heads": self.spec.n_heads}


@dataclass(eq=False)
class GatherRows(Op):
    """The rows of x that the step wants logits of."""

    x: Value
    y: Value
    kernel = "gather_rows"

    def record(self, at: Addresses) -> dict[str, int]:
        return _rows_of(self.x, at) | {
            "rows": _count("N", at),
            "indices": at.batch + LOGIT_ROWS,
            "y": at.of(self.y),
            "y_stride": self.y.stride,
        }


@dataclass(eq=False)
class Tap(Op):
    """A stop of the plan, without a kernel: a listener may edit x; then `residual` is added to it."""

    name: str
    x: Value
    residual: Value | None = None
    in_place = ("x",)


def group_tokens(spec: AttentionSpec) -> int:
    """New tokens of a sequence that attend together: the fields of a work entry."""
    return query_tokens(spec.group)


def _count(rows: Rows, at: Addresses) -> int:
    """The address of T or N."""
    return at.batch + (N_TOKENS if rows == "T" else N_LOGIT_ROWS)


def _rows_of(x: Value, at: Addresses) -> dict[str, int]:
    return {"rows": _count(x.rows, at), "x": at.of(x), "x_stride": x.stride, "n": x.width}


def _attention(q: Value, y: Value, spec: AttentionSpec, at: Addresses) -> dict[str, int]:
    return {
        "batch": at.batch,
        "q": at.of(q),
        "q_stride": q.stride,
        "scale": float_bits(spec.scale),
        "n_kv_heads": spec.n_kv_heads,
        "keys": address_of(at.cache.keys[spec.layer]),
        "values": address_of(at.cache.values[spec.layer]),
        "page_stride": at.cache.page_stride,
        "y": at.of(y),
        "y_stride": y.stride,
    }
