"""Q6_K: 256 weights in 16 groups, d s (q - 32); q of 6 bits, s of 8, signed."""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

Q6_K = QuantType(
    *("Q6_K", 14, 256, 210),
    Block(
        struct_of(("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
        (Bits("q", 4, run=64), Bits("high", 2, run=32, left=4)),
        offset=32,
        scales=(Bits("scales", 8),),
        packed_like="Q6_K",
    ),
    file_type=18,
    stand_in="Q8_0",
)
