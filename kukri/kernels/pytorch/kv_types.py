"""The types of KV caches on tensors, as `kukri.kernels.kv_types` defines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kukri.config import KVType
from kukri.dataclass import dataclass
from kukri.kernels.kv_types import KV_BLOCK, Q4_BLOCK, Q4_SCALES, q4_bytes, rotated_run


@dataclass(frozen=True)
class TensorNumbers:
    """`encode` and `decode` as in `KVNumbers`, of heads [..., K] and numbers of `dtype`."""

    dtype: torch.dtype
    encode: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    decode: Callable[[Tensor, Tensor | None, int], Tensor]


def rotate_heads(x: Tensor, d_head: int) -> Tensor:
    """Return x [T, heads*K] with each head rotated; a second rotation gives x again."""
    size, distance = rotated_run(d_head), 1
    heads = (len(x), -1, d_head // size, size)
    y = x
    while distance < size:
        a, b = y.reshape(len(x), -1, 2, distance).unbind(-2)
        y = torch.stack([a + b, a - b], -2)
        distance *= 2
    runs = y.reshape(heads) * size**-0.5
    if d_head > size:
        total = reduce(torch.add, runs.unbind(-2))
        runs = runs - (total * (2 / (d_head // size))).unsqueeze(-2)
    rotated: Tensor = runs.reshape(x.shape)
    return rotated


def encode_q4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [..., q4_bytes(K)], float16 scales [..., 1]) of rotated heads [..., K]."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    extreme = torch.where(-low >= high, low, high)
    limit = torch.finfo(torch.float16).max
    best, numbers, least = extreme, x, extreme
    for i, divisor in enumerate(Q4_SCALES):
        scale = (extreme / -divisor).clamp(-limit, limit)
        inverse = torch.where(scale == 0, 0, 1 / scale)
        rounded = torch.round(x * inverse).clamp(-8, 7)
        error = (x - rounded * scale).square().sum(-1, keepdim=True)
        is_better = (error < least) | (i == 0)
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
        numbers = torch.where(is_better, rounded, numbers)
    nibbles = numbers.nan_to_num().to(torch.int8).view(torch.uint8) & 15
    nibbles = F.pad(nibbles, (0, 2 * q4_bytes(x.shape[-1]) - x.shape[-1]))
    halves = nibbles.view(*x.shape[:-1], -1, 2, Q4_BLOCK // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2), best.to(torch.float16)


def unpack_q4(packed: Tensor, d_head: int) -> Tensor:
    """The numbers [..., K], -8 to 7, as float32, of bytes [..., q4_bytes(K)]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 1, Q4_BLOCK // 2)
    nibbles = torch.cat([blocks & 15, blocks >> 4], -2).flatten(-3)[..., :d_head]
    return (nibbles ^ 8).float() - 8


def _decode_q4(packed: Tensor, scales: Tensor | None, d_head: int) -> Tensor:
    assert scales is not None
    return unpack_q4(packed, d_head) * scales.float()


def _encode_q8_0(x: Tensor) -> tuple[Tensor, Tensor | None]:
    limit = torch.finfo(torch.float16).max
    blocks = x.clamp(-limit, limit).view(*x.shape[:-1], -1, KV_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    quants = torch.round(blocks * inverse).nan_to_num().to(torch.int8)
    return quants.flatten(-2), (largest[..., 0] / 127).to(torch.float16)


def _decode_q8_0(quants: Tensor, scales: Tensor | None, d_head: int) -> Tensor:
    assert scales is not None
    return quants.float() * scales.float().repeat_interleave(KV_BLOCK, -1)


def _floats(dtype: torch.dtype) -> TensorNumbers:
    limit = torch.finfo(dtype).max

    def encode(x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.clamp(-limit, limit).to(dtype), None

    return TensorNumbers(dtype, encode, lambda x, scales, d_head: x.float())


TENSOR_TYPES: dict[KVType, TensorNumbers] = {
    "f16": _floats(torch.float16),
    "q8_0": TensorNumbers(torch.int8, _encode_q8_0, _decode_q8_0),
    "q4": TensorNumbers(torch.uint8, encode_q4, _decode_q4),
    "fp8": _floats(torch.float8_e4m3fn),
    "f32": _floats(torch.float32),
}
