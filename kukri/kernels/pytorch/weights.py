"""Weights as tensors: a file's blocks are copied to the device, and dequantized once or at each use.

The arithmetic is the same as in `kukri.quant.blocks`, float32 and bit-identical, by the facts of each type.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.errors import MissingKernelError
from kukri.host.mapped_files import release_pages
from kukri.kernels.weight_handles import Weight
from kukri.quant.blocks import SIGN_CODES
from kukri.quant.types import QUANT_TYPES, RUN
from kukri.quant.types.schema import Block, Codebook, Numbers, Placement, n_numbers

_CHUNK_WEIGHTS = 1 << 23  # dequantized at a time: 32 MB of float32
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A matrix of `shape` (out, in) on a device: rows of floats in `dtype`, or of blocks as uint8."""

    shape: tuple[int, int]
    dtype: torch.dtype  # the type of dequantized rows
    data: Tensor  # [out, in], or [out, bytes of a row]
    packed_type: str | None  # the weight type of `data`; None: floats

    def rows(self, which: slice | Tensor) -> Tensor:
        """Dequantized rows [n, in]."""
        data = self.data[which]
        return data if self.packed_type is None else dequantize(data, self.packed_type).to(self.dtype)

    def chunks(self) -> Iterator[Tensor]:
        """All rows, in pieces [n, in] whose temporary memory is bounded."""
        step = self.shape[0] if self.packed_type is None else max(1, _CHUNK_WEIGHTS // self.shape[1])
        return (self.rows(slice(start, start + step)) for start in range(0, self.shape[0], step))

    def unpacked(self) -> DeviceMatrix:
        """The matrix dequantized."""
        if self.packed_type is None:
            return self
        data = torch.empty(self.shape, dtype=self.dtype, device=self.data.device)
        start = 0
        for chunk in self.chunks():
            data[start : start + len(chunk)] = chunk
            start += len(chunk)
        return DeviceMatrix(self.shape, self.dtype, data, None)


def to_device(weight: Weight, device: torch.device, dtype: torch.dtype) -> DeviceMatrix:
    """Copies a matrix to a device; on the CPU it stays where it is. Float types are converted to `dtype`.

    Raises MissingKernelError for a weight type that no op reads.
    """
    name = weight.type.name
    if weight.type.block is not None:
        data, packed_type = tensor_of(weight.data).to(device), name
    elif name in FLOATS:
        data = _aligned(tensor_of(weight.data)).to(device).view(FLOATS[name]).to(dtype)
        packed_type = None
    else:
        raise MissingKernelError(f"{name} weights are not supported by backend torch: use {', '.join(TYPES)}")
    if device.type != "cpu":
        release_pages(weight.stored)
    return DeviceMatrix(weight.shape, dtype, data, packed_type)


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over a contiguous array's memory, which may be read-only: it must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """uint8 [rows, bytes of a row] of a quantized type -> float32 [rows, columns]."""
    type = QUANT_TYPES[type_name]
    return _weights(data.reshape(-1, type.block_bytes), type.layout).reshape(len(data), -1)


def _aligned(data: Tensor) -> Tensor:
    """The bytes where floats may begin: tensors of a mapped file begin anywhere."""
    return data if data.data_ptr() % 4 == 0 else data.clone()


def _weights(blocks: Tensor, block: Block) -> Tensor:
    """uint8 [n, block_bytes] -> float32 [n, block_size]."""
    quants = quants_of(blocks, block)
    level = (
        quants.float() - block.offset
        if block.values is None
        else _table(block, 0, blocks.device)[quants.int()]
    )
    found = numbers_of(blocks, block, block.scale)
    scale = (
        float_of_half(found) if block.scale_values is None else _table(block, 1, blocks.device)[found.int()]
    )
    if block.factor != 1:
        scale = scale * block.factor
    if block.scales:
        scale = scale * (numbers_of(blocks, block, block.scales).float() * block.times + block.plus)
    groups = level.reshape(*scale.shape, -1) * scale[..., None]
    if block.minimum:
        low = float_of_half(numbers_of(blocks, block, block.minimum))
        if not block.minimums:
            return groups + low[..., None]
        return groups - (low * numbers_of(blocks, block, block.minimums))[..., None]
    return groups


def quants_of(blocks: Tensor, block: Block) -> Tensor:
    """uint8 [n, block_bytes] -> the quants [n, block_size]."""
    found, book = numbers_of(blocks, block, block.quant_numbers), block.quants
    if not isinstance(book, Codebook):
        return found
    quants = _table(block, 2, blocks.device)[found.int()]
    signs = numbers_of(blocks, block, book.signs)
    if book.has_codes:
        signs = _numbers_of_units(_table(block, 3, blocks.device)[signs.int()], 1, 0, 1, 8, 1)
    by_sign = quants.reshape(*signs.shape, -1)
    return (by_sign | (signs.to(torch.uint8) * book.sign)[..., None]).reshape(len(blocks), -1)


@cache
def _table(block: Block, which: int, device: torch.device) -> Tensor:
    """A table of a type: 0 values, 1 scales, 2 quants, 3 signs. Kept: a graph may not copy from the host."""
    if which == 0:
        return torch.tensor(block.values, dtype=torch.float32, device=device)
    if which == 1:
        assert block.scale_values is not None
        return torch.from_numpy(block.scale_values).to(device)
    if which == 2:
        assert isinstance(block.quants, Codebook)
        return torch.from_numpy(block.quants.grid).to(device)
    return torch.from_numpy(SIGN_CODES).to(device)


def float_of_half(bits: Tensor) -> Tensor:
    """float16 numbers by their bits, as float32."""
    return bits.to(torch.int16).view(torch.float16).float()


def numbers_of(blocks: Tensor, block: Block, which: Numbers) -> Tensor:
    """uint8 [n, block_bytes] -> whole numbers [n, numbers]."""
    places = block.places(which)
    if len(places) == 1:
        return _placed_numbers(blocks, places[0])
    n = n_numbers(places)
    made = torch.zeros((len(blocks), n), dtype=torch.int32, device=blocks.device)
    for place in places:
        found = _placed_numbers(blocks, place)
        made[:, place.first : place.first + place.n] |= found.int() << place.left if place.left else found
    return made


def _placed_numbers(blocks: Tensor, place: Placement) -> Tensor:
    n, width, count = len(blocks), place.inner * place.unit, place.n_units // place.inner
    # fields of structs in a row have a step between them
    data = blocks[:, place.at : place.at + (count - 1) * place.stride + width].unfold(
        1, width, max(place.stride, 1)
    )
    units = data.contiguous().reshape(n, -1).view(_UNITS[place.unit])
    if place.is_signed:
        return units.view(torch.int8)
    if place.mask == 0:
        powers = (3 ** torch.arange(len(place.shifts), device=blocks.device))[:, None]
        return ((units.reshape(n, -1, 1, place.run) * powers & 255) * 3 >> 8).reshape(n, -1)
    if place.mask == (1 << 8 * place.unit) - 1:
        return units
    step = place.shifts[1] - place.shifts[0] if len(place.shifts) > 1 else 1
    return _numbers_of_units(units, place.run, place.shifts[0], step, len(place.shifts), place.mask)


def _numbers_of_units(units: Tensor, run: int, start: int, step: int, n: int, mask: int) -> Tensor:
    """Numbers under a mask at bits start, start + step, … of units [n, units]: see `schema.Bits`."""
    if units.dtype == torch.int16:
        units = units.int()
    shifts = torch.arange(start, start + step * n, step, dtype=units.dtype, device=units.device)[:, None]
    return ((units.reshape(len(units), -1, 1, run) >> shifts) & mask).reshape(len(units), -1)


_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
TYPES = RUN
