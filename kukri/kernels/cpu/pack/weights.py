"""Packs weights into tiles when a plan first uses them (layouts.py says how a tile looks)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.errors import MissingKernelError
from kukri.host.mapped_files import release_pages
from kukri.kernels.arrays import ByteArray
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.pack.layouts import (
    I16_TILES,
    LAYOUTS,
    PER_TOKEN_TYPE,
    ROW_SUM_BYTES,
    ROWS,
    PanelKind,
    TileLayout,
)
from kukri.kernels.cpu.pack.word_moves import word_moves
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.cpu.run.pool import ThreadPool
from kukri.kernels.weight_handles import Experts, Weight
from kukri.quant.per_token import row_sums
from kukri.quant.types import RUN


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """Rows of one or more weights of one type as weight tiles: uint8, 16 rows a tile, padded with zeros.

    Of experts the tiles are [experts, bytes], and the rest counts those of one.
    """

    type_name: str
    panel: PanelKind  # the form that activations take
    tiles: ByteArray
    n_rows: int
    n_row_tiles: int
    n_blocks: int


def form_of(weight: Weight) -> str:
    """The name of the type, or form of it, that a weight's tiles have."""
    if weight.as_int16 and weight.type.block_bytes == 2 and weight.shape[1] % ROWS == 0:
        return I16_TILES
    return weight.type.tiles.name


def layout_of(weight: Weight) -> TileLayout:
    """The layout of a weight's tiles. Raises MissingKernelError naming the types that run."""
    layout = LAYOUTS.get(form_of(weight))
    if layout is None:
        raise MissingKernelError(
            f"the weight type {weight.type.name} ({weight.name}) is not supported by the CPU backend: use "
            f"{', '.join(RUN)}"
        )
    return layout


def pack(weights: Sequence[Weight], pool: ThreadPool) -> PackedWeight:
    """Weight tiles for weights of one type and input width, rows one after the other.

    Pages of mapped files that were read are given back, so that a model does not lie in memory twice.
    """
    packed = _pack([weights], pool)
    return replace(packed, tiles=packed.tiles.reshape(-1))


def pack_experts(experts: Sequence[Experts], pool: ThreadPool) -> PackedWeight:
    """Weight tiles for experts of one type, number and input width: of each expert, rows one after the other.

    Gives pages back as `pack` does.
    """
    return _pack(list(zip(*(each.weights for each in experts), strict=True)), pool)


def _pack(groups: Sequence[Sequence[Weight]], pool: ThreadPool) -> PackedWeight:
    """The tiles of each group's rows, uint8 [groups, bytes]. Groups are alike in shapes and types."""
    first = groups[0][0]
    layout, n_rows = layout_of(first), sum(w.shape[0] for w in groups[0])
    n_row_tiles, n_blocks = -(-n_rows // ROWS), -(-first.shape[1] // layout.block_size)
    per_token = first.per_token and first.type.name == PER_TOKEN_TYPE
    blocks_bytes = n_blocks * layout.tile_block_bytes
    tile_bytes = blocks_bytes + (ROW_SUM_BYTES if per_token else 0)
    tiles = aligned_zeros(len(groups) * n_row_tiles * tile_bytes).reshape(len(groups), -1)
    stored = [[in_blocks_of_tiles(w, pool) for w in weights] for weights in groups]
    zero_row = np.zeros(max(stored[0][0].shape[1], 64), np.uint8)
    addresses = np.full((len(groups), n_row_tiles * ROWS), address_of(zero_row), np.int64)
    sums = np.zeros(addresses.shape if per_token else (0, 0), np.float32)
    for group, weights in enumerate(groups):
        start = 0
        for rows, weight in zip(stored[group], weights, strict=True):
            stop = start + len(rows)
            order = np.arange(len(rows)) if weight.row_order is None else weight.row_order
            addresses[group, start:stop] = address_of(rows) + order * rows.shape[1]
            if per_token:
                sums[group, start:stop] = row_sums(rows)[order]
            start = stop
    moves, masks, flip = word_moves(layout, cpu_target().has_int8_matrix)
    pool.run_kernel(
        "pack",
        row_addresses=address_of(addresses),
        n_row_tiles=len(groups) * n_row_tiles,
        n_blocks=n_blocks,
        block_bytes=layout.block_bytes,
        word=layout.word,
        n_words=layout.n_words,
        moves=address_of(moves),
        masks=address_of(masks),
        n_moves=len(moves),
        flip=flip,
        half=layout.half,
        n_halves=layout.n_halves,
        exponent=layout.exponent,
        out=address_of(tiles),
        tile_bytes=tile_bytes,
    )
    if per_token:
        tiles.reshape(-1, tile_bytes)[:, blocks_bytes:] = sums.reshape(-1, ROWS).view(np.uint8)
    for weights in groups:
        for w in weights:
            release_pages(w.stored)
    panel: PanelKind = "q8t" if per_token else layout.panel
    return PackedWeight(form_of(first), panel, tiles, n_rows, n_row_tiles, n_blocks)


def in_blocks_of_tiles(weight: Weight, pool: ThreadPool) -> ByteArray:
    """The stored rows, recoded if tiles are made of other blocks."""
    rows, (n_rows, n_columns) = np.ascontiguousarray(weight.stored), weight.shape
    if form_of(weight) == weight.type.name:
        return rows
    layout = layout_of(weight)
    into = np.empty((n_rows, -(-n_columns // layout.block_size) * layout.block_bytes), np.uint8)
    sizes = {"n_blocks": rows.size // weight.type.block_bytes}
    if weight.type.block is None:
        sizes = {"n_rows": n_rows, "n_columns": n_columns}
    pool.run_kernel(f"recode_{weight.type.name}", source=address_of(rows), into=address_of(into), **sizes)
    return into
