"""Typed ops of a recorded plan: each is one kernel call, on values whose addresses are not known yet.

An op is a dataclass. Its fields of type `Value` and `Buffer` are the memory that it uses: it writes `y`
without reading it, and edits the fields that `in_place` names. `kernel` is the kernel's name. The kernel's
parameters are the fields of their names, and what `record` adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import index
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from kukri.dataclass import dataclass, field
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVType
from kukri.kernels.cpu.compile.kernel_source import float_bits
from kukri.kernels.cpu.pack.layouts import ROWS, TOKENS, PanelKind, linear_kernel
from kukri.kernels.cpu.pack.weights import PackedWeight
from kukri.kernels.cpu.run.abi import (
    CHUNK_TOKENS,
    EXPERT_ENTRY_BYTES,
    LOGIT_ROWS,
    MAX_ENTRY_ROWS,
    N_LOGIT_ROWS,
    N_TOKENS,
    POSITIONS,
    ROUTE_BYTES,
    TOKEN_IDS,
    TOKEN_TYPES,
    partial_bytes,
    prompt_tokens,
    query_tokens,
)
from kukri.kernels.cpu.run.memory import address_of
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.op_set import EmbedBy
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, Routing
from kukri.kernels.weight_handles import Vector, Weight

_ALL = 1 << 40  # tokens: more than there are
_INDICES = {"token_ids": TOKEN_IDS, "positions": POSITIONS, "token_types": TOKEN_TYPES}


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of one value, of its panels, or of partial results, while ops need it."""

    n_bytes: int


@dataclass(frozen=True, eq=False)
class RouteTable(Buffer):
    """Which of a step's rows each expert computes (see abi.py): offsets in bytes of the table's arrays."""

    routing: Routing
    max_rows: int
    max_slots: int
    entries: int  # how many entries of EXPERT_ENTRY_BYTES
    next_slots: int  # int64 [E]: after an expert's last slot
    experts: int  # int32 [rows]: the row's expert, or -1
    slots: int  # int32 [rows]: its slot, or -1
    rows: int  # int32 [slots]: the row of a slot

    @classmethod
    def make(cls, routing: Routing, max_tokens: int) -> RouteTable:
        """A table for steps of up to `max_tokens`."""
        n_rows = max_tokens * routing.n_used
        n_slots = TOKENS * (n_rows // TOKENS + min(n_rows, routing.n_experts))
        n_entries = n_rows // MAX_ENTRY_ROWS + min(n_rows, routing.n_experts)
        sizes = (n_entries * EXPERT_ENTRY_BYTES, 8 * routing.n_experts, 4 * n_rows, 4 * n_rows, 4 * n_slots)
        starts = [ROUTE_BYTES + sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return cls(starts[-1], routing, n_rows, n_slots, *starts[:-1])


# rows of a value: the step's tokens, tokens that want logits, or in a mixture one for each expert of a token
Rows = Literal["T", "N"] | RouteTable


@dataclass(frozen=True, eq=False)
class Value:
    """float32 [rows, width] in a buffer whose rows are `stride` bytes apart."""

    buffer: Buffer
    rows: Rows
    width: int
    stride: int
    offset: int = 0  # bytes from the start of a row


class Addresses(Protocol):
    """Addresses of buffers and arrays: see `kukri.kernels.cpu.plan.place.Plan`."""

    batch: int  # the step's batch (`abi.BATCH_BYTES`)
    cache: PagedKV
    n_threads: int

    def batch_of(self, spec: AttentionSpec) -> int:
        """The address of the step's batch as layers of a kind see it: with their work entries."""

    def of(self, used: Value | Buffer) -> int:
        """The address of a value's first row, or of a buffer."""

    def of_array(self, array: Any) -> int:
        """The address of a NumPy array, which the plan keeps."""


class Op:
    """One kernel call."""

    in_place: ClassVar[tuple[str, ...]] = ()  # fields of values that it edits

    kernel: Any  # the name of its kernel, or a property that gives it
    spec: Any  # the facts of its layer, if it needs some
    y: Any  # its result

    def record(self, at: Addresses) -> dict[str, int]:
        """Return the kernel's parameters that no field says, or that are floats, by name."""
        return {}

    def argument(self, name: str, at: Addresses) -> int:
        """Return a parameter of the kernel that `record` lacks, by its name.

        It is the address or the stride of a value, 0 for None, or an integer: a field of the op, or of its
        `spec`. `rows` and `n` are the size of x, and `batch` is the step's. Raises TypeError for a float.
        """
        fields = vars(self)
        if name in ("rows", "n"):
            return row_count(fields["x"].rows, at) if name == "rows" else fields["x"].width
        if name == "batch":
            return at.batch
        if (of := name.removesuffix("_stride")) != name:
            return 0 if fields[of] is None else fields[of].stride
        value = fields[name] if name in fields else getattr(self.spec, name)
        if isinstance(value, Value | Buffer):
            return at.of(value)
        if isinstance(value, Vector):
            return at.of_array(whole_vectors(value.data))
        return 0 if value is None else index(value)

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

    def edited(self) -> set[Buffer]:
        """The buffers that it changes and did not make."""
        values = [getattr(self, name) for name in self.in_place]
        return {value.buffer for value in values if value is not None}

    def _values(self) -> Iterator[tuple[str, Value | Buffer]]:
        for name, part in vars(self).items():
            if isinstance(part, (Value, Buffer)):
                yield name, part
            if isinstance(part, Value) and isinstance(part.rows, Buffer):
                yield "rows", part.rows


@dataclass(eq=False)
class Producer(Op):
    """An op that can also write the int8 panels of its result y, or only these if nothing reads y."""

    y: Value | None
    panels: Buffer | None = field(default=None, kw_only=True)


@dataclass(eq=False)
class Embed(Op):
    """Rows of a matrix for the step's tokens, read from the file, plus `residual`."""

    weight: Weight
    y: Value
    by: EmbedBy = "token_ids"
    residual: Value | None = None

    @property
    def kernel(self) -> str:
        return f"embed_{self.weight.type.name}"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "indices": at.batch + _INDICES[self.by],
            "w": at.of_array(self.weight.data),
            "n_blocks": self.weight.shape[1] // self.weight.type.block_size,
        }


@dataclass(eq=False)
class RMSNorm(Producer):
    """x / rms(x) * weight, and `residual` added to that if it is there."""

    x: Value
    weight: Vector
    eps: float
    residual: Value | None = None

    @property
    def kernel(self) -> str:
        return "rms_norm" if self.residual is None else "rms_norm_add"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"eps": float_bits(self.eps)}


