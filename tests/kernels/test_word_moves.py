"""Words of a tile, made by the moves of bits that packing takes from the facts of a weight type."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.kernels.cpu.pack.layouts import LAYOUTS, ROWS
from kukri.kernels.cpu.pack.word_moves import word_moves
from kukri.quant.blocks import block_quants
from kukri.quant.types.schema import Block

IN_BLOCKS = [name for name, layout in LAYOUTS.items() if layout.block]


def moved(layout, words, is_for_matrix):
    """The words uint32 [16, words] of a tile's block, of those of 16 rows in the file's order."""
    lane = np.arange(ROWS)
    vectors = np.concatenate([words.T, words[lane >> 1].T, words[8 + (lane >> 1)].T])
    moves, masks, _ = word_moves(layout, is_for_matrix)
    made = np.zeros((layout.n_words, ROWS), np.uint32)
    for (source, target, right, left), mask in zip(
        moves.astype(np.uint32), masks.view(np.uint32), strict=True
    ):
        made[target] |= vectors[source] >> right << left & mask
    return np.ascontiguousarray(made.T)


@pytest.mark.parametrize("is_for_matrix", [False, True])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_tile_has_each_quant_where_its_type_says(name, is_for_matrix):
    """Catches lost bits, and in tiles for matrix products of int8 another row's quants or another group's."""
    layout = LAYOUTS[name]
    block = layout.block
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, layout.block_bytes), np.uint8)
    part = slice(layout.word, layout.word + 4 * layout.n_words)
    tile = moved(layout, np.ascontiguousarray(rows[:, part]).view(np.uint32), is_for_matrix).view(np.uint8)
    if block.tile:
        found = block_quants(tile, Block(block.tile.struct, block.tile.quants))
    else:
        in_file = rows.copy()
        in_file[:, part] = tile
        found = block_quants(in_file, block)
    want = block_quants(rows, block)
    if is_for_matrix:
        groups, lane = want.reshape(ROWS, -1, 2, 4), np.arange(ROWS)
        of_both = [groups[row, :, lane & 1] for row in (lane >> 1, 8 + (lane >> 1))]
        want = np.stack(of_both, axis=2).reshape(ROWS, -1)
    np.testing.assert_array_equal(found, want)
