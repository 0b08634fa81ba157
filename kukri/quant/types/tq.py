"""TQ2_0 and TQ1_0, for ternary models (BitNet): 256 weights -d, 0 or d, of 2 bits or in base 3."""

from kukri.quant.types.schema import Bits, Block, QuantType, TileWords, Trits, struct_of

TQ2_0 = QuantType(
    *("TQ2_0", 35, 256, 66),
    Block(
        struct_of(("q", "u1", 64), ("d", "<f2")),
        (Bits("q", 2, run=32),),
        offset=1,
        tile=TileWords(struct_of(("q", "u1", 64)), (Bits("q", 2, run=4),)),
    ),
    file_type=37,
    stand_in="Q4_0",
    embedding="Q4_K",
)
TQ1_0 = QuantType(
    *("TQ1_0", 34, 256, 54),
    Block(
        struct_of(("q", "u1", 32), ("r", "u1", 16), ("s", "u1", 4), ("d", "<f2")),
        (Trits("q", 5, run=32), Trits("r", 5, run=16, first=160), Trits("s", 4, run=4, first=240)),
        offset=1,
        tiles=TQ2_0,
    ),
    file_type=36,
    stand_in="Q4_0",
    embedding="Q4_K",
)