@dataclass(eq=False)
class Scale(Op):
    """x * factor; whole vectors of a row, what lies after its columns too."""

    y: Value
    x: Value
    factor: float
    kernel = "scale"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"factor": float_bits(self.factor)}


@dataclass(eq=False)
class Add(Producer):
    """x * scale + residual."""

    x: Value
    residual: Value
    scale: float = 1.0
    kernel = "add"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"scale": float_bits(self.scale)}


@dataclass(eq=False)
class LayerNorm(Producer):
    """(x - mean) / deviation * weight + bias."""

    x: Value
    weight: Vector
    bias: Vector
    eps: float
    kernel = "layer_norm"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"eps": float_bits(self.eps)}


@dataclass(eq=False)
class Elementwise(Producer):
    """A kernel of `elementwise.py`: a function of each number of x, of `other` with it, and of a and b."""

    x: Value
    kernel: str
    other: Value | None = None
    a: float = 0.0
    b: float = 0.0

    def record(self, at: Addresses) -> dict[str, int]:
        other = self.other or self.x
        return {
            "other": at.of(other),
            "other_stride": other.stride,
            "a": float_bits(self.a),
            "b": float_bits(self.b),
        }


@dataclass(eq=False)
class HeadNorm(Op):
    """An RMSNorm of each head of x, in place."""

    x: Value
    weight: Vector
    eps: float
    kernel = "head_norm"
    in_place = ("x",)

    def record(self, at: Addresses) -> dict[str, int]:
        d_head = len(self.weight)
        return {"n_heads": self.x.width // d_head, "d_head": d_head, "eps": float_bits(self.eps)}


@dataclass(eq=False)
class FitHeads(Op):
    """The heads of x cut to another size, or filled up to it with zeros.

    `x_step` and `y_step`: columns from a head to the next; 0: they are side by side.
    """

    x: Value
    y: Value
    n_heads: int
    x_step: int = 0
    y_step: int = 0
    kernel = "fit_heads"

    def record(self, at: Addresses) -> dict[str, int]:
        d_head, d_target = self.x.width // self.n_heads, self.y.width // self.n_heads
        return {
            "d_head": d_head,
            "x_step": 4 * (self.x_step or d_head),
            "d_target": d_target,
            "y_step": 4 * (self.y_step or d_target),
        }


@dataclass(eq=False)
class Repeat(Op):
    """Each column of x, `times` times side by side."""

    x: Value
    y: Value
    times: int
    kernel = "repeat"


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
        return {"panels": at.of(self.y)}


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
            "rows": row_count(self.y.rows, at),
            "w": at.of_array(self.weight.tiles),
            "x": at.of(self.panels),
            "n_row_tiles": self.weight.n_row_tiles,
            "n_blocks": self.weight.n_blocks,
            "y": at.of(self.y) + start,
            "bias": 0 if self.bias is None else at.of_array(self.bias) + start,
            "residual": 0 if self.residual is None else at.of(self.residual) + start,
        }

    def streams(self, at: Addresses) -> tuple[int, int]:
        return at.of_array(self.weight.tiles), self.weight.tiles.nbytes


