"""Brings weight rows from the file's order into weight tiles (see layouts.py)."""

from __future__ import annotations

from typing import Any

from numba import types

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    broadcast,
    device,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    operation,
    pointer,
    stack_bytes,
    store_i32,
    store_u8,
    store_u16,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import I32x16
from kukri.kernels.cpu.pack.layouts import LAYOUTS, ROWS

_FOR_MATRIX = cpu_target().has_int8_matrix
_VECTORS_BYTES = 4 * ROWS * max(layout.n_words for layout in LAYOUTS.values()) * (3 if _FOR_MATRIX else 1)


@operation(types.void, types.int64, types.int64)
def _fill(builder: Any, address: Any, word: Any) -> None:
    """Writes a word for each row."""
    words = broadcast(builder, builder.trunc(word, I32x16.llvm.element))
    builder.store(words, pointer(builder, address, I32x16.llvm), align=4)


@operation(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def _move(builder: Any, source: Any, target: Any, right: Any, left: Any, masks: Any) -> None:
    """Flips the bits at `target` that are set in source >> right << left & masks."""
    source, place, masks = (pointer(builder, where, I32x16.llvm) for where in (source, target, masks))
    right, left = (broadcast(builder, builder.trunc(n, I32x16.llvm.element)) for n in (right, left))
    moved = builder.shl(builder.lshr(builder.load(source, align=4), right), left)
    kept = builder.and_(moved, builder.load(masks, align=4))
    builder.store(builder.xor(builder.load(place, align=4), kept), place, align=4)


@device
def _gather(vectors, source, n_words):
    """Writes a row's words as its lane of vectors."""
    for j in range(n_words):
        store_i32(vectors + 4 * ROWS * j, load_i32(source + 4 * j))


def pack(
    tile, row_addresses, n_row_tiles, n_blocks, block_bytes, word, n_words, moves, masks, n_moves, flip, half,
    n_halves, exponent, out, tile_bytes,
):  # fmt: skip
    """`row_addresses`: int64 per row, padded to whole tiles; the rest as in TileLayout and WordMoves."""
    if tile < 0:
        return n_row_tiles
    rows = row_addresses + 8 * ROWS * tile
    target = out + tile * tile_bytes
    vectors = stack_bytes(_VECTORS_BYTES)
    words_bytes = 4 * ROWS * n_words
    for block in range(n_blocks):
        at = block * block_bytes
        for row in range(ROWS):
            _gather(vectors + 4 * row, load_i64(rows + 8 * row) + at + word, n_words)
            if _FOR_MATRIX:
                others = rows + 8 * (row >> 1)
                _gather(vectors + words_bytes + 4 * row, load_i64(others) + at + word, n_words)
                _gather(vectors + 2 * words_bytes + 4 * row, load_i64(others + 4 * ROWS) + at + word, n_words)
        for j in range(n_words):
            _fill(target + 4 * ROWS * j, flip)
        for i in range(n_moves):
            move = moves + 16 * i
            _move(
                vectors + 4 * ROWS * load_i32(move),
                target + 4 * ROWS * load_i32(move + 4),
                load_i32(move + 8),
                load_i32(move + 12),
                masks + 4 * ROWS * i,
            )
        target += words_bytes
        for row in range(ROWS):
            source = load_i64(rows + 8 * row) + at
            for j in range(n_halves):
                store_u16(target + (j * ROWS + row) * 2, load_u16(source + half + 2 * j))
            if exponent >= 0:
                store_u8(target + n_halves * ROWS * 2 + row, load_u8(source + exponent))
        target += ROWS * (2 * n_halves + (1 if exponent >= 0 else 0))
    return 0


KERNELS = {"pack": KernelSource("pack", pack)}
