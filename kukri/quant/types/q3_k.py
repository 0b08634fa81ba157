"""Q3_K: 256 weights in 16 groups, d (s - 32) (q - 4); q of 3 bits, s of 6."""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

STRUCT = struct_of(("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 8), ("tops", "u1", 4), ("d", "<f2"))
QUANTS = (Bits("q", 2, run=32), Bits("high", 1, run=32, left=2))
SCALES = (Bits("scales", 4, run=8), Bits("tops", 2, run=4, left=4))

Q3_K = QuantType(
    *("Q3_K", 11, 256, 110),
    Block(STRUCT, QUANTS, offset=4, scales=SCALES, plus=-32, packed_like="Q3_K"),
    stand_in="Q4_0",
)