@dataclass(eq=False)
class RopeStore(Op):
    """Rotates q and k in place if `rope` is there, and writes k and v to the cache if it `stores`.

    For a cache of rotated heads the heads of all three are rotated too. A layer that reads another's has only
    q.
    """

    q: Value
    k: Value | None
    v: Value | None
    spec: AttentionSpec
    kv_type: KVType
    rope: RopeRows | None
    stores: bool
    in_place = ("q", "k", "v")

    @property
    def kernel(self) -> str:
        return f"rope_store_{self.kv_type}"

    def record(self, at: Addresses) -> dict[str, int]:
        spec, rope, cache = self.spec, self.rope, at.cache
        k, key_range = self.k or self.q, spec.key_range
        return {
            "batch": at.batch_of(spec),
            "k": at.of(k),
            "v": at.of(self.v or k),
            "stride": self.q.stride,
            "n_kv_heads": spec.n_kv_heads if self.k else 0,
            "page_stride": cache.page_stride(spec.kv_layer),
            "cos": 0 if rope is None else at.of_array(rope.cos),
            "sin": 0 if rope is None else at.of_array(rope.sin),
            "half": 0 if rope is None else rope.frequencies.rotary_dim // 2,
            "keys": 0 if not self.stores else address_of(cache.keys[spec.kv_layer]),
            "values": 0 if not self.stores else address_of(cache.values[spec.kv_layer]),
            "middle": at.of_array(key_range.middle.data) if key_range else 0,
            "reach": at.of_array(key_range.reach.data) if key_range else 0,
        }


# Parts of a prompt's attention for each thread: few, as keys are widened once for all rows of a part
_PARTS_PER_THREAD = 2
_BUSY_ENTRIES_PER_THREAD = 4  # enough work entries to keep threads busy without a cut by key heads


@dataclass(eq=False)
class AttentionWork(Op):
    """Cuts the step's attention into work entries for each `Attend` with the same `Cut` as `spec`."""

    spec: AttentionSpec
    kernel = "attention_work"

    def record(self, at: Addresses) -> dict[str, int]:
        least_entries = -(-_PARTS_PER_THREAD * at.n_threads // self.spec.n_kv_heads)
        cut = cut_of(self.spec)._asdict()
        return {"batch": at.batch_of(self.spec), **cut, "least_entries": least_entries}


@dataclass(eq=False)
class Attend(Op):
    """Attention over the cache; contexts that are cut into chunks leave partial results."""

    q: Value
    y: Value
    spec: AttentionSpec
    kv_type: KVType
    partials: Buffer
    most_tokens: int  # that a sequence may have

    @property
    def kernel(self) -> str:
        ending = "" if self.spec.softcap is None else "_softcap"
        ending = ending if self.spec.distances is None else "_biased"
        return f"attend_{self.kv_type}{ending}[{self.spec.group},{self.spec.d_head}]"

    def record(self, at: Addresses) -> dict[str, int]:
        distances = stride = 0
        if self.spec.distances is not None:
            # as far as any query and key of a chunk are apart
            biases = self.spec.biases(np.arange(-self.most_tokens, self.most_tokens + CHUNK_TOKENS))
            assert biases is not None
            distances, stride = at.of_array(biases) + 4 * self.most_tokens, 4 * biases.shape[-1]
        return _attention(self.spec, at) | {
            "busy_entries": _BUSY_ENTRIES_PER_THREAD * at.n_threads,
            "distances": distances,
            "distance_stride": stride,
            **cut_of(self.spec).seen(),
        }


@dataclass(eq=False)
class AttendFinish(Producer):
    """Combines the partial results of `Attend`, if there are any, into the rest of `attended`."""

    attended: Value  # also y, as it is read and written
    partials: Buffer
    spec: AttentionSpec
    kv_type: KVType

    @property
    def kernel(self) -> str:
        rotated = "_rotated" if KV_TYPES[self.kv_type].is_rotated else ""
        return f"attend_finish{rotated}"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "batch": at.batch_of(self.spec),
            "sinks": _sinks(self.spec, at),
            "part_bytes": part_bytes(self.spec),
        }


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
        return _attention(self.spec, at)


