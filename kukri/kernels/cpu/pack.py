"""Packs weights into tiles when a plan first uses them (layouts.py says how a tile looks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kukri.errors import MissingKernelError
from kukri.kernels.cpu.layouts import (
    LAYOUTS,
    PER_TOKEN_TYPE,
    ROW_SUM_BYTES,
    ROWS,
    PanelKind,
    TileLayout,
)
from kukri.kernels.cpu.memory import address_of, aligned_zeros
from kukri.kernels.cpu.pool import ThreadPool
from kukri.kernels.types import ByteArray, Weight
from kukri.mapped_files import release_pages
from kukri.quant.per_token import row_sums


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """Rows of one or more weights of one type as weight tiles: uint8, 16 rows a tile, padded with zeros."""

    type_name: str
    panel: PanelKind  # the form that activations take
    tiles: ByteArray
    n_rows: int
    n_row_tiles: int
    n_blocks: int


def layout_of(weight: Weight) -> TileLayout:
    """The tile layout of a weight's type. Raises MissingKernelError naming the types that run."""
    layout = LAYOUTS.get(weight.type.name)
    if layout is None:
        raise MissingKernelError(
            f"the CPU backend has no kernel for {weight.type.name} ({weight.name}): "
            f"it runs {', '.join(LAYOUTS)}"
        )
    return layout


def pack(weights: Sequence[Weight], pool: ThreadPool) -> PackedWeight:
    """Weight tiles for weights of one type and input width, rows one after the other.

    Pages of mapped files that were read are given back, so that a model does not lie in memory twice.
    """
    layout = layout_of(weights[0])
    n_rows = sum(w.shape[0] for w in weights)
    n_row_tiles = -(-n_rows // ROWS)
    n_blocks = weights[0].shape[1] // layout.block_size
    per_token = weights[0].per_token and weights[0].type.name == PER_TOKEN_TYPE
    blocks_bytes = n_blocks * layout.tile_block_bytes
    tile_bytes = blocks_bytes + (ROW_SUM_BYTES if per_token else 0)
    tiles = aligned_zeros(n_row_tiles * tile_bytes)
    data = [np.ascontiguousarray(w.data) for w in weights]
    zero_row = np.zeros(max(data[0].shape[1], 64), np.uint8)
    addresses = np.full(n_row_tiles * ROWS, address_of(zero_row), np.int64)
    start = 0
    for rows in data:
        addresses[start : start + len(rows)] = address_of(rows) + np.arange(len(rows)) * rows.shape[1]
        start += len(rows)
    pool.run_kernel(
        "pack",
        row_addresses=address_of(addresses),
        n_row_tiles=n_row_tiles,
        n_blocks=n_blocks,
        block_bytes=layout.block_bytes,
        word=layout.word,
        n_words=layout.n_words,
        bit_word=layout.bit_word,
        half=layout.half,
        n_halves=layout.n_halves,
        out=address_of(tiles),
        tile_bytes=tile_bytes,
    )
    if per_token:
        sums = np.zeros((n_row_tiles, ROWS), np.float32)
        sums.reshape(-1)[:n_rows] = np.concatenate([row_sums(rows) for rows in data])
        tiles.reshape(n_row_tiles, tile_bytes)[:, blocks_bytes:] = sums.view(np.uint8)
    for w in weights:
        release_pages(w.data)
    panel: PanelKind = "q8t" if per_token else layout.panel
    return PackedWeight(weights[0].type.name, panel, tiles, n_rows, n_row_tiles, n_blocks)
