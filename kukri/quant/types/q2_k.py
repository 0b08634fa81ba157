"""Q2_K: 256 weights in 16 groups, d s q - m t; q of 2 bits, s and t of 4."""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

Q2_K = QuantType(
    *("Q2_K", 10, 256, 84),
    Block(
        struct_of(("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("m", "<f2")),
        (Bits("q", 2, run=32),),
        scales=(Bits("scales", 4, n=1),),
        minimum=(Bits("m", 16),),
        minimums=(Bits("scales", 4, start=4),),
        packed_like="Q2_K",
    ),
    file_type=10,
    stand_in="Q4_0",
)
