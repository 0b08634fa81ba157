"""Memory bandwidth: the ceiling that `kukri bench` sets speeds against."""

from __future__ import annotations

from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import load_f32x16, maximum, splat, store_f32x16

_TILE_BYTES = 1 << 20


def read_memory(tile, data, n_bytes, out):
    """Reads all of `data` once, a mebibyte per tile."""
    n_tiles = n_bytes // _TILE_BYTES
    if tile < 0:
        return n_tiles
    start = data + tile * _TILE_BYTES
    a = splat(0.0)
    b = splat(0.0)
    c = splat(0.0)
    d = splat(0.0)
    for i in range(start, start + _TILE_BYTES, 256):
        a = maximum(a, load_f32x16(i))
        b = maximum(b, load_f32x16(i + 64))
        c = maximum(c, load_f32x16(i + 128))
        d = maximum(d, load_f32x16(i + 192))
    store_f32x16(out + 64 * tile, maximum(maximum(a, b), maximum(c, d)))
    return 0


KERNELS = {"read_memory": KernelSource("read_memory", read_memory)}
