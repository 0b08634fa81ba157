"""Byte layouts that packing, kernels and plans agree on: plain numbers, readable without a compiler.

Weights are packed into *weight tiles* of 16 output rows. A tile holds, block after block along the input,

    n_words x 16 x 4 bytes   word j of row 0, word j of row 1, … (quants, 4 bytes of a row side by side,
                             in the order in which they are multiplied)
    n_halves x 16 x 2 bytes  scales and mins, one float16 per row
    16 bytes                 exponents of scales, one byte per row, of types that have them

so that one 64-byte load serves 16 rows, lanes are rows, and no sum ever runs across lanes.

Activations come in *panels* of up to 8 tokens. A panel is W tokens wide: those in it, rounded up to 1, 2, 4
or 8, so that a single token's inputs fill no more cache lines than they must. Panels begin as far apart as if
all were 8 wide. For int8 ("q8") a panel holds per block of 32 inputs

    8 x W x 4 bytes   inputs 4g to 4g + 3 of token 0, of token 1, … for g = 0 to 7 (int8)
    W x 4 bytes       scale s of each token (float32): x is about s * int8
    W x 4 bytes       s * sum of the block's int8, for weights with a min (float32)
    W x 4 bytes       -(sum of the first 16 int8) and of the last 16 (int16), for weights with an offset
    W x 4 bytes       both together (int32)
    2 x W x 4 bytes   the bits of the float 1.5 * 2^23 less 32 times the sum of the first 16, and then of the
                      last (int32): what sums of weights kept as q + 32 begin with (tile_folds.py)

Rows that become logits are taken more exactly: their error would reach the logits undamped. Where the CPU has
an int8 dot product, they are taken in two terms ("q8x2"): the panel is twice as wide, and after each token
comes what quantizing it left over, quantized again as if it were a token. So a weight is read and unpacked
once for both. Elsewhere they are int16 ("q16"), which takes half as many instructions:

    8 x W x 4 bytes   inputs 4g and 4g + 2 of token 0, of token 1, … for g = 0 to 7 (int16)
    W x 16 bytes      scales and sums, as the first four above, but for -(sum of the first 16) and of the last
                      16, both int32
    8 x W x 4 bytes   inputs 4g + 1 and 4g + 3, likewise

A panel with one scale and zero point a token ("q8t", `kukri.quant.per_token`) has these blocks, with the
token's scale in each, and after the last block

    W x 4 bytes       -scale * zero of each token (float32)

which meets what a weight tile for such panels has after its last block

    16 x 4 bytes      the sum of each row's weights (float32)

ARM's i8mm multiplies 8 bytes of a row and of a token (tile_products.py). For it, int8 panels have columns
of 8 bytes: inputs 8p to 8p + 7 of token 0, of token 1, … for p = 0 to 3, then two scales of each token, then
its negative sums, two and two; a tail has 8 bytes for a token, too. Tiles are packed as if there were 16
other rows, whose quants are words of the real ones: in lane i, words 2p and 2p + 1 are both word
2p + (i & 1), of row i >> 1 and of row 8 + (i >> 1). Scales stay those of the real rows.

For float weights ("f32") a panel is just W x 4 bytes per input: that input of each token.

F16 and BF16 weights that ask for it (`Weight.as_int16`) are multiplied as int16 instead, twice as many at a
time: blocks of 64, the last filled with zeros, of whole numbers so small that 64 products fit into an int32.
A tile has 32 words of two of them, then a float32 scale, for each row: a power of two, so that numbers of 8
bits (BF16, or F16 made of it) stay as they are unless they are small. Panels for it ("i16") have per block

    32 x W x 4 bytes  inputs 2j and 2j + 1 of token 0, of token 1, … for j = 0 to 31 (int16)
    W x 4 bytes       scale of each token (float32)
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from kukri.dataclass import dataclass
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.quant.types import FLOATS, PACKED, TILES, QuantType
from kukri.quant.types.schema import Block

ROWS = 16  # output rows of a weight tile
TOKENS = 8  # tokens of a full activation panel
ROW_SUM_BYTES = 4 * ROWS

# Bytes of a panel for each token of its width
Q8_BLOCK = 32
GROUP = 4  # from one group of 4 inputs to the next
SCALES = 32
SCALED_SUMS = 36
NEGATIVE_SUMS = 40  # sums of the halves of a q8 block, or of the first half of a q16 block
NEGATIVE_TOTAL = LAST_NEGATIVE_SUMS = 44  # the sum of a q8 block, or those of the last half of a q16 block
HALF_STARTS = 48, 52  # what sums of both halves of a q8 block begin with
RAISED_BITS = 0x4B400000  # the float 1.5 * 2^23
Q8_BLOCK_BYTES = 56
ODD_INPUTS = 48  # in a q16 block
Q16_BLOCK_BYTES = 80
F32_INPUT_BYTES = 4

I16_BLOCK = 64
I16_MOST = 8191  # the largest number of a block of inputs; of weights 4096: 64 products fit into int32
I16_WEIGHT_BITS = 12
I16_SCALES = 128  # in a block of a panel, for each token of its width, and of a row
I16_BLOCK_BYTES = 132
I16_TILES = "I16_TILES"  # the form of these

PanelKind = Literal["q8", "q8x2", "q16", "q8t", "f32", "i16"]
PER_TOKEN_TYPE = "Q4_0"  # the weight type that q8t panels are for


@dataclass(frozen=True)
class TileLayout:
    """The packing of one weight type. A block in the file is a run of 4-byte words and a run of float16s."""

    block_size: int  # inputs of a block
    block_bytes: int  # bytes of one row, in the file
    word: int = 0  # byte offset of the first word
    n_words: int = 0
    half: int = 0  # byte offset of the first float16
    n_halves: int = 0
    exponent: int = -1  # byte offset of a scale's exponent
    panel: PanelKind = "q8"  # the form activations take
    block: Block | None = None  # the facts of a type in blocks

    @property
    def tile_block_bytes(self) -> int:
        """Bytes of one block of a weight tile: the file's bytes of these 16 rows."""
        return ROWS * (4 * self.n_words + 2 * self.n_halves + (self.exponent >= 0))


