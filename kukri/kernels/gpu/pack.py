"""Weights for the Triton kernels: a file's blocks as planes of 32-bit words, packed on the device once when a
model is loaded.

Blocks of 18, 22, 34 or 210 bytes cannot be read by aligned 128-bit loads, so quants and scales become planes.
Their order, and the constants that kernels are compiled for, follow from the facts of a type (`Form`). The
unit is a pair: two consecutive blocks of 32 weights, c = 0 and 1. An odd last block gets a partner of zeros.

`quants`, int32 words [rows, n_pairs, 0, 4, 8 or 16], the low bits:
  4 bits: byte k of a pair has weight k of both blocks, block 0 in the low nibble. If they choose from 16
  levels, word w has weights 4w … 4w + 3 of block 0 in its low 4 nibbles, of block 1 in its high ones.
  8 bits: 16 words, block 0 then block 1.
  2 bits: 4 words, byte k has weights k and k + 16 of block 0 and of block 1, from the lowest bits.
`high`, the bits above those: of 1 bit [rows, n_pairs, 2], a word a block, weight k in bit (k div 4 + 4) mod
  8 of byte k mod 4; of 2 bits [rows, n_pairs, 4], a word for 16 weights, weight k in the 2 bits from
  (2 (k div 4) + 4) mod 8 of byte k mod 4. So one shift brings bits to where a mask finds them next to the
  low 4. Of types with 16 levels: these, 4 words.
`scales`, words [rows, …]:
  without steps a word a pair, d of both blocks (or a word for the pairs of a larger block, d twice); with
  minimums two words, d and m of each block; with scales of 16 weights two, d of each half. Scales that are
  powers of two: a word for two pairs, the four exponents.
  with steps, for each 256 weights: of 32 weights two words, as in IQ4_XS with 32 added, or four with
  minimums, as in Q4_K; of 16 weights five, 16 int8 and d as float32, or with minimums the nibbles of both,
  and d and m.

Planes have as many bytes as the file, but for Q6_K (212 bytes instead of 210), Q3_K (116 instead of 110),
types that choose quants from tables, d of more than 32 weights, and padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, reduce
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.kernels.pytorch.weights import float_of_half, numbers_of, quants_of, tensor_of
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import PACKED
from kukri.quant.types.fp4 import POWERS
from kukri.quant.types.schema import Bits, Block, Codebook, QuantType, n_numbers

PACKED_TYPES = tuple(type.name for type in PACKED)
PAIR = 64  # weights of two blocks
_PIECE_WEIGHTS = 1 << 20  # repacked at a time
_PARTS = {1: (0, 1), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}  # low and high bits


@dataclass(frozen=True)
class Form:
    """The facts of a weight type that kernels are compiled for, and that decide the order of its planes."""

    low: int  # bits of a quant in `quants`
    high: int  # bits of it in `high`
    left: int  # how far kernels move those to the left
    n_levels: int  # entries of the table that quants choose from, 8 or 16; 0: a weight is quant - offset
    levels: tuple[int, int]  # a table of 8, in two words
    offset: int
    group: int  # weights that share a step, or a scale: 16 or 32 (which stands for more)
    pairs: int  # pairs that share a word of scales
    has_steps: bool
    has_minimum: bool
    has_powers: bool
    factor: float


@cache
def form_of(type: QuantType) -> Form:
    """The form in which kernels read a type in blocks."""
    block = type.layout
    n_scales, n_steps = (n_numbers(block.places(which)) for which in (block.scale, block.scales))
    n_bits, values, offset = _quant_bits(block), block.values or (), block.offset
    low, high = _PARTS[n_bits]
    left = low
    if n_bits == 1 and values:  # -1 and 1: twice the bit, less 1
        left, offset, values = (values[1] - values[0]).bit_length() - 1, -values[0], ()
    first, last = np.array(values, np.int8).view(np.int32).tolist() if len(values) == 8 else (0, 0)
    return Form(
        *(low, high, left, len(values), (first, last), offset),
        group=min(type.block_size // max(n_scales, n_steps), 32),
        pairs=max(type.block_size // n_scales // PAIR, 1),
        has_steps=n_steps > 0,
        has_minimum=bool(block.minimum),
        has_powers=block.scale_values is POWERS,
        factor=block.factor,
    )


def _quant_bits(block: Block) -> int:
    if isinstance(block.quants, Codebook):
        return (2 * block.quants.sign - 1).bit_length()
    return max(part.left + part.n_bits if isinstance(part, Bits) else 2 for part in block.quants)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A packed matrix, or rows of one, on a device. `high` is empty for types that need none."""

    form: Form
    n_rows: int
    n_columns: int
    quants: Tensor
    high: Tensor
    scales: Tensor

    @property
    def n_pairs(self) -> int:
        """Pairs of blocks in a row, padding included."""
        return self.quants.shape[1]

    @property
    def planes(self) -> tuple[Tensor, Tensor, Tensor]:
        """All planes."""
        return self.quants, self.high, self.scales


