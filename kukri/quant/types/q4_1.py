"""Q4_1 and Q5_1: 32 weights d * q + m, of 4 or 5 bits."""

from kukri.quant.types.q4_0 import TILE_5
from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

_M = (Bits("m", 16),)

Q4_1 = QuantType(
    *("Q4_1", 3, 32, 20),
    Block(struct_of(("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)), (Bits("q", 4, run=16),), minimum=_M),
    file_type=3,
)
Q5_1 = QuantType(
    *("Q5_1", 7, 32, 24),
    Block(
        struct_of(("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
        (Bits("q", 4, run=16), Bits("high", 1, left=4)),
        minimum=_M,
        tile=TILE_5,
    ),
    file_type=9,
)
