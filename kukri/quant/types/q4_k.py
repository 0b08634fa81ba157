"""Q4_K and Q5_K: 256 weights in 8 groups, d s q - m t; q of 4 or 5 bits, s and t of 6."""

from kukri.quant.types.q4_0 import FIVE_WORDS, five_bits
from kukri.quant.types.schema import Bits, Block, QuantType, TileWords, struct_of

# the first four scales and minimums in the low 6 bits of their bytes; of the last four the low 4 bits lie
# together and the top 2 above the bits of the first
_STEPS = (("s", "u1", 4), ("t", "u1", 4), ("low", "u1", 4))
_HEAD = (("d", "<f2"), ("m", "<f2"), *_STEPS)
_SCALES = (
    Bits("s", 6),
    Bits("low", 4, n=1, first=4),
    Bits("s", 2, start=6, left=4, first=4),
)
_MINIMUMS = (
    Bits("t", 6),
    Bits("low", 4, start=4, first=4),
    Bits("t", 2, start=6, left=4, first=4),
)

Q4_K = QuantType(
    *("Q4_K", 12, 256, 144),
    Block(
        struct_of(*_HEAD, ("q", "u1", 128)),
        (Bits("q", 4, run=32),),
        scales=_SCALES,
        minimum=(Bits("m", 16),),
        minimums=_MINIMUMS,
        tile=TileWords(
            struct_of(*_STEPS, ("q", "u1", 128)), (Bits("q", 4, run=16),), scales=_SCALES, minimums=_MINIMUMS
        ),
    ),
    stand_in="Q5_0",
)
Q5_K = QuantType(
    *("Q5_K", 13, 256, 176),
    Block(
        struct_of(*_HEAD, ("high", "u1", 32), ("q", "u1", 128)),
        (Bits("q", 4, run=32), Bits("high", 1, run=32, left=4)),
        scales=_SCALES,
        minimum=(Bits("m", 16),),
        minimums=_MINIMUMS,
        tile=TileWords(
            struct_of(*_STEPS, *((f"g{i}", FIVE_WORDS) for i in range(8))),
            tuple(part for i in range(8) for part in five_bits(f"g{i}", 32 * i)),
            scales=_SCALES,
            minimums=_MINIMUMS,
        ),
        is_slow_to_unpack=True,
    ),
    stand_in="Q5_1",
)
