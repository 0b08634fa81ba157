"""Kernels that rotate queries and keys by position and write keys and values to the cache.

Each has its definition in `kukri.kernels.reference`. Buffers are float32, strides are bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels.cache import KVType
from kukri.kernels.cpu.compile.kernel_cache import KernelSource
from kukri.kernels.cpu.kernels.head_rotation import rotate_head
from kukri.kernels.cpu.kernels.intrinsics import device, load_f32, load_i32, load_i64, store_f32
from kukri.kernels.cpu.kernels.panels import first_row, row_tiles, stop_row
from kukri.kernels.cpu.kernels.simd import (
    absolute,
    first_lane,
    load_f32x16,
    max_lanes,
    maximum,
    minimum,
    round_even,
    splat,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_first_f16,
    store_i8,
    store_i8x16,
    sum_lanes,
    to_f16_range,
    to_i32,
)
from kukri.kernels.cpu.kernels.unpack import (
    either_word,
    word_bits,
)
from kukri.kernels.cpu.run.abi import KEY_BLOCK_BYTES, N_TOKENS, ROPE_POSITIONS, SLOTS
from kukri.kernels.paged_kv import KV_BLOCK, PAGE_TOKENS
from kukri.kernels.q4_cache import Q4_BLOCK, Q4_SCALES


@device
def _rotate(head, cos, sin, half):
    """Rotates dimension i with i + half of one head, in place."""
    if half & 15 == 0:
        for i in range(0, 4 * half, 64):
            a = load_f32x16(head + i)
            b = load_f32x16(head + 4 * half + i)
            c = load_f32x16(cos + i)
            s = load_f32x16(sin + i)
            store_f32x16(head + i, a * c - b * s)
            store_f32x16(head + 4 * half + i, b * c + a * s)
    else:
        for i in range(0, 4 * half, 4):
            x = load_f32(head + i)
            y = load_f32(head + 4 * half + i)
            store_f32(head + i, x * load_f32(cos + i) - y * load_f32(sin + i))
            store_f32(head + 4 * half + i, y * load_f32(cos + i) + x * load_f32(sin + i))


@device
def _store_token(k, v, key_page, value_page, offset, n_heads, d_head):
    """Writes one token's keys [G, K] and values into its page: keys [G, K, 16], values [G, 16, K]."""
    for head in range(n_heads):
        keys = key_page + (head * d_head * PAGE_TOKENS + offset) * 2
        values = value_page + (head * PAGE_TOKENS + offset) * d_head * 2
        for d in range(0, d_head, 16):
            source = (head * d_head + d) * 4
            key = to_f16_range(load_f32x16(k + source))
            store_f16(keys + d * 2 * PAGE_TOKENS, key, 2 * PAGE_TOKENS)
            store_f16x16(values + 2 * d, to_f16_range(load_f32x16(v + source)))


