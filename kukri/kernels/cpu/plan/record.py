"""Records a model as a list of typed ops (ops.py), by running it once on an op set that computes nothing.

What is recorded is what the model said, an op for each step of a computation. `passes.py` fuses and drops,
`place.py` gives memory to what is left. Sizes that change from step to step (T, S, N) are read by the kernels
from the batch, so one plan serves prefill and decoding alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass, field, replace
from kukri.errors import MissingKernelError, ShapeError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVType
from kukri.kernels.cpu.pack.layouts import ROWS, TOKENS, PanelKind, panel_bytes
from kukri.kernels.cpu.pack.weights import PackedWeight, layout_of
from kukri.kernels.cpu.plan import expert_ops, ops, state_ops
from kukri.kernels.cpu.plan.adapter_ops import (
    AdapterDown,
    AdapterRuns,
    AdapterUp,
    ExpertRuns,
    PackedLowRank,
    Updates,
    runs_bytes,
)
from kukri.kernels.cpu.plan.batch_memory import max_partials
from kukri.kernels.cpu.plan.ops import Buffer, Op, RouteTable, Rows, Value
from kukri.kernels.cpu.run.abi import MAX_BEST, MAX_GROUPS, MAX_TILE_ROWS
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.op_set import EmbedBy, StageOps
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.taps import tap_name
from kukri.kernels.vectors import padded
from kukri.kernels.weight_handles import AdapterSlots, Experts, LowRank, RopeFrequencies, Vector, Weight


@dataclass(frozen=True, eq=False)
class RecordedRoutes:
    """The handle of a mixture's routes: the weights [T, E] and the table made of them."""

    weights: Value
    table: RouteTable
    panels: dict[tuple[Value, PanelKind], Buffer] = field(default_factory=dict)  # inputs, ordered by experts


