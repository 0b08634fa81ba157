"""Weights as tensors: a file's blocks are copied to the device, and dequantized once or at each use.

The arithmetic is that of `kukri.quant.blocks`, float32 and bit-identical; block layouts are drawn there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from kukri.errors import MissingKernelError
from kukri.host.mapped_files import release_pages
from kukri.kernels.constants import Weight
from kukri.quant.blocks import IQ4_VALUES, MXFP4_VALUES

_CHUNK_WEIGHTS = 1 << 23  # dequantized at a time: 32 MB of float32
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A matrix of `shape` (out, in) on a device: rows of floats in `dtype`, or of blocks as uint8."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of dequantized rows
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
    if name in _BLOCKS:
        data, packed_type = tensor_of(weight.data).to(device), name
    elif name in _FLOATS:
        data = _aligned(tensor_of(weight.data)).to(device).view(_FLOATS[name]).to(dtype)
        packed_type = None
    else:
        raise MissingKernelError(f"the torch backend does not read {name}: it reads {', '.join(TYPES)}")
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
    block_bytes, convert = _BLOCKS[type_name]
    blocks = data.reshape(-1, block_bytes)
    return convert(blocks).reshape(len(data), -1)


def _aligned(data: Tensor) -> Tensor:
    """The bytes where floats may begin: tensors of a mapped file begin anywhere."""
    return data if data.data_ptr() % 4 == 0 else data.clone()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block -> float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bit_fields(packed: Tensor, n_bits: int, run: int) -> Tensor:
    """uint8 [n, bytes] -> uint8 [n, bytes * 8 / n_bits], the lowest field of `run` bytes first."""
    shifts = torch.arange(0, 8, n_bits, dtype=torch.uint8, device=packed.device)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts[:, None]
    return (fields & ((1 << n_bits) - 1)).reshape(len(packed), -1)


def _five_bits(low: Tensor, high: Tensor, run: int, high_run: int) -> Tensor:
    """Quants of 5 bits, low nibbles and top bits apart -> float32 [n, weights]."""
    return (_bit_fields(low, 4, run) | _bit_fields(high, 1, high_run) << 4).float()


def _grouped(quants: Tensor, scales: Tensor) -> Tensor:
    """quants [n, 256] times a scale for each group [n, groups] -> [n, groups, 256 / groups]."""
    return quants.reshape(*scales.shape, -1) * scales[..., None]


def _scale_and_shift(quants: Tensor, blocks: Tensor) -> Tensor:
    """d s[g] q - m t[g], with the first 16 bytes of a block of Q4_K or Q5_K."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], 1)
    return _grouped(quants, _half(blocks, 0) * scales) - (_half(blocks, 2) * minimums)[..., None]


def _q4_0(blocks: Tensor) -> Tensor:
    return (_bit_fields(blocks[:, 2:], 4, 16).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _bit_fields(blocks[:, 4:], 4, 16).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return (_five_bits(blocks[:, 6:], blocks[:, 2:6], 16, 1) - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[:, 8:], blocks[:, 4:8], 16, 1) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    small = 0x00200000 * (1 + exponents.clamp(max=1))  # below the least normal float32
    scales = torch.where(exponents < 2, small, (exponents - 1) << 23).view(torch.float32)
    return _looked_up("MXFP4", blocks[:, 1:]) * scales


def _q2_k(blocks: Tensor) -> Tensor:
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    quants = _bit_fields(blocks[:, 16:80], 2, 32).float()
    return _grouped(quants, _half(blocks, 80) * scales) - (_half(blocks, 82) * minimums)[..., None]


def _q3_k(blocks: Tensor) -> Tensor:
    top_bits = _bit_fields(blocks[:, :32], 1, 32)
    quants = (_bit_fields(blocks[:, 32:96], 2, 32) | top_bits << 2).float() - 4
    scales = _bit_fields(blocks[:, 96:104], 4, 8) | _bit_fields(blocks[:, 104:108], 2, 4) << 4
    return _grouped(quants, _half(blocks, 108) * (scales.float() - 32))


def _q4_k(blocks: Tensor) -> Tensor:
    return _scale_and_shift(_bit_fields(blocks[:, 16:], 4, 32).float(), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    return _scale_and_shift(_five_bits(blocks[:, 48:], blocks[:, 16:48], 32, 32), blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    top_bits = _bit_fields(blocks[:, 128:192], 2, 32)
    quants = (_bit_fields(blocks[:, :128], 4, 64) | top_bits << 4).float() - 32
    return _grouped(quants, _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8))


_TABLES = {"IQ4": IQ4_VALUES, "MXFP4": MXFP4_VALUES}


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """The values that quants of 4 bits stand for. Kept, as a graph may not copy from the host."""
    return torch.from_numpy(_TABLES[name]).to(device)


def _looked_up(name: str, packed: Tensor) -> Tensor:
    return _table(name, packed.device)[_bit_fields(packed, 4, 16).int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up("IQ4", blocks[:, 2:]) * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _bit_fields(blocks[:, 4:8], 4, 1) | _bit_fields(blocks[:, 2:4], 2, 1) << 4
    return _grouped(_looked_up("IQ4", blocks[:, 8:]), _half(blocks, 0) * (scales.float() - 32))


# bytes of a block, and the conversion uint8 [n, bytes] -> float32 [n, weights]
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "MXFP4": (17, _mxfp4),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
TYPES = (*_FLOATS, *_BLOCKS)
