"""Constants of a model as handles: matrices, vectors, experts, adapters, RoPE frequencies.

A backend makes what it needs of each and keeps it by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import ShapeError
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.quant.types import QuantType


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix of `shape` (out, in): `stored` is uint8 [out, bytes per row], a view of the file.

    Row i is row `row_order[i]` of `stored`, if there is an order. `per_token` requests activations of one
    scale a token, if it is Q4_0 (`kukri.quant.per_token`). `as_int16` lets a backend multiply floats of 16
    bits as whole numbers of as many, with a scale for 64 (the CPU does, twice as fast).
    """

    stored: ByteArray
    type: QuantType
    shape: tuple[int, int]
    name: str = ""
    per_token: bool = False
    row_order: npt.NDArray[np.int64] | None = None
    as_int16: bool = False

    def __post_init__(self) -> None:
        """Raises ShapeError unless `stored` and `row_order` hold exactly what `shape` and `type` imply."""
        expected, stored = (self.shape[0], self.type.row_bytes(self.shape[1])), self.stored
        if stored.dtype != np.uint8 or stored.shape != expected or self.shape[1] % self.type.block_size:
            raise ShapeError(
                f"weight {self.name!r}: {self.type.name} {self.shape} does not fit bytes {stored.shape}"
            )
        order = self.row_order
        if order is not None and not np.array_equal(np.sort(order), np.arange(self.shape[0])):
            raise ShapeError(f"weight {self.name!r}: its order must have each of {self.shape[0]} rows once")

    @property
    def data(self) -> ByteArray:
        """The rows in order, uint8 [out, bytes per row]: a view, or a copy if they are stored in another."""
        return self.stored if self.row_order is None else self.stored[self.row_order]


@dataclass(frozen=True, eq=False)
class Vector:
    """A float32 vector [n] of a model's constants: the weight of a norm, a bias. Hashed by identity."""

    data: FloatArray
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ShapeError unless `data` is float32 with one dimension."""
        if self.data.ndim != 1 or self.data.dtype != np.float32:
            raise ShapeError(f"{self.name!r} must be float32 [n], not {self.data.dtype} {self.data.shape}")

    def __len__(self) -> int:
        """n."""
        return len(self.data)


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter's update of a matrix (out, in): x Wᵀ becomes x Wᵀ + scale * (x Aᵀ) Bᵀ (Hu et al. 2021).

    `down` is A (rank, in) and `up` is B (out, rank), of types without blocks. Hashed by identity.
    """

    down: Weight
    up: Weight
    scale: float

    def __post_init__(self) -> None:
        """Raises ShapeError unless the ranks of both agree and their numbers are not in blocks."""
        if self.down.shape[0] != self.up.shape[1] or max(w.type.block_size for w in (self.down, self.up)) > 1:
            raise ShapeError(
                f"update {self.up.name!r}: {self.down.type.name} {self.down.shape} and {self.up.type.name} "
                f"{self.up.shape} must belong together"
            )

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.down.shape[0]


# The adapters of a program by slot: updates by the names of the matrices they change; None: no adapter.
AdapterSlots = Sequence[Mapping[str, LowRank] | None]


@dataclass(frozen=True, eq=False)
class Experts:
    """A matrix (out, in) for each expert of a mixture, all of one type: `weights`, views of the file.

    A file may hold them as one tensor or one by one. Hashed by identity.
    """

    weights: tuple[Weight, ...]
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ShapeError unless there are matrices, of one shape and type."""
        if len({(w.shape, w.type, w.per_token) for w in self.weights}) != 1:
            raise ShapeError(f"experts {self.name!r} must be of one shape and type")

    @property
    def type(self) -> QuantType:
        """The weight type."""
        return self.weights[0].type

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out, in)."""
        return (len(self.weights), *self.weights[0].shape)


@dataclass(frozen=True)
class RopeFrequencies:
    """The angles of a rotary embedding: position times frequency, for positions below `max_context`.

    `inverse`: radians per token of each pair of dimensions, rotary_dim / 2 of them. `scale` multiplies cos
    and sin (the attention factor of YaRN), and so does, with a `growth` (beta, tokens),
    1 + beta * log(1 + position // tokens). Equal ones may share what a backend makes of them.

    With `axes` a token may have several positions (`ForwardBatch.rope_positions`): each pair of dimensions
    turns by that of its axis.
    """

    inverse: tuple[float, ...]
    max_context: int
    scale: float = 1.0
    growth: tuple[float, int] | None = None
    axes: tuple[int, ...] = ()  # by which each pair turns

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return 2 * len(self.inverse)