class Recorder(StageOps):
    """The op set, whose values are handles.

    Attributes: ops, the list so far; n_vocab, n_positions and n_types, the rows of embeddings.

    Only taps named in `taps` are recorded. Rows that become logits are in `head_panels`. `pack` and
    `pack_experts` give the tiles of weights of one type, `rope_rows` cos and sin, `pack_update` the tiles of
    adapters' updates. Raises MissingKernelError on sizes that no kernel takes.
    """

    def __init__(
        self,
        kv_type: KVType,
        limits: StepLimits,
        taps: frozenset[str],
        head_panels: PanelKind,
        pack: Callable[[tuple[Weight, ...]], PackedWeight],
        pack_experts: Callable[[tuple[Experts, ...]], PackedWeight],
        rope_rows: Callable[[RopeFrequencies], RopeRows],
        pack_update: Callable[[LowRank], PackedLowRank],
        adapters: AdapterSlots = (),
    ) -> None:
        self._kv_type, self._limits, self._taps = kv_type, limits, taps
        self._head_panels = head_panels
        self._pack, self._pack_experts, self._rope_rows = pack, pack_experts, rope_rows
        self._pack_update, self._adapters = pack_update, adapters
        self._runs: dict[Rows, Buffer] = {}  # runs of rows with one adapter, and one expert
        self._panels: dict[tuple[Value, PanelKind], Buffer] = {}
        self.ops: list[Op] = []
        self.n_types = 0
        self.n_vocab = self.n_positions = 1 << 31  # without such an embedding

    def embed(
        self, weight: Weight, batch: Any, by: EmbedBy = "token_ids", residual: Value | None = None
    ) -> Value:
        """Rows are read from the file, as it is."""
        layout_of(weight)
        if by == "token_ids":
            self.n_vocab = min(self.n_vocab, weight.shape[0])
        elif by == "positions":
            self.n_positions = min(self.n_positions, weight.shape[0])
        else:
            self.n_types = weight.shape[0]
        return self._made(ops.Embed(weight, self._value("T", weight.shape[1]), by, residual))

    def activations(self, batch: Any, width: int) -> Value:
        """The program copies them in at this stop of the plan."""
        y = self._value("T", width)
        self._add(ops.Tap(ops.ACTIVATIONS, y))
        return y

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        return self._made(ops.RMSNorm(self._like(x), x, weight, eps))

    def head_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        self._add(ops.HeadNorm(x, weight, eps))
        return x

    def layer_norm(self, x: Value, weight: Vector, bias: Vector, eps: float) -> Value:
        return self._made(ops.LayerNorm(self._like(x), x, weight, bias, eps))

    def map(self, name: str, x: Value, other: Value | None = None, a: float = 0.0, b: float = 0.0) -> Value:
        return self._made(ops.Elementwise(self._like(x), x, name, other, a, b))

    def conv(self, x: Value, spec: ConvSpec, batch: Any) -> Value:
        op = state_ops.Conv if spec.n_after is None else state_ops.ConvBothWays
        return self._made(op(x, self._like(x), spec))

    def scan(self, x: Value, b: Value, c: Value, dt: Value, spec: ScanSpec, batch: Any) -> Value:
        wide = _padded_state(spec)
        x = self._fitted(x, spec.n_heads, wide.d_head)
        b, c = (self._fitted(each, spec.n_groups, wide.d_state) for each in (b, c))
        y = self._made(state_ops.Scan(x, b, c, dt, self._value("T", x.width), wide))
        return self._fitted(y, spec.n_heads, spec.d_head)

    def delta_rule(
        self, q: Value, k: Value, v: Value, decay: Value, beta: Value, spec: DeltaSpec, batch: Any
    ) -> Value:
        wide = _padded_state(spec)
        q, k = (self._fitted(each, spec.n_groups, wide.d_state) for each in (q, k))
        v = self._fitted(v, spec.n_heads, wide.d_head)
        y = self._made(state_ops.DeltaRule(q, k, v, decay, beta, self._value("T", v.width), wide))
        return self._fitted(y, spec.n_heads, spec.d_head)

    def linear(
        self,
        x: Value,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Value | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Value:
        """Neighbouring weights of one type become one kernel call.

        If an adapter may update the product, two more follow, the last of which adds the residual.
        """
        if tap is not None and tap_name(*tap) in self._taps:
            y = self.linear(x, weights, bias)
            self._add(ops.Tap(tap_name(*tap), y, residual))
            return y
        updates = self._updates([weights])
        if updates is not None:
            y = self._product(x, weights, bias, None)
            self._update(x, y, updates, residual)
            return y
        return self._product(x, weights, bias, residual)

    def _product(
        self, x: Value, weights: Sequence[Weight], bias: Vector | None, residual: Value | None
    ) -> Value:
        groups = _by_type(weights)
        width, stored_width = _widths([w.shape[0] for w in group] for group in groups)
        y = self._value(x.rows, width, stored_width)
        padded: FloatArray | None = None
        if bias is not None:
            padded = np.zeros(stored_width, np.float32)
            padded[:width] = bias.data
        column = 0
        for group in groups:
            packed = self._pack(group)
            kind = packed.panel
            if kind == "q8" and x.rows == "N":
                kind = self._head_panels
            panels = self._quantized(x, kind)
            self._add(ops.Linear(panels, kind, packed, y, column, padded, residual))
            column += packed.n_rows
        return y

    def _updates(self, experts: Sequence[Sequence[Weight]]) -> Updates | None:
        """The adapters' updates of a product, or of that of each expert; None if none of them changes it."""
        by_slot = [
            [(updates or {}).get(weight.name) for weight in weights]
            for updates in self._adapters
            for weights in experts
        ]
        if not any(update is not None for updates in by_slot for update in updates):
            return None
        packed = [[None if u is None else self._pack_update(u) for u in updates] for updates in by_slot]
        return Updates(packed, [weight.shape[0] for weight in experts[0]])

    def _update(self, x: Value, y: Value, updates: Updates, residual: Value | None = None) -> None:
        """Adds the updates of x to y, in place, and then the residual."""
        rows = y.rows
        if rows not in self._runs:
            runs = self._runs[rows] = Buffer(runs_bytes(self._max_rows(rows)))
            self._add(ExpertRuns(rows, runs) if isinstance(rows, RouteTable) else AdapterRuns(rows, runs))
        inner = self._value(rows, updates.n_parts * updates.rank_tiles * ROWS)
        self._add(AdapterDown(x, self._runs[rows], updates, inner))
        self._add(AdapterUp(inner, self._runs[rows], updates, y, residual))

    def add(self, x: Value, residual: Value) -> Value:
        return self._made(ops.Add(self._like(x), x, residual))

    def scale(self, x: Value, factor: float) -> Value:
        return self._made(ops.Scale(self._value(x.rows, x.width), x, factor))

    def split(self, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        if sum(widths) != x.width:
            raise ShapeError(f"cannot split {x.width} columns into {tuple(widths)}")
        starts = np.cumsum([0, *widths[:-1]])
        return tuple(
            Value(x.buffer, x.rows, width, x.stride, x.offset + 4 * int(start))
            for width, start in zip(widths, starts, strict=True)
        )

    def head_columns(self, x: Value, n_heads: int, start: int, stop: int) -> Value:
        y = self._value(x.rows, n_heads * (stop - start))
        part = Value(x.buffer, x.rows, y.width, x.stride, x.offset + 4 * start)
        self._add(ops.FitHeads(part, y, n_heads, x_step=x.width // n_heads))
        return y

    def join_heads(self, parts: Sequence[Value], n_heads: int) -> Value:
        y, start = self._value(parts[0].rows, sum(part.width for part in parts)), 0
        for part in parts:
            columns = Value(y.buffer, y.rows, part.width, y.stride, y.offset + 4 * start)
            self._add(ops.FitHeads(part, columns, n_heads, y_step=y.width // n_heads))
            start += part.width // n_heads
        return y

    def repeat(self, x: Value, times: int) -> Value:
        return self._made(ops.Repeat(x, self._value(x.rows, times * x.width), times))

    def head_linear(self, x: Value, heads: Experts) -> Value:
        """A product of experts, each of which gets a row of every token."""
        n_heads, n_out, n_in = heads.shape
        d_in, d_out = padded(n_in), padded(n_out)
        if x.stride != 4 * x.width or d_in != n_in:
            wide = self._value("T", n_heads * d_in)
            self._add(ops.FitHeads(x, wide, n_heads))
            x = wide
        y = self._value("T", n_heads * d_out)
        table = RouteTable.make(Routing(n_heads, n_heads, normalized=False), self._limits.max_tokens)
        self._add(expert_ops.Dispatch(None, table))
        packed = self._pack_experts((heads,))
        rows = Value(x.buffer, table, n_in, 4 * d_in, x.offset)
        panels = Buffer(table.max_slots // TOKENS * panel_bytes(packed.panel, n_in))
        self._add(expert_ops.QuantizeForExperts(rows, table, packed.panel, panels))
        out = Value(y.buffer, table, n_out, 4 * d_out, y.offset)
        self._add(expert_ops.ExpertLinear(panels, table, packed.panel, packed, out, 0, None))
        return self._fitted(y, n_heads, n_out)

    def rope(
        self, q: Value, k: Value | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Value, Value | None]:
        rows = self._rope_rows(rope)
        self._add_rope_store(ops.RopeStore(q, k, None, spec, self._kv_type, rows, stores=False))
        return q, k

    def rotate(self, x: Value, rope: RopeFrequencies, spec: AttentionSpec, batch: Any) -> Value:
        heads = replace(spec, n_heads=x.width // spec.d_head, n_kv_heads=1)
        return self.rope(x, None, rope, heads, batch)[0]

    def attention(self, q: Value, k: Value | None, v: Value | None, spec: AttentionSpec, batch: Any) -> Value:
        """Heads of an odd size are computed in larger ones, as the cache keeps them.

        Queries, keys and values from different places, or keys that are values too, are first copied.
        """
        if spec.group > MAX_TILE_ROWS and spec.n_kv_heads > 1:
            raise MissingKernelError(
                f"{spec.group} query heads for each of {spec.n_kv_heads} key heads are not supported by "
                f"the CPU backend, only up to {MAX_TILE_ROWS}, and more for a single key head"
            )
        strides = {x.stride for x in (q, k, v) if x is not None}
        if padded(spec.d_head) != spec.d_head or len(strides) > 1 or (k is v and k is not None):
            wide = replace(spec, d_head=padded(spec.d_head))
            q, k, v = self._widened_heads((q, k, v), wide)
            return self._fitted(self.attention(q, k, v, wide, batch), spec.n_heads, spec.d_head)
        if spec.reads is None or KV_TYPES[self._kv_type].is_rotated:  # so have queries to be
            self._add_rope_store(ops.RopeStore(q, k, v, spec, self._kv_type, None, stores=True))
        y = self._value("T", spec.n_heads * spec.d_head)
        if self._limits.mask_heads:
            if self._kv_type != "f16":
                raise MissingKernelError(f"masks over {self._kv_type} KV caches are not supported, only f16")
            if spec.distances is not None:
                raise MissingKernelError(
                    "masks of four dimensions are not supported with attention that is biased by distance"
                )
            self._add(ops.AttendMasked(q, y, spec))
            return y
        if spec.softcap is not None and spec.distances is not None:
            raise MissingKernelError("capped scores are not supported with biases by distance")
        for q_part, y_part, part in self._in_tiles(q, y, spec):
            partials = Buffer(self._partials_bytes(part))
            most_tokens = self._limits.max_pages * PAGE_TOKENS
            attend = ops.Attend(q_part, y_part, part, self._kv_type, partials, most_tokens)
            self._add(attend)
            self._add(ops.AttendFinish(y_part, y_part, attend.partials, part, self._kv_type))
        return y

    def _in_tiles(
        self, q: Value, y: Value, spec: AttentionSpec
    ) -> Iterator[tuple[Value, Value, AttentionSpec]]:
        """Query heads that attend together; those of a single key head in tiles, if they are too many."""
        if spec.group <= MAX_TILE_ROWS:
            yield q, y, spec
            return
        # all of about one size: small tiles keep more sums in registers
        n_tiles = -(-spec.n_heads // MAX_TILE_ROWS)
        counts = [(spec.n_heads + i) // n_tiles for i in range(n_tiles)]
        widths = [n * spec.d_head for n in counts]
        first = 0
        for q_part, y_part, n in zip(self.split(q, widths), self.split(y, widths), counts, strict=True):
            sinks, distances = (_of_heads(each, spec, first, n) for each in (spec.sinks, spec.distances))
            yield q_part, y_part, replace(spec, n_heads=n, sinks=sinks, distances=distances)
            first += n

    def route(
        self, logits: Value, routing: Routing, tap: tuple[str, int | None] | None = None
    ) -> RecordedRoutes:
        if logits.rows != "T" or logits.width != routing.n_experts:
            raise ShapeError(
                f"{routing.n_experts} experts must have as many router logits, not {logits.width}"
            )
        if routing.n_groups > MAX_GROUPS or routing.n_best > MAX_BEST:
            raise MissingKernelError(
                f"{routing.n_groups} groups of experts, judged by {routing.n_best} each, are not supported "
                f"by the CPU backend: up to {MAX_GROUPS}, judged by {MAX_BEST}, are"
            )
        weights = self._value("T", logits.width)
        self._add(expert_ops.Route(logits, weights, routing))
        if routing.scales is not None:
            shares, weights = weights, self._value("T", logits.width)
            self._add(expert_ops.ScaleWeights(shares, weights, routing.scales))
        if tap is not None and tap_name(*tap) in self._taps:
            self._add(ops.Tap(tap_name(*tap), weights, n_used=routing.n_used))
        table = RouteTable.make(routing, self._limits.max_tokens)
        self._add(expert_ops.Dispatch(weights, table))
        return RecordedRoutes(weights, table)

    def expert_linear(
        self, x: Value, routes: RecordedRoutes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Value:
        """Neighbouring experts of one type become one kernel call; updates are as in
        `linear`.
        """
        groups = _experts_by_type(experts)
        width, stored_width = _widths([each.shape[1] for each in group] for group in groups)
        y = self._value(routes.table, width, stored_width)
        padded: FloatArray | None = None
        if bias is not None:
            rows = bias.data.reshape(-1, width)
            padded = np.zeros((len(rows), stored_width), np.float32)
            padded[:, :width] = rows
        column = 0
        for group in groups:
            packed = self._pack_experts(group)
            panels = self._quantized_for_experts(x, routes, packed.panel)
            self._add(expert_ops.ExpertLinear(panels, routes.table, packed.panel, packed, y, column, padded))
            column += packed.n_rows
        updates = self._updates([*zip(*(each.weights for each in experts))])
        if updates is not None:
            self._update(x, y, updates)
        return y

    def combine(
        self,
        x: Value,
        routes: RecordedRoutes,
        residual: Value | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Value:
        is_tapped = tap is not None and tap_name(*tap) in self._taps
        y = self._value("T", x.width)
        self._add(expert_ops.Combine(x, routes.weights, routes.table, y, None if is_tapped else residual))
        if tap is not None and is_tapped:
            self._add(ops.Tap(tap_name(*tap), y, residual))
        return y

    def logit_rows(self, x: Value, batch: Any) -> Value:
        return self._made(ops.GatherRows(x, self._value("N", x.width)))

    def tap(self, name: str, layer: int | None, x: Value) -> Value:
        full_name = tap_name(name, layer)
        if full_name in self._taps:
            self._add(ops.Tap(full_name, x))
        return x

    def _add(self, op: Op) -> None:
        self.ops.append(op)
        # what was derived from a buffer is no longer that once the buffer is edited
        if edited := op.edited():
            self._panels = {key: one for key, one in self._panels.items() if key[0].buffer not in edited}

    def _made(self, op: Op) -> Value:
        """Add an op, and return its result."""
        self._add(op)
        made: Value = op.y
        return made

    def _add_rope_store(self, op: ops.RopeStore) -> None:
        strides = {value.stride for value in (op.q, op.k, op.v) if value is not None}
        if len(strides) > 1:
            raise ShapeError("q, k and v of attention must be side by side")
        self._add(op)

    def _quantized(self, x: Value, kind: PanelKind) -> Buffer:
        """The panels of x, made once for all products that read them."""
        panels = self._panels.get((x, kind))
        if panels is None:
            n_panels = -(-self._max_rows(x.rows) // TOKENS)
            panels = Buffer(n_panels * panel_bytes(kind, x.width))
            self._add(ops.Quantize(x, kind, panels))
            self._panels[x, kind] = panels
        return panels

    def _quantized_for_experts(self, x: Value, routes: RecordedRoutes, kind: PanelKind) -> Buffer:
        """The panels of x ordered by experts, made once for all products that read them."""
        panels = routes.panels.get((x, kind))
        if panels is None:
            panels = Buffer(routes.table.max_slots // TOKENS * panel_bytes(kind, x.width))
            self._add(expert_ops.QuantizeForExperts(x, routes.table, kind, panels))
            routes.panels[x, kind] = panels
        return panels

    def _widened_heads(self, qkv: Sequence[Value | None], spec: AttentionSpec) -> list[Any]:
        """q, and k and v unless they are None, as heads of the size in `spec`, side by side."""
        counts = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        widths = [0 if x is None else spec.d_head * n for x, n in zip(qkv, counts)]
        parts = self.split(self._value("T", sum(widths)), widths)
        for x, y, n in zip(qkv, parts, counts, strict=True):
            if x is not None:
                self._add(ops.FitHeads(x, y, n))
        return [None if x is None else y for x, y in zip(qkv, parts)]

    def _fitted(self, x: Value, n_heads: int, d_head: int) -> Value:
        """Return x, or a copy with heads of `d_head` columns, which are cut off or filled with zeros."""
        if x.width == n_heads * d_head:
            return x
        return self._made(ops.FitHeads(x, self._value(x.rows, n_heads * d_head), n_heads))

    def _partials_bytes(self, spec: AttentionSpec) -> int:
        return max_partials(self._limits) * ops.part_bytes(spec) * spec.n_kv_heads

    def _max_rows(self, rows: Rows) -> int:
        if isinstance(rows, RouteTable):
            return rows.max_rows
        return self._limits.max_tokens if rows == "T" else self._limits.max_logit_rows

    def _like(self, x: Value) -> Value:
        return self._value(x.rows, x.width)

    def _value(self, rows: Rows, width: int, stored_width: int = 0) -> Value:
        """A new value; kernels store `stored_width` columns of it, if that is more."""
        stride = 4 * padded(max(width, stored_width))
        return Value(Buffer(self._max_rows(rows) * stride), rows, width, stride)


def _padded_state(spec: Any) -> Any:
    """The spec of a state whose sizes are whole vectors."""
    return replace(spec, d_state=padded(spec.d_state), d_head=padded(spec.d_head))


def _by_type(weights: Sequence[Weight]) -> list[tuple[Weight, ...]]:
    """Neighbours that one kernel call can multiply: of one type, ending on whole tiles."""
    groups: list[tuple[Weight, ...]] = []
    for weight in weights:
        layout_of(weight)
        last = groups[-1][0] if groups else weight
        is_like_it = all(
            getattr(last, key) == getattr(weight, key) for key in ("type", "per_token", "as_int16")
        )
        if groups and is_like_it and sum(w.shape[0] for w in groups[-1]) % ROWS == 0:
            groups[-1] += (weight,)
        else:
            groups.append((weight,))
    return groups


def _experts_by_type(experts: Sequence[Experts]) -> list[tuple[Experts, ...]]:
    """Experts grouped by type, in the order of first use."""
    own = {each.weights[0]: each for each in experts}
    return [tuple(own[weight] for weight in group) for group in _by_type(list(own))]


def _widths(groups: Iterable[Sequence[int]]) -> tuple[int, int]:
    """(columns, columns that kernels store, of which each writes whole tiles) of results in groups."""
    sums = [sum(group) for group in groups]
    return sum(sums), sum(sums[:-1]) + padded(sums[-1])


def _of_heads(vector: Vector | None, spec: AttentionSpec, first: int, n: int) -> Vector | None:
    """The part of n heads, from `first` on, of a vector of all heads."""
    if vector is None:
        return None
    rows = vector.data.reshape(spec.n_heads, -1)[first : first + n]
    return Vector(rows.reshape(-1), vector.name)
