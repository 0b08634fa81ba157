"""IQ3_XXS and IQ3_S: 256 weights in 8 groups, d (2 s + 1) value; four quants at a time from a table.

Values are of eight sizes, with signs: of IQ3_XXS a code for eight weights, whose number of signs is even.
"""

from kukri.quant.types import grids
from kukri.quant.types.iq4 import SCALES_XS, STRUCT_XS
from kukri.quant.types.schema import Bits, Block, Codebook, QuantType, struct_of


def _tiles(name: str, sizes: tuple[int, ...], factor: float) -> QuantType:
    """IQ4_XS with other values: quants of 4 bits, of which the top one is the sign."""
    values = (*sizes, *(-size for size in sizes))
    quants = (Bits("q", 4, run=16),)
    block = Block(STRUCT_XS, quants, values, factor=factor, scales=SCALES_XS, plus=-32)
    return QuantType(f"{name}_TILES", -1, 256, 136, block)


IQ3_XXS_TILES = _tiles("IQ3_XXS", (2, 6, 10, 14, 18, 22, 26, 31), 0.5)
IQ3_S_TILES = _tiles("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15), 1.0)

_XXS_GROUP = (Bits("groups", 7, n=4), Bits("groups", 4, start=28))
IQ3_XXS = QuantType(
    *("IQ3_XXS", 18, 256, 98),
    Block(
        struct_of(("d", "<f2"), ("q", "u1", 64), ("groups", "<u4", 8)),
        Codebook(grids.IQ3_XXS, (Bits("q", 8),), _XXS_GROUP[:1], 8, sign=8, has_codes=True),
        IQ3_XXS_TILES.layout.values,
        factor=0.5,
        scales=_XXS_GROUP[1:],
        times=2,
        plus=1,
        tiles=IQ3_XXS_TILES,
    ),
)
IQ3_S = QuantType(
    *("IQ3_S", 21, 256, 110),
    Block(
        struct_of(("d", "<f2"), ("q", "u1", 64), ("high", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)),
        Codebook(grids.IQ3_S, (Bits("q", 8), Bits("high", 1, left=8)), (Bits("signs", 1),), 1, sign=8),
        IQ3_S_TILES.layout.values,
        scales=(Bits("scales", 4),),
        times=2,
        plus=1,
        tiles=IQ3_S_TILES,
    ),
)