def _layout(type: QuantType) -> TileLayout:
    """The packing of a type whose struct has its fields of 2 bytes side by side, first or last."""
    if type.block is None:  # floats
        n_words = type.block_bytes // 4
        return TileLayout(1, type.block_bytes, n_words=n_words, n_halves=1 - n_words, panel="f32")
    fields = [(kind, at) for kind, at, *_ in (type.block.struct.fields or {}).values()]
    exponent = next((at for kind, at in fields if kind == np.uint8), -1)
    halves = [(at, kind.itemsize // 2) for kind, at in fields if kind.base.itemsize == 2]
    n_halves = sum(n for _, n in halves)
    word = min(at for kind, at in fields if kind.base.itemsize == 1 and at != exponent)
    return TileLayout(
        type.block_size,
        type.block_bytes,
        word,
        n_words=(type.block_bytes - 2 * n_halves - (exponent >= 0)) // 4,
        half=min(halves, default=(0, 0))[0],
        n_halves=n_halves,
        exponent=exponent,
        block=type.block,
    )


# the types and forms that have tiles
LAYOUTS = {type.name: _layout(type) for type in (*FLOATS, *PACKED, *TILES) if type.tiles is type}
LAYOUTS[I16_TILES] = TileLayout(I16_BLOCK, I16_BLOCK_BYTES, n_words=I16_BLOCK_BYTES // 4, panel="i16")


def inputs_bytes(kind: PanelKind, n_inputs: int) -> int:
    """Bytes of `n_inputs` inputs in a panel, of one term, for each token of its width."""
    if kind == "f32":
        return n_inputs * F32_INPUT_BYTES
    if kind == "i16":
        return -(-n_inputs // I16_BLOCK) * I16_BLOCK_BYTES
    return n_inputs // Q8_BLOCK * (Q16_BLOCK_BYTES if kind == "q16" else Q8_BLOCK_BYTES)


def panel_bytes(kind: PanelKind, n_inputs: int) -> int:
    """Bytes from one panel to the next: of one that is 8 tokens wide."""
    n_terms = 2 if kind == "q8x2" else 1
    tail = cpu_target().column_bytes if kind == "q8t" else 0
    return TOKENS * (n_terms * inputs_bytes(kind, n_inputs) + tail)


def linear_kernel(weight_type: str, kind: PanelKind) -> str:
    """The name of the kernel that multiplies weights of a type with panels of a kind."""
    return f"linear_{weight_type}" + ("" if kind in ("q8", "f32", "i16") else f"_{kind}")


def expert_kernel(weight_type: str, kind: PanelKind) -> str:
    """The name of the kernel that multiplies experts' weights of a type with panels of a kind."""
    return linear_kernel(weight_type, kind).replace("linear_", "expert_linear_", 1)
