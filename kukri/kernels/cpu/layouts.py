"""Byte layouts that packing, kernels and plans agree on: plain numbers, readable without a compiler.

Weights are packed into *weight tiles* of 16 output rows. A tile holds, block after block along the input,

    n_words x 16 x 4 bytes   word j of row 0, word j of row 1, … (quants, 4 bytes of a row side by side)
    n_halves x 16 x 2 bytes  scales and mins, one float16 per row

so that one 64-byte load serves 16 rows, lanes are rows, and no sum ever runs across lanes.

Activations come in *panels* of 8 tokens. For int8 ("q8") a panel holds per block of 32 inputs

    8 x 8 x 4 bytes   inputs 4g to 4g + 3 of token 0, of token 1, … for g = 0 to 7 (int8)
    8 x 4 bytes       scale s of each token (float32): x is about s * int8
    8 x 4 bytes       s * sum of the block's int8, for weights with a min (float32)
    8 x 4 bytes       -(sum of the block's int8), for weights with an offset (int32)

A panel of two terms ("q8x2") has, per block, a second such record: what the first left over, quantized
again. The rows that become logits are taken so: their error would reach the logits undamped.

For float weights ("f32") a panel is 8 x 4 bytes per input: that input of each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ROWS = 16  # output rows of a weight tile
TOKENS = 8  # tokens of an activation panel

Q8_BLOCK = 32
Q8_SCALES = 256
Q8_SCALED_SUMS = 288
Q8_NEGATIVE_SUMS = 320
Q8_BLOCK_BYTES = 352
F32_INPUT_BYTES = 4 * TOKENS

PanelKind = Literal["q8", "q8x2", "f32"]


@dataclass(frozen=True)
class TileLayout:
    """How one weight type is packed: where a block's 4-byte words and float16s lie in the file."""

    block_size: int  # inputs of a block
    block_bytes: int  # of one row, in the file
    words: tuple[int, ...]  # byte offsets of 4-byte words
    halves: tuple[int, ...]  # byte offsets of 2-byte values
    panel: PanelKind  # the form activations take

    @property
    def tile_block_bytes(self) -> int:
        """Bytes of one block of a weight tile: what the file has for these 16 rows."""
        return ROWS * (4 * len(self.words) + 2 * len(self.halves))


LAYOUTS: dict[str, TileLayout] = {
    "F32": TileLayout(1, 4, words=(0,), halves=(), panel="f32"),
    "F16": TileLayout(1, 2, words=(), halves=(0,), panel="f32"),
    "BF16": TileLayout(1, 2, words=(), halves=(0,), panel="f32"),
    "Q4_0": TileLayout(32, 18, words=(2, 6, 10, 14), halves=(0,), panel="q8"),
    "Q4_1": TileLayout(32, 20, words=(4, 8, 12, 16), halves=(0, 2), panel="q8"),
    "Q8_0": TileLayout(32, 34, words=tuple(range(2, 34, 4)), halves=(0,), panel="q8"),
}


def panel_bytes(kind: PanelKind, n_inputs: int) -> int:
    """Bytes of one panel of 8 tokens."""
    if kind == "f32":
        return n_inputs * F32_INPUT_BYTES
    return n_inputs // Q8_BLOCK * Q8_BLOCK_BYTES * (2 if kind == "q8x2" else 1)
