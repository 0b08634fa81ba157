"""Triton kernel for RoPE and the KV cache: rotated queries as float16, keys and values into their pages.

The cache keeps pages token by token: `keys` and `values` [pages, …, KV heads, PAGE tokens, K], KV says of
which numbers: "f16" float16; "fp8" e4m3, as bytes; "q8_0" int8 with float16 scales [pages, …, KV heads, PAGE
tokens, K / 32]. A token's head is one run of memory, so writing and reading it takes 128-bit accesses.
Strides are in elements of the tensor they belong to.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import e4m3_bytes, round_even

PAGE = tl.constexpr(16)  # tokens of a page


@triton.jit
def _limited(x):
    """x within float16's range; NaN stays."""
    return tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))


@triton.jit
def rotated(source, dim, ok, cos, sin, position, rotary, ROTARY: tl.constexpr):
    """The heads at `source` + dim, in float32: their first `rotary` dimensions, ROTARY or 0, rotated.

    `source` has any shape that goes with dim's; zeros where not `ok`. `position` is int64.
    """
    x = tl.load(source + dim, mask=ok, other=0)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        rotates = dim < rotary
        low = dim < HALF
        other = tl.load(source + tl.where(low, dim + HALF, dim - HALF), mask=ok & rotates, other=0)
        angle = position * HALF + tl.where(low, dim, dim - HALF)
        c, s = tl.load(cos + angle, mask=rotates, other=1), tl.load(sin + angle, mask=rotates, other=0)
        x = tl.where(rotates, x * c + tl.where(low, -(other * s), other * s), x)
    return x


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


@triton.jit
def rope_and_store(
    q, k, v, cos, sin, positions, slots, q_out, keys, values, key_scales, value_scales, q_stride, k_stride,
    v_stride,
    page_stride, head_stride, scale_page_stride, scale_head_stride, n_heads, n_kv_heads,
    K: tl.constexpr, KW: tl.constexpr, ROTARY: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """One head of one token a program: heads 0 … H - 1 are queries, then keys, then values.

    The first ROTARY dimensions rotate, dimension i with i + ROTARY / 2; ROTARY 0 for layers without RoPE.
    KW is the power of two >= K.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, KW)
    ok = dim < K
    is_q, is_v = head < n_heads, head >= n_heads + n_kv_heads
    kv_head = tl.where(is_v, head - n_heads - n_kv_heads, head - n_heads)
    if is_q:
        source = q + token * q_stride + head * K
    elif is_v:
        source = v + token * v_stride + kv_head * K
    else:
        source = k + token * k_stride + kv_head * K
    position = tl.load(positions + token).to(tl.int64)
    x = rotated(source, dim, ok, cos, sin, position, tl.where(is_v, 0, ROTARY), ROTARY)
    if is_q:
        tl.store(q_out + (token * n_heads + head) * K + dim, x.to(tl.float16), mask=ok)
    else:
        store_head(
            x, values if is_v else keys, value_scales if is_v else key_scales, tl.load(slots + token),
            kv_head, page_stride, head_stride, scale_page_stride, scale_head_stride, dim, K, KW, KV,
        )  # fmt: skip
