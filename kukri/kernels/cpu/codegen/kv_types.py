"""The numbers of a KV cache as kernels read and write them, for each type of cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from kukri.kernels.cache import KVType
from kukri.kernels.cpu.codegen.unpack import either_word, word_bits
from kukri.kernels.cpu.compile.intrinsics import (
    broadcast,
    constant,
    device,
    load_f32,
    operation,
    pointer,
    store_f32,
)
from kukri.kernels.cpu.compile.simd import (
    F32x16,
    I32x16,
    absolute,
    first_lane,
    load_f16x16,
    load_f32x16,
    load_i8x16,
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
from kukri.kernels.kv_types import KV_BLOCK, KV_TYPES, Q4_BLOCK, Q4_SCALES
from kukri.kernels.paged_kv import PAGE_TOKENS, head_bytes

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_Q4_BYTES = Q4_BLOCK // 2  # bytes of a block of 32 dimensions
# q8_0: 32 dimensions of a page's 16 keys, then their float16 scales
_KEY_BLOCK_BYTES = PAGE_TOKENS * (KV_BLOCK + 2)


@device
def _key_f16(keys, v, d):
    return load_f16x16(keys + (16 * v + d) * (2 * PAGE_TOKENS))


@device
def _value_f16(page, key, v, d_head):
    return load_f16x16(page + (key * d_head + 16 * v) * 2)


@device
def _key_f32(keys, v, d):
    return load_f32x16(keys + (16 * v + d) * (4 * PAGE_TOKENS))


@device
def _value_f32(page, key, v, d_head):
    return load_f32x16(page + (key * d_head + 16 * v) * 4)


@device
def _key_q8_0(keys, v, d):
    return load_i8x16(keys + (v >> 1) * _KEY_BLOCK_BYTES + ((v & 1) * 16 + d) * PAGE_TOKENS)


@device
def _key_scale_q8_0(keys, v, d_head):
    return load_f16x16(keys + (v >> 1) * _KEY_BLOCK_BYTES + KV_BLOCK * PAGE_TOKENS)


@device
def _value_q8_0(page, key, v, d_head):
    return load_i8x16(page + key * d_head + 16 * v)


@device
def _value_scale_q8_0(page, v, d_head):
    return load_f16x16(page + PAGE_TOKENS * d_head + (v >> 1) * (2 * PAGE_TOKENS))


@operation(F32x16, types.int64, types.int64)
def _load_i4x16(builder: Any, address: Any, half: Any) -> Any:
    """The low (half = 0) or high (1) 4 bits of 16 bytes, signed, as float32."""
    packed = builder.load(pointer(builder, address, ir.VectorType(_I8, 16)), align=1)
    left = builder.sub(_I32(28), builder.shl(builder.trunc(half, _I32), _I32(2)))
    upper = builder.shl(builder.zext(packed, I32x16.llvm), broadcast(builder, left))
    return builder.sitofp(builder.ashr(upper, constant(I32x16.llvm, 28)), F32x16.llvm)


@device
def _key_q4(keys, v, d):
    return _load_i4x16(keys + ((v >> 1) * _Q4_BYTES + d) * PAGE_TOKENS, v & 1)


@device
def _value_q4(page, key, v, d_head):
    n_bytes = (d_head + Q4_BLOCK - 1) // Q4_BLOCK * _Q4_BYTES
    return _load_i4x16(page + key * n_bytes + (v >> 1) * _Q4_BYTES, v & 1)


@device
def _scale_q4(page, v, d_head):
    n_bytes = (d_head + Q4_BLOCK - 1) // Q4_BLOCK * _Q4_BYTES
    return load_f16x16(page + PAGE_TOKENS * n_bytes)


@device
def _store_f16(k, v, key_page, value_page, offset, n_heads, d_head):
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
def _store_f32(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a float32 cache."""
    for head in range(n_heads):
        keys = key_page + (head * d_head * PAGE_TOKENS + offset) * 4
        values = value_page + (head * PAGE_TOKENS + offset) * d_head * 4
        for d in range(0, d_head, 16):
            store_f32x16(values + 4 * d, load_f32x16(v + (head * d_head + d) * 4))
        for d in range(d_head):
            store_f32(keys + d * 4 * PAGE_TOKENS, load_f32(k + (head * d_head + d) * 4))


@device
def _store_q8_0(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a q8_0 cache, laid out as in `PagedKV`."""
    n_blocks = d_head // KV_BLOCK
    head_bytes = n_blocks * _KEY_BLOCK_BYTES
    for head in range(n_heads):
        keys = key_page + head * head_bytes
        values = value_page + head * head_bytes
        scales = values + PAGE_TOKENS * d_head + 2 * offset
        for b in range(n_blocks):
            source = (head * d_head + KV_BLOCK * b) * 4
            low, high, scale = _to_int8(k + source)
            block = keys + b * _KEY_BLOCK_BYTES
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
def _store_q4(k, v, key_page, value_page, offset, n_heads, d_head):
    """Stores a token's keys and values in a q4 cache of rotated heads: see `kernels.kv_types`."""
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


class CachedNumbers(NamedTuple):
    """Functions that read and write one type of cache. Readers get the address of a head in a page, and v for
    dimensions 16 v to 16 v + 15 of it.
    """

    kv_type: KVType
    key: Any  # (keys, v, d): dimension 16 v + d of a page's 16 keys, without their scales
    value: Any  # (values, key, v, d_head): 16 dimensions of one key's value, without its scale
    store: Any  # (k, v, key_page, value_page, offset, n_heads, d_head): a token's keys and values
    key_scale: Any = None  # (keys, v, d_head): scales of a page's 16 keys; None: there are none
    value_scale: Any = None  # (values, v, d_head): scales of their values
    has_int8_products: bool = False  # heads are attended to by products of int8 (`int8_attention.py`)

    @property
    def is_rotated(self) -> bool:
        """True if heads are stored rotated."""
        return KV_TYPES[self.kv_type].is_rotated

    def head_bytes(self, d_head: int) -> int:
        """Bytes of one head's keys, or values, in a page."""
        return head_bytes(d_head, self.kv_type)

    def vectors_per_scale(self, d_head: int) -> int:
        """Vectors of 16 dimensions that share a scale; all of them if there is none."""
        return d_head // max(KV_TYPES[self.kv_type].n_scales(d_head), 1) // 16


CACHED = (
    CachedNumbers("f16", _key_f16, _value_f16, _store_f16),
    CachedNumbers("f32", _key_f32, _value_f32, _store_f32),
    CachedNumbers("q8_0", _key_q8_0, _value_q8_0, _store_q8_0, _key_scale_q8_0, _value_scale_q8_0, True),
    CachedNumbers("q4", _key_q4, _value_q4, _store_q4, _scale_q4, _scale_q4),
)