@dataclass(eq=False)
class GatherRows(Op):
    """The rows of x that the step wants logits of."""

    x: Value
    y: Value
    kernel = "gather_rows"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"rows": row_count("N", at), "indices": at.batch + LOGIT_ROWS}


ACTIVATIONS = "activations"  # the name of the stop where a step's activations are copied in


@dataclass(eq=False)
class Tap(Op):
    """A stop of the plan, without a kernel: a listener may edit x; then `residual` is added to it.

    `n_used`: of routes, the most weights of a row that the listener may leave other than 0.
    """

    name: str
    x: Value
    residual: Value | None = None
    n_used: int | None = None
    in_place = ("x",)


class Cut(NamedTuple):
    """The facts that decide how a step's attention is cut into work entries, for layers of one kind."""

    group_tokens: int  # new tokens that share a partial result
    most_tokens: int  # new tokens of a sequence that a work entry may have
    n_ahead: int  # later tokens that a token sees
    window: int  # tokens up to itself that it sees
    first_key: int  # keys before it are not seen
    stop_key: int  # nor those from it on

    def seen(self) -> dict[str, int]:
        """The facts that say which keys a token sees, by the names of kernels' parameters."""
        return {name: getattr(self, name) for name in ("window", "n_ahead", "first_key", "stop_key")}


def cut_of(spec: AttentionSpec) -> Cut:
    """Return how a layer's attention is cut."""
    window, n_ahead = spec.window or _ALL, _ALL if spec.n_ahead is None else spec.n_ahead
    tokens = query_tokens(spec.group), prompt_tokens(spec.group, spec.d_head)
    return Cut(*tokens, n_ahead, window, spec.first_key, spec.stop_key or _ALL)


def part_bytes(spec: AttentionSpec) -> int:
    """Bytes of a partial result of one key head."""
    return partial_bytes(spec.group * cut_of(spec).group_tokens, spec.d_head)


def row_count(rows: Rows, at: Addresses) -> int:
    """The address of the number of rows."""
    if isinstance(rows, RouteTable):
        return at.of(rows)
    return at.batch + (N_TOKENS if rows == "T" else N_LOGIT_ROWS)


def whole_vectors(rows: FloatArray) -> FloatArray:
    """Constants as kernels load them: rows with zeros after them up to 16 n numbers."""
    n_zeros = -rows.shape[-1] % ROWS
    return np.concatenate([rows, np.zeros((*rows.shape[:-1], n_zeros), np.float32)], -1) if n_zeros else rows


def _attention(spec: AttentionSpec, at: Addresses) -> dict[str, int]:
    return {
        "batch": at.batch_of(spec),
        "scale": float_bits(spec.scale),
        "softcap": 0 if spec.softcap is None else float_bits(spec.softcap),
        "keys": address_of(at.cache.keys[spec.kv_layer]),
        "values": address_of(at.cache.values[spec.kv_layer]),
        "page_stride": at.cache.page_stride(spec.kv_layer),
        "sinks": _sinks(spec, at),
    }


def _sinks(spec: AttentionSpec, at: Addresses) -> int:
    """The address of the heads' sinks: -inf, which adds nothing, if there are none."""
    none = np.full(spec.n_heads, -np.inf, np.float32)
    return at.of_array(none if spec.sinks is None else spec.sinks.data)
