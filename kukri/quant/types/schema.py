"""What a weight type is made of: a struct, as GGML's, and where in it the numbers are that make a weight.

A weight of a type in blocks is

    w = d * factor * step(s) * level(q)              of symmetric types and of those with a table
    w = d * factor * step(s) * level(q) + m          with a minimum for the block (`minimum`), or
    w = d * factor * step(s) * level(q) - m * t      with a multiple of it for each group (`minimums`)

where d and m are float16 numbers of the block, s and t whole numbers of a group of weights, q the weight's
quant, level(q) an entry of a table or q - offset, and step(s) = times * s + plus. A type states these facts
once, in a file of its own. From them follow decoding in NumPy (`blocks.py`), PyTorch and compiled code, how
weights are packed into tiles, and where quantizers put their results.

To read a type is to state it: docs/adding-a-part.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass, field


@dataclass(frozen=True)
class Bits:
    """Numbers of `n_bits` that share the units (bytes, or longer integers) of a field of the struct.

    A unit has `n` of them (as many as fit), at bit `start` and each `step` (n_bits) further. Of each `run`
    units come first the numbers at `start`, then those at start + step, … Several Bits may make numbers
    together: the bits of these go to bit `left`, and the first of them belongs to number `first`.
    Signed fields hold numbers of two's complement.
    """

    field: str  # a.b for a field b of the structs in a field a, a.2 for the third unit of a
    n_bits: int
    run: int = 1
    start: int = 0
    step: int = 0
    n: int = 0
    left: int = 0
    first: int = 0


@dataclass(frozen=True)
class Trits:
    """Digits of base 3, `n` to a byte: the byte is their fraction of 256, rounded up. `run` is as in Bits."""

    field: str
    n: int
    run: int
    first: int = 0


Numbers = tuple[Bits | Trits, ...]


@dataclass(frozen=True, eq=False)
class Codebook:
    """Quants that lie in groups in a table, which `unpack` makes: the groups that the numbers `index` choose.

    `signs` are bits for `sign_weights` weights each; if they are codes, of 7 bits for 8 weights whose eighth
    bit makes their number even. One that is set adds `sign` to the quant.
    """

    unpack: Callable[[], npt.NDArray[np.uint8]]
    index: Numbers
    signs: Numbers
    sign_weights: int
    sign: int
    has_codes: bool = False

    @cached_property
    def grid(self) -> npt.NDArray[np.uint8]:
        """The table, uint8 [entries, quants]."""
        return self.unpack()


@dataclass(frozen=True)
class Placement:
    """Where Bits or Trits lie: unit j of a block is at byte `at + j // inner * stride + j % inner * unit`."""

    at: int
    stride: int
    inner: int
    unit: int  # bytes
    n_units: int
    run: int
    shifts: tuple[int, ...]  # for Trits: the digits
    mask: int  # 0: Trits
    left: int
    first: int
    is_signed: bool

    @property
    def n(self) -> int:
        """How many numbers these are."""
        return self.n_units * len(self.shifts)


@dataclass(frozen=True, eq=False)
class TileWords:
    """Where the words of the CPU's tiles have the numbers of a block (kernels/cpu/pack/word_moves.py)."""

    struct: np.dtype[Any]  # has as many bytes as the words
    quants: Numbers
    scales: Numbers = ()
    minimums: Numbers = ()