def pack(weight: Weight, device: torch.device | str = "cpu") -> Iterator[Matrix]:
    """Some rows of a quantized matrix at a time, packed: the host and the device hold few rows besides these.

    Raises UnsupportedError for types that the kernels do not read.
    """
    type, (n_rows, n_columns) = weight.type, weight.shape
    if type.block is None:
        raise UnsupportedError(
            f"the weight type {type.name} is not supported by the gpu backend: use {', '.join(PACKED_TYPES)}"
        )
    form, data = form_of(type), weight.data
    step = max(1, _PIECE_WEIGHTS // n_columns)
    for start in range(0, n_rows, step):
        rows = tensor_of(np.ascontiguousarray(data[start : start + step])).to(device)
        if n_columns % PAIR:
            rows = F.pad(rows, (0, type.block_bytes))
        blocks, n = rows.reshape(-1, type.block_bytes), len(rows)
        quants, high = _quant_planes(quants_of(blocks, type.layout).to(torch.uint8).reshape(n, -1), form)
        if form.n_levels == 16:
            high = torch.tensor(type.layout.values, dtype=torch.int8, device=device).view(torch.int32)
        yield Matrix(form, n, n_columns, quants, high, _scale_plane(blocks, type, form, n))


def _quant_planes(quants: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """`quants` and `high` of uint8 [rows, columns]."""
    n_rows = len(quants)
    if form.low == 8:
        low = quants
    elif form.n_levels == 16:  # word, block, byte, place in it
        parts = quants.reshape(n_rows, -1, 2, 8, 2, 2).transpose(2, 3)
        low = parts[..., 0] | parts[..., 1] << 4
    elif form.low:
        n_parts = 8 // form.low
        parts = (quants & (1 << form.low) - 1).reshape(n_rows, -1, n_parts, PAIR // n_parts)
        low = _joined(parts, [form.low * i for i in range(n_parts)])
    else:
        low = quants[:, :0]
    high = quants[:, :0]
    if form.high:
        per_byte = 8 // form.high
        parts = (quants >> form.low).reshape(n_rows, -1, per_byte, 4)
        high = _joined(parts, [(form.high * i + 4) % 8 for i in range(per_byte)])
    n_pairs = quants.shape[1] // PAIR
    return _words(low, n_rows, n_pairs), _words(high, n_rows, n_pairs)


def _joined(parts: Tensor, shifts: list[int]) -> Tensor:
    """uint8 […, parts, n] -> […, n], each part moved left."""
    moved = (part << left for part, left in zip(parts.unbind(-2), shifts, strict=True))
    return reduce(torch.bitwise_or, moved)


def _words(data: Tensor, *shape: int) -> Tensor:
    """Numbers as int32 words [*shape, …]."""
    return data.contiguous().reshape(-1).view(torch.int32).reshape(*shape, data.nbytes // (4 * prod(shape)))


def _scale_plane(blocks: Tensor, type: QuantType, form: Form, n_rows: int) -> Tensor:
    """`scales` of blocks uint8 [n, block_bytes]."""
    block = type.layout
    found = numbers_of(blocks, block, block.scale)
    if form.has_powers:
        exponents = found.reshape(n_rows, -1)
        return _words(F.pad(exponents, (0, -exponents.shape[1] % 4)), n_rows)
    table = block.scale_values
    d = float_of_half(found) if table is None else torch.from_numpy(table).to(blocks.device)[found.int()]
    halves = d.half()
    if form.has_minimum:
        m = float_of_half(numbers_of(blocks, block, block.minimum)).half()
        halves = torch.cat([halves, m], 1)
    if not form.has_steps:
        has_one_for_pairs = type.block_size > 32 and halves.shape[1] == 1
        return _words(halves.repeat_interleave(2, 1) if has_one_for_pairs else halves, n_rows)
    steps = numbers_of(blocks, block, block.scales).int() * block.times + block.plus
    minimums = numbers_of(blocks, block, block.minimums).int() if form.has_minimum else steps
    if form.group == 16 and form.has_minimum:
        parts = [steps | minimums << 4, halves]
    elif form.group == 16:
        parts = [steps, d * block.factor]
    elif form.has_minimum:
        tops = [x[:, :4] | x[:, 4:] >> 4 << 6 for x in (steps, minimums)]
        parts = [halves, *tops, steps[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4]
    else:
        steps = steps + 32
        fours = (steps >> 4).reshape(-1, 2, 4).transpose(1, 2)
        parts = [halves, _joined(fours, [0, 2, 4, 6]), steps[:, ::2] & 15 | steps[:, 1::2] << 4]
    data = [part.to(torch.uint8) if part.dtype == torch.int32 else part.view(torch.uint8) for part in parts]
    return _words(torch.cat(data, 1), n_rows)
