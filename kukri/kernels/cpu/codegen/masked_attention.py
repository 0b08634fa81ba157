"""Attention by the caller's mask, in place of causality and windows.

For research, not for serving: a plan of its own uses it, so that ordinary plans carry nothing for masks. One
tile is one head of one token; its softmax goes over the pages with a running maximum (Milakov and
Gimelshein 2018). Lanes are keys, as in `attention.py`.
"""

from __future__ import annotations

import numpy as np

from kukri.kernels.cpu.compile.intrinsics import f32_of_bits, load_f32, load_i32, load_i64, stack_bytes
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    exponential,
    fma,
    hyperbolic_tangent,
    load_f16x16,
    load_f32x16,
    mask_outside,
    max_lanes,
    softmax_exponential,
    splat,
    store_f32x16,
    sum_lanes,
)
from kukri.kernels.cpu.run.abi import CONTEXT_LEN, MASK, MASK_HEAD_STRIDE, MASK_STRIDE, N_TOKENS, PAGE_TABLE
from kukri.kernels.paged_kv import PAGE_TOKENS

_NOTHING = np.float32(-np.inf)  # the maximum of no scores


def _make_attend_masked(d_head: int) -> KernelSource:
    """`attend_masked[d_head]`: every head of every token over the whole context of the one sequence."""
    row_bytes = 4 * d_head
    head_bytes = 2 * d_head * PAGE_TOKENS

    def attend_masked(
        tile, batch, q, q_stride, scale, softcap, n_heads, n_kv_heads, keys, values, page_stride, sinks, y,
        y_stride,
    ):  # fmt: skip
        """`softcap` may be 0: none."""
        if tile < 0:
            return load_i64(batch + N_TOKENS) * n_heads
        token = tile // n_heads
        head = tile % n_heads
        query = q + token * q_stride + head * row_bytes
        out = y + token * y_stride + head * row_bytes
        mask = load_i64(batch + MASK) + token * load_i64(batch + MASK_STRIDE)
        mask += head * load_i64(batch + MASK_HEAD_STRIDE)
        in_page = head // (n_heads // n_kv_heads) * head_bytes
        n_context = load_i32(load_i64(batch + CONTEXT_LEN))
        table = load_i64(batch + PAGE_TABLE)
        factor = splat(f32_of_bits(scale))
        cap = splat(f32_of_bits(softcap))
        weights = stack_bytes(64)
        for i in range(0, row_bytes, 64):
            store_f32x16(out + i, splat(0.0))
        top = _NOTHING
        sums = splat(0.0)
        for page in range((n_context + PAGE_TOKENS - 1) // PAGE_TOKENS):
            start = load_i32(table + 4 * page) * page_stride + in_page
            scores = splat(0.0)
            for d in range(d_head):
                scores = fma(load_f16x16(keys + start + 32 * d), splat(load_f32(query + 4 * d)), scores)
            if softcap != 0:
                scores = hyperbolic_tangent(scores * factor / cap) * cap + load_f32x16(mask + 64 * page)
            else:
                scores = fma(scores, factor, load_f32x16(mask + 64 * page))
            scores = mask_outside(scores, page * PAGE_TOKENS, 0, n_context - 1)  # what lies there may be NaN
            new_top = max(top, max_lanes(scores))
            if new_top == _NOTHING:
                continue
            keep = softmax_exponential(splat(top) - splat(new_top))
            scores = softmax_exponential(scores - splat(new_top))
            top = new_top
            sums = fma(sums, keep, scores)
            store_f32x16(weights, scores)
            for i in range(0, row_bytes, 64):
                store_f32x16(out + i, load_f32x16(out + i) * keep)
            for key in range(PAGE_TOKENS):
                weight = load_f32(weights + 4 * key)
                if weight != 0.0:
                    row = values + start + 2 * d_head * key
                    for i in range(0, row_bytes, 64):
                        v = fma(load_f16x16(row + i // 2), splat(weight), load_f32x16(out + i))
                        store_f32x16(out + i, v)
        total = splat(sum_lanes(sums))
        if top != _NOTHING:  # a token that sees nothing keeps its zeros
            total = total + exponential(splat(load_f32(sinks + 4 * head)) - splat(top))
            for i in range(0, row_bytes, 64):
                store_f32x16(out + i, load_f32x16(out + i) / total)
        return 0

    return KernelSource(f"attend_masked[{d_head}]", attend_masked)


KERNELS = {"attend_masked": _make_attend_masked}
