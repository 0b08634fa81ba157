"""Triton kernel for RoPE and the KV cache: rotated queries as float16, keys and values into their pages.

KV says what the cache holds (`kv_types.py`). Strides are in elements of the tensor they belong to.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.kv_types import store_head
from kukri.kernels.gpu.overlap import await_inputs


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
    await_inputs()
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
