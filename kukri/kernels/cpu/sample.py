"""Row operations that sampling is built on, and a measure of memory bandwidth.

A row is one request's logits: float32 [n]. Results go to memory that the caller gives.
"""

from __future__ import annotations

from kukri.kernels.cpu.jit import KernelSource
from kukri.kernels.cpu.simd import (
    device,
    exponential,
    f32_of_bits,
    lanes_above,
    lanes_nan,
    load_f32,
    load_f32x16,
    max_lanes,
    maximum,
    splat,
    store_f32,
    store_f32x16,
    store_i32,
    sum_lanes,
)

_READ_TILE_BYTES = 1 << 20


@device
def _row_max(row, n):
    """The largest of n float32, or nan if any is nan."""
    whole = n & -16
    best = splat(-float("inf"))
    has_nan = 0
    for i in range(0, 4 * whole, 64):
        v = load_f32x16(row + i)
        best = maximum(best, v)
        has_nan |= lanes_nan(v)
    largest = max_lanes(best)
    for i in range(4 * whole, 4 * n, 4):
        v = load_f32(row + i)
        has_nan |= v != v
        largest = max(largest, v)
    return largest if has_nan == 0 else largest * float("nan")


def argmax(tile, row, n):
    """The lowest index of the row's largest value; -1 if the row has a nan."""
    largest = _row_max(row, n)
    if largest != largest:
        return -1
    whole = n & -16
    for i in range(0, whole, 16):
        below = lanes_above(splat(largest) - load_f32x16(row + 4 * i), 0.0)
        if below != 0xFFFF:
            for lane in range(16):
                if load_f32(row + 4 * (i + lane)) == largest:
                    return i + lane
    for i in range(whole, n):
        if load_f32(row + 4 * i) == largest:
            return i
    return -1


def max_and_sum_exp(tile, row, n, scale, block, out):
    """out[0] = the maximum m (nan if any is nan), then a sum of exp((x - m) * scale) for each `block` values.

    `block` must be a multiple of 16.
    """
    largest = _row_max(row, n)
    store_f32(out, largest)
    factor = splat(f32_of_bits(scale))
    top = splat(largest)
    out += 4
    for start in range(0, n, block):
        stop = min(start + block, n)
        whole = stop & -16
        total = splat(0.0)
        for i in range(start, whole, 16):
            total = total + exponential((load_f32x16(row + 4 * i) - top) * factor)
        rest = sum_lanes(total)
        for i in range(max(whole, start), stop):
            rest += max_lanes(exponential((splat(load_f32(row + 4 * i)) - top) * factor))
        store_f32(out, rest)
        out += 4
    return 0


def above(tile, row, n, threshold, out):
    """out[0:k] = the indices (int32, ascending) of values > threshold; returns k."""
    bound = f32_of_bits(threshold)
    whole = n & -16
    count = 0
    for i in range(0, whole, 16):
        bits = lanes_above(load_f32x16(row + 4 * i), bound)
        if bits != 0:
            for lane in range(16):
                store_i32(out + 4 * count, i + lane)
                count += (bits >> lane) & 1
    for i in range(whole, n):
        if load_f32(row + 4 * i) > bound:
            store_i32(out + 4 * count, i)
            count += 1
    return count


def read_memory(tile, data, n_bytes, out):
    """Reads all of `data` once, a mebibyte per tile: what memory can deliver is what decoding can reach."""
    n_tiles = n_bytes // _READ_TILE_BYTES
    if tile < 0:
        return n_tiles
    start = data + tile * _READ_TILE_BYTES
    a = splat(0.0)
    b = splat(0.0)
    c = splat(0.0)
    d = splat(0.0)
    for i in range(start, start + _READ_TILE_BYTES, 256):
        a = maximum(a, load_f32x16(i))
        b = maximum(b, load_f32x16(i + 64))
        c = maximum(c, load_f32x16(i + 128))
        d = maximum(d, load_f32x16(i + 192))
    store_f32x16(out + 64 * tile, maximum(maximum(a, b), maximum(c, d)))
    return 0


KERNELS = {
    kernel.__name__: KernelSource(kernel.__name__, kernel)
    for kernel in (argmax, max_and_sum_exp, above, read_memory)
}
