"""Brings weight rows from the file's order into weight tiles (see layouts.py)."""

from __future__ import annotations

from kukri.kernels.cpu.jit import KernelSource
from kukri.kernels.cpu.layouts import ROWS
from kukri.kernels.cpu.simd import load_i32, load_i64, load_u16, store_i32, store_u16


def pack(tile, row_addresses, n_row_tiles, n_blocks, block_bytes, word, n_words, half, n_halves, out):
    """`row_addresses`: int64 per row, padded to whole tiles; word and half: byte offsets in a block."""
    if tile < 0:
        return n_row_tiles
    tile_block_bytes = ROWS * (4 * n_words + 2 * n_halves)
    for row in range(ROWS):
        source = load_i64(row_addresses + 8 * (tile * ROWS + row))
        target = out + tile * n_blocks * tile_block_bytes
        for _ in range(n_blocks):
            for j in range(n_words):
                store_i32(target + (j * ROWS + row) * 4, load_i32(source + word + 4 * j))
            halves = target + n_words * ROWS * 4
            for j in range(n_halves):
                store_u16(halves + (j * ROWS + row) * 2, load_u16(source + half + 2 * j))
            source += block_bytes
            target += tile_block_bytes
    return 0


KERNELS = {"pack": KernelSource("pack", pack)}
