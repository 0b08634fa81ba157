"""IQ2_XXS, IQ2_XS and IQ2_S: 256 weights, d (2 s + 1) value / 8; eight quants at a time from a table.

Values are of three sizes, with signs: of IQ2_XXS and IQ2_XS a code for eight weights, whose number of signs
is even. Groups have 16 weights, of IQ2_XXS 32.
"""

from typing import Any

import numpy as np

from kukri.quant.types import grids, q3_k
from kukri.quant.types.schema import Bits, Block, Codebook, Numbers, QuantType, struct_of

_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)

# Q3_K with other values: quants of 3 bits, of which the top one is the sign
IQ2_TILES = QuantType(
    *("IQ2_TILES", -1, 256, 110),
    Block(
        *(q3_k.STRUCT, q3_k.QUANTS, _VALUES),
        factor=0.125,
        scales=q3_k.SCALES,
        plus=-32,
        tile=q3_k.TILE,
    ),
)


def _block(struct: np.dtype[Any], book: Codebook, scales: Numbers) -> Block:
    return Block(struct, book, _VALUES, factor=0.125, scales=scales, times=2, plus=1, tiles=IQ2_TILES)


IQ2_XXS = QuantType(
    *("IQ2_XXS", 16, 256, 66),
    _block(
        struct_of(("d", "<f2"), ("groups", [("q", "u1", 4), ("signs", "<u4")], 8)),
        Codebook(
            grids.IQ2_XXS, (Bits("groups.q", 8),), (Bits("groups.signs", 7, n=4),), 8, sign=4, has_codes=True
        ),
        (Bits("groups.signs", 4, start=28),),
    ),
)
IQ2_XS = QuantType(
    *("IQ2_XS", 17, 256, 74),
    _block(
        struct_of(("d", "<f2"), ("q", "<u2", 32), ("scales", "u1", 8)),
        Codebook(grids.IQ2_XS, (Bits("q", 9),), (Bits("q", 7, start=9),), 8, sign=4, has_codes=True),
        (Bits("scales", 4),),
    ),
)
IQ2_S = QuantType(
    *("IQ2_S", 22, 256, 82),
    _block(
        struct_of(("d", "<f2"), ("q", "u1", 32), ("signs", "u1", 32), ("high", "u1", 8), ("scales", "u1", 8)),
        Codebook(grids.IQ2_S, (Bits("q", 8), Bits("high", 2, left=8)), (Bits("signs", 1),), 1, sign=4),
        (Bits("scales", 4),),
    ),
)
