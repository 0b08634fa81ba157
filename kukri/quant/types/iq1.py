"""IQ1_S and IQ1_M: 256 weights, d (2 s + 1) (-1, 0 or 1, plus or minus 1/8); eight quants from a table.

The eighth is added or subtracted for the 32 weights of a group of IQ1_S, and for each 8 of IQ1_M, whose
groups have 16.
"""

from kukri.quant.types import grids, q3_k
from kukri.quant.types.schema import Bits, Block, Codebook, QuantType, struct_of

_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)

# Q3_K with other values: quants of 3 bits, of which the top one is the sign of the eighth
IQ1_TILES = QuantType(
    *("IQ1_TILES", -1, 256, 110),
    Block(
        *(q3_k.STRUCT, q3_k.QUANTS, _VALUES),
        factor=0.125,
        scales=q3_k.SCALES,
        plus=-32,
        tile=q3_k.TILE,
    ),
)
IQ1_S = QuantType(
    *("IQ1_S", 19, 256, 50),
    Block(
        struct_of(("d", "<f2"), ("q", "u1", 32), ("high", "<u2", 8)),
        Codebook(
            grids.IQ1_S,
            (Bits("q", 8), Bits("high", 3, n=4, left=8)),
            (Bits("high", 1, start=15),),
            32,
            sign=4,
        ),
        _VALUES,
        factor=0.125,
        scales=(Bits("high", 3, start=12),),
        times=2,
        plus=1,
        tiles=IQ1_TILES,
    ),
)
IQ1_M = QuantType(
    *("IQ1_M", 29, 256, 56),
    Block(
        struct_of(("q", "u1", 32), ("high", "u1", 16), ("scales", "<u2", 4)),
        Codebook(
            grids.IQ1_S,
            (Bits("q", 8), Bits("high", 3, step=4, left=8)),
            (Bits("high", 1, start=3, step=4, n=2),),
            *(8, 4),
        ),
        _VALUES,
        factor=0.125,
        # the four top bits of each, together
        scale=tuple(Bits(f"scales.{i}", 4, start=12, left=4 * i) for i in range(4)),
        scales=(Bits("scales", 3, n=4),),
        times=2,
        plus=1,
        tiles=IQ1_TILES,
    ),
)