@dataclass(frozen=True, eq=False)
class Block:
    """The facts of one block. Byte order is little-endian."""

    struct: np.dtype[Any]
    quants: Numbers | Codebook
    values: tuple[int, ...] | None = None  # the values of quants; None: q - offset
    offset: int = 0
    factor: float = 1.0  # a power of two
    scale: Numbers = (Bits("d", 16),)  # d, of the block or of each group: bits of a float16, or numbers of
    scale_values: npt.NDArray[np.float32] | None = None  # the values of scales
    scales: Numbers = ()
    times: int = 1
    plus: int = 0
    minimum: Numbers = ()
    minimums: Numbers = ()
    tile: TileWords | None = None  # where the CPU's tiles have these numbers; None: where the file has them
    is_slow_to_unpack: bool = False  # so the CPU would rather load inputs twice than unpack weights twice
    tiles: QuantType | None = None

    def places(self, numbers: Numbers) -> tuple[Placement, ...]:
        """Where numbers lie."""
        return places_in(self.struct, numbers)

    @cached_property
    def quant_numbers(self) -> Numbers:
        """The quants, or what chooses them."""
        return self.quants.index if isinstance(self.quants, Codebook) else self.quants

    @cached_property
    def halves(self) -> tuple[int, ...]:
        """Bytes at which the float16 scales and minimums of a block begin."""
        fields = [self.struct.fields[name] for name in ("d", "m") if name in (self.struct.names or ())]  # type: ignore[index]
        return tuple(
            at + 2 * i
            for kind, at, *_ in fields
            for i in range(prod(kind.shape))
            if kind.base == np.dtype("<f2")
        )


def places_in(struct: np.dtype[Any], numbers: Numbers) -> tuple[Placement, ...]:
    """Where numbers lie in a struct."""
    return tuple(_place(struct, part) for part in numbers)


def n_numbers(places: Sequence[Placement]) -> int:
    """How many numbers these make together."""
    return max((place.first + place.n for place in places), default=0)


def _place(struct: np.dtype[Any], part: Bits | Trits) -> Placement:
    outer, _, name = part.field.partition(".")
    kind, at, *_ = struct.fields[outer]  # type: ignore[index]
    count, stride = prod(kind.shape), kind.base.itemsize
    if name.isdigit():
        kind = kind.base
        count, stride, at = 1, kind.itemsize, at + int(name) * kind.itemsize
    elif name:
        kind, offset, *_ = kind.base.fields[name]  # type: ignore[index]
        at += offset
    else:
        count, stride = 1, kind.itemsize
    inner, unit = prod(kind.shape), kind.base.itemsize
    if isinstance(part, Trits):
        shifts, mask, left = tuple(range(part.n)), 0, 0
    else:
        step = part.step or part.n_bits
        n = part.n or (8 * unit - part.start) // step
        shifts, mask, left = (
            tuple(part.start + step * k for k in range(n)),
            (1 << part.n_bits) - 1,
            part.left,
        )
    n, is_signed = count * inner, kind.base.kind == "i"
    return Placement(at, stride, inner, unit, n, part.run, shifts, mask, left, part.first, is_signed)


@dataclass(frozen=True)
class QuantType:
    """One weight type: `block_size` weights are stored together in `block_bytes` bytes.

    `block` is None for types that kukri does not run, and for floats.
    """

    name: str
    ggml_id: int  # GGML's number; -1: in no file
    block_size: int
    block_bytes: int
    block: Block | None = field(default=None, compare=False, repr=False)
    file_type: int | None = None  # GGUF's number for a file of mostly this type (llama.h's llama_ftype)
    stand_in: str = ""  # the type in its place where a row is not whole blocks (llama.cpp, llama-quant.cpp)
    embedding: str = ""  # the type of the token embedding in such a file, if it is another

    def __post_init__(self) -> None:
        """Asserts that the struct has as many bytes."""
        assert self.block is None or self.block.struct.itemsize == self.block_bytes, self.name

    def row_bytes(self, n_columns: int) -> int:
        """Bytes of a row of `n_columns` weights, which must be a multiple of `block_size`."""
        return n_columns // self.block_size * self.block_bytes

    @property
    def layout(self) -> Block:
        """The facts of a block, of a type that has them."""
        assert self.block is not None, self.name
        return self.block

    @property
    def tiles(self) -> QuantType:
        """The type, or the form in which the CPU packs it."""
        return self if self.block is None or self.block.tiles is None else self.block.tiles

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size


def struct_of(*fields: Any) -> np.dtype[Any]:
    """A struct without padding: (name, type) or (name, type, how many)."""
    return np.dtype(list(fields))
