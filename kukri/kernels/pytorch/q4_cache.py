"""Heads of a q4 KV cache on tensors, as `kukri.kernels.q4_cache` defines them."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kukri.kernels.q4_cache import Q4_BLOCK, Q4_SCALES, q4_bytes, rotated_run


def rotate_heads(x: Tensor, d_head: int) -> Tensor:
    """x [T, heads*K] with each head rotated; done twice, it gives x again."""
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


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [T, G, q4_bytes(K)], float16 scales [T, G, 1]) of rotated heads [T, G, K]."""
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


def unpack_heads(packed: Tensor, d_head: int) -> Tensor:
    """The numbers [..., K], -8 to 7, as float32, of bytes [..., q4_bytes(K)]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 1, Q4_BLOCK // 2)
    nibbles = torch.cat([blocks & 15, blocks >> 4], -2).flatten(-3)[..., :d_head]
    return (nibbles ^ 8).float() - 8