@device
def _store_token_f32(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a float32 cache."""
    for head in range(n_heads):
        keys = key_page + (head * d_head * PAGE_TOKENS + offset) * 4
        values = value_page + (head * PAGE_TOKENS + offset) * d_head * 4
        for d in range(0, d_head, 16):
            store_f32x16(values + 4 * d, load_f32x16(v + (head * d_head + d) * 4))
        for d in range(d_head):
            store_f32(keys + d * 4 * PAGE_TOKENS, load_f32(k + (head * d_head + d) * 4))


@device
def _store_token_q8(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a q8_0 cache, laid out as in `PagedKV`."""
    n_blocks = d_head // KV_BLOCK
    head_bytes = n_blocks * KEY_BLOCK_BYTES
    for head in range(n_heads):
        keys = key_page + head * head_bytes
        values = value_page + head * head_bytes
        scales = values + PAGE_TOKENS * d_head + 2 * offset
        for b in range(n_blocks):
            source = (head * d_head + KV_BLOCK * b) * 4
            low, high, scale = _to_int8(k + source)
            block = keys + b * KEY_BLOCK_BYTES
            store_i8(block + offset, low, PAGE_TOKENS)
            store_i8(block + 16 * PAGE_TOKENS + offset, high, PAGE_TOKENS)
            store_first_f16(block + KV_BLOCK * PAGE_TOKENS + 2 * offset, scale)
            low, high, scale = _to_int8(v + source)
            store_i8x16(values + offset * d_head + KV_BLOCK * b, low)
            store_i8x16(values + offset * d_head + KV_BLOCK * b + 16, high)
            store_first_f16(scales + 2 * PAGE_TOKENS * b, scale)


@device
def _to_int8(x):
    """32 float32 as two vectors of int8 and their scale; clamped to the float16 range first."""
    a = to_f16_range(load_f32x16(x))
    b = to_f16_range(load_f32x16(x + 64))
    largest = max_lanes(maximum(absolute(a), absolute(b)))
    inverse = splat(np.float32(127.0 / largest if largest > 0.0 else largest))  # keeps nan
    return (
        to_i32(round_even(a * inverse)),
        to_i32(round_even(b * inverse)),
        splat(np.float32(largest / 127.0)),
    )


@device
def _store_token_q4(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a q4 cache of rotated heads: see `q4_cache`."""
    n_blocks = (d_head + Q4_BLOCK - 1) // Q4_BLOCK
    n_bytes = n_blocks * (Q4_BLOCK // 2)
    head_bytes = PAGE_TOKENS * (n_bytes + 2)
    for head in range(n_heads):
        source = head * d_head * 4
        keys = key_page + head * head_bytes
        values = value_page + head * head_bytes
        scale = _q4_scale(k + source, d_head)
        store_first_f16(keys + PAGE_TOKENS * n_bytes + 2 * offset, splat(scale))
        for b in range(n_blocks):
            packed = _q4_block(k + source, b, d_head, _inverse(scale))
            store_i8(keys + b * (Q4_BLOCK // 2) * PAGE_TOKENS + offset, packed, PAGE_TOKENS)
        scale = _q4_scale(v + source, d_head)
        store_first_f16(values + PAGE_TOKENS * n_bytes + 2 * offset, splat(scale))
        for b in range(n_blocks):
            packed = _q4_block(v + source, b, d_head, _inverse(scale))
            store_i8x16(values + offset * n_bytes + b * (Q4_BLOCK // 2), packed)


@device
def _q4_scale(x, d_head):
    """The scale of a head: of `Q4_SCALES` that which leaves the least squared error."""
    high = load_f32x16(x)
    low = splat(0.0) - high
    for i in range(64, 4 * d_head, 64):
        value = load_f32x16(x + i)
        high = maximum(high, value)
        low = maximum(low, splat(0.0) - value)
    highest = max_lanes(high)
    lowest = max_lanes(low)
    extreme = -lowest if lowest >= highest else highest
    best = np.float32(0.0)
    least = np.float32(0.0)
    for i in range(len(Q4_SCALES)):
        scale = first_lane(to_f16_range(splat(extreme) / splat(-Q4_SCALES[i])))
        inverse = _inverse(scale)
        total = splat(0.0)
        for at in range(0, 4 * d_head, 64):
            value = load_f32x16(x + at)
            error = value - _q4_numbers(value, inverse) * splat(scale)
            total = total + error * error
        squares = sum_lanes(total)
        if i == 0 or squares < least:
            best = scale
            least = squares
    return best


@device
def _inverse(scale):
    """1 / scale, 0 for a scale of 0; keeps nan."""
    return splat(np.float32(1.0 / scale if scale != 0.0 else scale))


@device
def _q4_numbers(value, inverse):
    """Whole numbers from -8 to 7; -8 for nan, whose scale is nan."""
    return maximum(minimum(round_even(value * inverse), splat(7.0)), splat(-8.0))


@device
def _q4_block(x, block, d_head, inverse):
    """The bytes of 32 dimensions; zeros for those beyond the head."""
    low = to_i32(_q4_numbers(load_f32x16(x + 4 * Q4_BLOCK * block), inverse))
    packed = word_bits(low, 0, 15, 0)
    if Q4_BLOCK * block + 16 < d_head:
        high = to_i32(_q4_numbers(load_f32x16(x + 4 * Q4_BLOCK * block + 64), inverse))
        packed = either_word(packed, word_bits(high, 0, 15, 4))
    return packed


@device
def _as_it_is(q, k, v, n_heads, n_kv_heads, d_head):
    return 0


@device
def _rotate_heads(q, k, v, n_heads, n_kv_heads, d_head):
    """Rotates heads as `q4_cache.rotate_heads` does, in place; keys and values clamped to float16 first."""
    for i in range(0, 4 * n_kv_heads * d_head, 64):
        store_f32x16(k + i, to_f16_range(load_f32x16(k + i)))
        store_f32x16(v + i, to_f16_range(load_f32x16(v + i)))
    for head in range(n_heads):
        rotate_head(q + head * d_head * 4, d_head)
    for head in range(n_kv_heads):
        rotate_head(k + head * d_head * 4, d_head)
        rotate_head(v + head * d_head * 4, d_head)
    return 0


def _make_rope_store(kv_type: KVType, store_token: Any, rotate_heads: Any = _as_it_is) -> KernelSource:
    """The kernel for one kind of cache."""

    def rope_store(
        tile, batch, q, k, v, stride, n_heads, n_kv_heads, d_head, cos, sin, half, keys, values, page_stride
    ):
        """Rotates q and k by position (unless cos is 0), then stores k and v (unless keys is 0)."""
        n_rows = load_i64(batch + N_TOKENS)
        if tile < 0:
            return row_tiles(n_rows)
        positions = load_i64(batch + ROPE_POSITIONS)
        slots = load_i64(batch + SLOTS)
        for row in range(first_row(tile, n_rows), stop_row(tile, n_rows)):
            if cos != 0:
                angle = load_i32(positions + 4 * row) * half * 4
                for head in range(n_heads):
                    _rotate(q + row * stride + head * d_head * 4, cos + angle, sin + angle, half)
                for head in range(n_kv_heads):
                    _rotate(k + row * stride + head * d_head * 4, cos + angle, sin + angle, half)
            if keys != 0:
                slot = load_i32(slots + 4 * row)
                page = (slot >> 4) * page_stride
                rotate_heads(
                    q + row * stride, k + row * stride, v + row * stride, n_heads, n_kv_heads, d_head
                )
                store_token(
                    k + row * stride,
                    v + row * stride,
                    keys + page,
                    values + page,
                    slot & 15,
                    n_kv_heads,
                    d_head,
                )
        return 0

    return KernelSource(f"rope_store_{kv_type}", rope_store)


_ROPE_STORES = (
    _make_rope_store("f16", _store_token),
    _make_rope_store("f32", _store_token_f32),
    _make_rope_store("q8_0", _store_token_q8),
    _make_rope_store("q4", _store_token_q4, _rotate_heads),
)
KERNELS = {source.name: source for source in _ROPE_STORES}
