"""Kernels that rotate queries and keys by position and write keys and values to the cache.

Each has its definition in `kukri.kernels.reference`. Buffers are float32, strides are bytes.
"""

from __future__ import annotations

from kukri.kernels.cpu.codegen.head_rotation import rotate_head
from kukri.kernels.cpu.codegen.kv_types import CACHED, CachedNumbers
from kukri.kernels.cpu.codegen.panels import first_row, row_tiles, stop_row
from kukri.kernels.cpu.compile.intrinsics import device, load_f32, load_i32, load_i64, store_f32
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import load_f32x16, store_f32x16, to_f16_range
from kukri.kernels.cpu.run.abi import N_TOKENS, ROPE_POSITIONS, SLOTS
from kukri.kernels.kv_types import KV_TYPES


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
def _within_range(q, k, n_heads, n_kv_heads, d_head, middle, reach):
    """Queries and keys as `kv_types.within_range` makes them, in place."""
    if middle != 0:
        group = n_heads // n_kv_heads
        for head in range(n_heads):
            own = reach + head // group * d_head * 4
            for i in range(0, 4 * d_head, 64):
                at = q + head * d_head * 4 + i
                store_f32x16(at, load_f32x16(at) * load_f32x16(own + i))
        for i in range(0, 4 * n_kv_heads * d_head, 64):
            key = load_f32x16(k + i) - load_f32x16(middle + i)
            store_f32x16(k + i, key / load_f32x16(reach + i))


@device
def _keys_as_they_are(q, k, n_heads, n_kv_heads, d_head, middle, reach):
    return 0


@device
def _as_it_is(q, k, v, n_heads, n_kv_heads, d_head):
    return 0


@device
def _rotate_heads(q, k, v, n_heads, n_kv_heads, d_head):
    """Rotates heads as `kv_types.rotate_heads` does, in place; keys and values clamped to float16 first."""
    for i in range(0, 4 * n_kv_heads * d_head, 64):
        store_f32x16(k + i, to_f16_range(load_f32x16(k + i)))
        store_f32x16(v + i, to_f16_range(load_f32x16(v + i)))
    for head in range(n_heads):
        rotate_head(q + head * d_head * 4, d_head)
    for head in range(n_kv_heads):
        rotate_head(k + head * d_head * 4, d_head)
        rotate_head(v + head * d_head * 4, d_head)
    return 0


def _make_rope_store(cached: CachedNumbers) -> KernelSource:
    """The kernel for one type of cache."""
    store_token, rotate_heads = cached.store, _rotate_heads if cached.is_rotated else _as_it_is
    within_range = _within_range if KV_TYPES[cached.kv_type].has_range else _keys_as_they_are

    def rope_store(
        tile, batch, q, k, v, stride, n_heads, n_kv_heads, d_head, cos, sin, half, keys, values, page_stride,
        middle, reach,
    ):  # fmt: skip
        """Rotates q and k by position (unless cos is 0), then stores k and v (unless keys is 0).

        Without a range of keys `middle` is 0.
        """
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
                within_range(q + row * stride, k + row * stride, n_heads, n_kv_heads, d_head, middle, reach)
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

    return KernelSource(f"rope_store_{cached.kv_type}", rope_store)


_SOURCES = [_make_rope_store(cached) for cached in CACHED]
KERNELS = {source.name: source for source in _SOURCES}
