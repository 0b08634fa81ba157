"""The types of KV caches as Triton kernels read and write them.

The cache keeps pages token by token: `keys` and `values` [pages, …, KV heads, PAGE tokens, K], KV says of
which numbers: "f16" float16; "fp8" e4m3, as bytes, or "fp8_native", the same read by instructions that cards
from sm_89 on have; "q8_0" int8 with float16 scales [pages, …, KV heads, PAGE tokens, K / 32]. A token's head
is one run of memory, so writing and reading it takes 128-bit accesses.
"""

import torch
import triton
import triton.language as tl

from kukri.kernels.gpu.assembler import converts_e4m3
from kukri.kernels.gpu.bits import e4m3_bytes, e4m3_values, round_even

GPU_TYPES = ("f16", "q8_0", "fp8")  # the types that these kernels know
PAGE = tl.constexpr(16)  # tokens of a page


def kv_name(numbers: torch.Tensor) -> str:
    """KV of a cache, by the type of the numbers in it; fp8 numbers are given as uint8."""
    if numbers.dtype == torch.uint8:
        return "fp8_native" if converts_e4m3(numbers) else "fp8"
    return "f16" if numbers.dtype == torch.float16 else "q8_0"


@triton.jit
def load_tile(head, table, token, dim, K: tl.constexpr, KV: tl.constexpr):
    """float16 [TILE, KW]: keys or values of the tokens. `head` is `_of_head` of attention_kernels.py."""
    data, scales, page_stride, scale_page_stride = head
    page = tl.load(table + token // PAGE).to(tl.int64)
    data += page * page_stride + token % PAGE * K
    x = tl.load(data[:, None] + dim[None, :], mask=(dim < K)[None, :], other=0)
    if KV == "fp8_native":
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KV == "fp8":
        x = e4m3_values(x)
    elif KV == "q8_0":
        TILE: tl.constexpr = x.shape[0]
        KW: tl.constexpr = x.shape[1]
        block = tl.arange(0, KW // 32)
        at = (page * scale_page_stride + (token % PAGE) * (K // 32))[:, None] + block[None, :]
        scale = tl.load(scales + at, mask=(block < K // 32)[None, :], other=0).to(tl.float32)
        x = tl.reshape(x.to(tl.float32), [TILE, KW // 32, 32]) * scale[:, :, None]
        x = tl.reshape(x, [TILE, KW]).to(tl.float16)
    return x


@triton.jit
def _limited(x):
    """x within float16's range; NaN stays."""
    return tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))


@triton.jit
def store_head(x, target, scales, slot, head, page_stride, head_stride, scale_page_stride, scale_head_stride,
               dim, K: tl.constexpr, KW: tl.constexpr, KV: tl.constexpr):  # fmt: skip
    """Stores a token's key or value x [KW] of one KV head at its slot."""
    x = _limited(x)
    page = (slot // PAGE).to(tl.int64)
    row = page * page_stride + head * head_stride + (slot % PAGE) * K
    if KV == "q8_0":
        blocks = tl.reshape(x, [KW // 32, 32])
        largest = tl.max(tl.abs(blocks), axis=1)
        has_nan = tl.max((blocks != blocks).to(tl.int32), axis=1) > 0
        top = tl.full([KW // 32], 127.0, tl.float32)
        inverse = tl.where(largest > 0, tl.div_rn(top, largest), 0.0)
        quants = tl.where(has_nan[:, None], 0.0, round_even(blocks * inverse[:, None]))
        tl.store(target + row + dim, tl.reshape(quants, [KW]).to(tl.int8), mask=dim < K)
        scale = tl.where(has_nan, float("nan"), tl.div_rn(largest, top)).to(tl.float16)
        block = tl.arange(0, KW // 32)
        at = page * scale_page_stride + head * scale_head_stride + (slot % PAGE) * (K // 32) + block
        tl.store(scales + at, scale, mask=block < K // 32)
    elif KV == "fp8" or KV == "fp8_native":
        tl.store(target + row + dim, e4m3_bytes(x), mask=dim < K)
    else:
        tl.store(target + row + dim, x.to(tl.float16), mask=dim < K)
