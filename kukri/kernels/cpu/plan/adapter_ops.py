"""Typed ops of adapters, as those of `ops.py`; their kernels are in `adapters.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.kernels.cpu.pack.layouts import ROWS
from kukri.kernels.cpu.pack.weights import PackedWeight
from kukri.kernels.cpu.plan.ops import Addresses, Buffer, Op, RouteTable, Value, row_count
from kukri.kernels.cpu.run.abi import LOGIT_ROWS, RUN_BYTES, RUNS_HEADER_BYTES, UPDATE_TYPES
from kukri.kernels.cpu.run.memory import address_of


@dataclass(frozen=True, eq=False)
class PackedLowRank:
    """An update whose A and B are weight tiles."""

    rank: int
    scale: float
    down: PackedWeight
    up: PackedWeight

    @property
    def record(self) -> tuple[int, ...]:
        """The numbers of abi.py's UPDATE_*."""
        types = (UPDATE_TYPES.index(packed.type_name) for packed in (self.down, self.up))
        addresses = address_of(self.down.tiles), address_of(self.up.tiles)
        return (*addresses, self.rank, int(np.float64(self.scale).view(np.int64)), *types)


_NO_UPDATE = (0,) * 6


class Updates:
    """The updates of one product of matrices side by side: for each slot, an update of each matrix or None.

    A mixture's updates are by slot and expert: number slot * experts + expert. Attributes: n_parts, of
    matrices; rank_tiles, of the largest rank; records and parts as in abi.py.
    """

    def __init__(self, by_slot: Sequence[Sequence[PackedLowRank | None]], n_outs: Sequence[int]) -> None:
        flat = [update for updates in by_slot for update in updates]
        self._keep = flat  # the records point into them
        self.n_parts = len(n_outs)
        self.rank_tiles = max(-(-update.rank // ROWS) for update in flat if update is not None)
        self.records: npt.NDArray[np.int64] = np.array(
            [_NO_UPDATE if update is None else update.record for update in flat], np.int64
        )
        starts = np.cumsum([0, *n_outs[:-1]])
        self.parts: npt.NDArray[np.int64] = np.stack([starts, n_outs], axis=1).astype(np.int64)


def runs_bytes(max_rows: int) -> int:
    """Return the bytes for the runs of `max_rows` rows: at worst each row is a run."""
    return RUNS_HEADER_BYTES + max_rows * RUN_BYTES


@dataclass(eq=False)
class AdapterRuns(Op):
    """Finds runs of rows with one adapter."""

    rows: Literal["T", "N"]
    y: Buffer
    kernel = "adapter_runs"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "rows": row_count(self.rows, at),
            "indices": 0 if self.rows == "T" else at.batch + LOGIT_ROWS,
            "runs": at.of(self.y),
        }


@dataclass(eq=False)
class ExpertRuns(Op):
    """The same of a mixture: runs of rows with one adapter and one expert."""

    table: RouteTable
    y: Buffer
    kernel = "expert_runs"

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "n_experts": self.table.routing.n_experts,
            "n_used": self.table.routing.n_used,
            "experts": at.of(self.table) + self.table.experts,
            "runs": at.of(self.y),
        }


@dataclass(eq=False)
class AdapterDown(Op):
    """scale * (x Aᵀ), the parts side by side."""

    x: Value
    runs: Buffer
    updates: Updates
    y: Value
    kernel = "adapter_down"

    def record(self, at: Addresses) -> dict[str, int]:
        rows = self.y.rows
        return {
            "updates": at.of_array(self.updates.records),
            "n_parts": self.updates.n_parts,
            "rank_tiles": self.updates.rank_tiles,
            "repeats": rows.routing.n_used if isinstance(rows, RouteTable) and self.x.rows == "T" else 1,
            "n_inputs": self.x.width,
        }


@dataclass(eq=False)
class AdapterUp(Op):
    """Adds to the columns of `target` `inner`, the result of `AdapterDown`, times B, then `residual`."""

    inner: Value
    runs: Buffer
    updates: Updates
    target: Value
    residual: Value | None
    kernel = "adapter_up"
    in_place = ("target",)

    def record(self, at: Addresses) -> dict[str, int]:
        return {
            "updates": at.of_array(self.updates.records),
            "n_parts": self.updates.n_parts,
            "rank_tiles": self.updates.rank_tiles,
            "parts": at.of_array(self.updates.parts),
            "x": at.of(self.inner),
            "x_stride": self.inner.stride,
            "y": at.of(self.target),
            "y_stride": self.target.stride,
        }
