"""How packing makes the words of a tile: each bit of a number moves to where the facts of its type put it."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import IntArray
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.pack.layouts import ROWS, TileLayout
from kukri.quant.types.schema import Numbers, TileWords, places_in

_Places = dict[tuple[int, int], int]  # (number, its bit) to the bit of a struct


class WordMoves(NamedTuple):
    """Moves of bits from a vector of words, one for each row of a tile, to another."""

    moves: IntArray  # int32 [n, 4]: the file's word, the tile's word, bits to the right, bits to the left
    masks: IntArray  # int32 [n, 16]: the bits of each row that are moved
    flip: int  # flips signs in each word, where the CPU multiplies unsigned numbers


@cache
def word_moves(layout: TileLayout, is_for_matrix: bool) -> WordMoves:
    """The moves for a block.

    Tiles for matrix products of int8 (layouts.py) are tiles of other rows. Lane i takes groups of 4 quants of
    row i >> 1, whose words follow the row's own, and of row 8 + (i >> 1), whose words are last, in turn: of
    each two groups the first or, if i is odd, the last.
    """
    block, n_bits = layout.block, 32 * layout.n_words
    if block is None:  # floats, as they are
        n = layout.n_words
        moves = np.arange(n, dtype=np.int32)[:, None] * np.array([1, 1, 0, 0], np.int32)
        return WordMoves(moves, np.full((n, ROWS), -1, np.int32), 0)
    tile = block.tile or TileWords(block.struct, block.quant_numbers, block.scales, block.minimums)
    masks: dict[tuple[int, int, int], npt.NDArray[np.uint32]] = defaultdict(lambda: np.zeros(ROWS, np.uint32))

    def move(source: int, target: int, rows: slice = slice(None)) -> None:
        target -= 0 if block.tile else 8 * layout.word  # the words are a part of the file's struct
        if 0 <= target < n_bits:
            masks[source // 32, target // 32, target % 32 - source % 32][rows] |= np.uint32(1 << target % 32)

    for numbers, moved in ((block.scales, tile.scales), (block.minimums, tile.minimums)):
        places = _places(block.struct, numbers)
        for number, target in _places(tile.struct, moved).items():
            move(places[number] - 8 * layout.word, target)
    places = _places(block.struct, block.quant_numbers)
    for (quant, bit), target in _places(tile.struct, tile.quants).items():
        if not is_for_matrix:
            move(places[quant, bit] - 8 * layout.word, target)
            continue
        is_last = quant >> 2 & 1
        for lane in (0, 1):
            source = places[quant + 4 * (lane - is_last), bit] - 8 * layout.word
            move(source + n_bits * (1 + is_last), target, slice(lane, None, 2))
    moves = np.array([(a, b, max(-left, 0), max(left, 0)) for a, b, left in masks], np.int32)
    is_signed = any(place.is_signed for place in block.places(block.quant_numbers))
    flip = 0x80808080 if is_signed and cpu_target().has_signed_bias else 0
    return WordMoves(moves, np.array([*masks.values()]).view(np.int32), flip)


def _places(struct: np.dtype[Any], numbers: Numbers) -> _Places:
    found: _Places = {}
    for place in places_in(struct, numbers):
        for j in range(place.n_units):
            chunk, i = divmod(j, place.run)
            unit = place.at + j // place.inner * place.stride + j % place.inner * place.unit
            for k, shift in enumerate(place.shifts):
                number = place.first + (chunk * len(place.shifts) + k) * place.run + i
                for bit in range(place.mask.bit_length()):
                    found[number, place.left + bit] = 8 * unit + shift + bit
    return found
