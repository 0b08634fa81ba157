"""Typed ops of mixtures of experts, as those of `ops.py`; their kernels are in `experts.py`."""

from __future__ import annotations

from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cpu.compile.kernel_source import float_bits
from kukri.kernels.cpu.pack.layouts import PanelKind, expert_kernel
from kukri.kernels.cpu.pack.weights import PackedWeight
from kukri.kernels.cpu.plan.ops import (
    Addresses,
    Buffer,
    Op,
    RouteTable,
    Value,
    row_count,
    whole_vectors,
)
from kukri.kernels.specs import Routing
from kukri.kernels.weight_handles import Vector


@dataclass(eq=False)
class Route(Op):
    """The weights of the experts that each token uses, by a router's logits x; 0 for the others."""

    x: Value
    y: Value
    spec: Routing
    kernel = "route"

    def record(self, at: Addresses) -> dict[str, int]:
        return {"tolerance": float_bits(self.spec.tolerance)}


@dataclass(eq=False)
class ScaleWeights(Op):
    """Each row of weights times one vector: a gate whose rows are all the same."""

    x: Value
    y: Value
    scales: Vector
    kernel = "gated_itself"

    def record(self, at: Addresses) -> dict[str, int]:
        scales = at.of_array(whole_vectors(self.scales.data))
        return {"other": scales, "other_stride": 0, "a": 0, "b": 0, "panels": 0}


@dataclass(eq=False)
class Dispatch(Op):
    """Orders the rows of a mixture by the experts whose weights are not 0; None: all of them."""

    weights: Value | None
    y: RouteTable
    kernel = "dispatch"

    def record(self, at: Addresses) -> dict[str, int]:
        table = at.of(self.y)
        return {
            "stride": 0 if self.weights is None else self.weights.stride,
            "n_experts": self.y.routing.n_experts,
            "n_used": self.y.routing.n_used,
            "table": table,
            "entries": table + self.y.entries,
            "next_slots": table + self.y.next_slots,
            "experts": table + self.y.experts,
            "slots": table + self.y.slots,
            "rows_of_slots": table + self.y.rows,
        }


@dataclass(eq=False)
class QuantizeForExperts(Op):
    """The rows of x as panels, ordered by experts."""

    x: Value
    table: RouteTable
    kind: PanelKind
    y: Buffer

    @property
    def kernel(self) -> str:
        return f"expert_panel_{self.kind}"

    def record(self, at: Addresses) -> dict[str, int]:
        table = at.of(self.table)
        is_per_token = self.x.rows == "T"
        return {
            "rows": table,
            "slots": table + self.table.slots,
            "experts": table + self.table.experts,
            "next_slots": table + self.table.next_slots,
            "repeats": self.table.routing.n_used if is_per_token else 1,
            "panels": at.of(self.y),
        }


@dataclass(eq=False)
class ExpertLinear(Op):
    """The products of panels with their experts' matrices, to columns of y from `column` on."""

    panels: Buffer
    table: RouteTable
    kind: PanelKind
    weight: PackedWeight
    y: Value
    column: int
    bias: FloatArray | None  # float32 [E, whole tiles of all columns]

    @property
    def kernel(self) -> str:
        return expert_kernel(self.weight.type_name, self.kind)

    def record(self, at: Addresses) -> dict[str, int]:
        table, start = at.of(self.table), 4 * self.column
        return {
            "entries": table + self.table.entries,
            "rows_of_slots": table + self.table.rows,
            "w": at.of_array(self.weight.tiles),
            "expert_bytes": self.weight.tiles.shape[1],
            "x": at.of(self.panels),
            "n_row_tiles": self.weight.n_row_tiles,
            "n_blocks": self.weight.n_blocks,
            "y": at.of(self.y) + start,
            "bias": 0 if self.bias is None else at.of_array(self.bias) + start,
            "bias_stride": 0 if self.bias is None else self.bias.strides[0],
        }


@dataclass(eq=False)
class Combine(Op):
    """The sum of each token's rows of x, times the weights of their experts; `residual` added."""

    x: Value
    weights: Value
    table: RouteTable
    y: Value
    residual: Value | None
    kernel = "combine"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "rows": row_count("T", at),
            "n_used": self.table.routing.n_used,
            "experts": at.of(self.table) + self.table.experts,
        }
