"""Brings weight rows from the file's order into weight tiles (see layouts.py)."""

from __future__ import annotations

from kukri.kernels.cpu.intrinsics import (
    device,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_i32,
    store_u8,
    store_u16,
)
from kukri.kernels.cpu.kernel_cache import KernelSource
from kukri.kernels.cpu.layouts import ROWS


@device
def turn_bits(word):
    """Moves bit 4j + b to bit 8b + j, for j < 8 and b < 4."""
    turned = 0
    for b in range(4):
        # every fourth bit from b on, gathered into a byte: pairs, then fours, then eights
        x = (word >> b) & 0x11111111
        x = (x | (x >> 3)) & 0x03030303
        x = (x | (x >> 6)) & 0x000F000F
        x = (x | (x >> 12)) & 0xFF
        turned |= x << (8 * b)
    return turned


def pack(
    tile, row_addresses, n_row_tiles, n_blocks, block_bytes, word, n_words, bit_word, half, n_halves,
    exponent, out, tile_bytes,
):  # fmt: skip
    """`row_addresses`: int64 per row, padded to whole tiles; the rest as in TileLayout."""
    if tile < 0:
        return n_row_tiles
    tile_block_bytes = ROWS * (4 * n_words + 2 * n_halves + (1 if exponent >= 0 else 0))
    for row in range(ROWS):
        source = load_i64(row_addresses + 8 * (tile * ROWS + row))
        target = out + tile * tile_bytes
        for _ in range(n_blocks):
            for j in range(n_words):
                value = load_i32(source + word + 4 * j)
                store_i32(target + (j * ROWS + row) * 4, turn_bits(value) if j == bit_word else value)
            halves = target + n_words * ROWS * 4
            for j in range(n_halves):
                store_u16(halves + (j * ROWS + row) * 2, load_u16(source + half + 2 * j))
            if exponent >= 0:
                store_u8(halves + n_halves * ROWS * 2 + row, load_u8(source + exponent))
            source += block_bytes
            target += tile_block_bytes
    return 0


KERNELS = {"pack": KernelSource("pack", pack)}
