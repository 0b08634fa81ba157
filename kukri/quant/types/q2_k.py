"""Q2_K: 256 weights in 16 groups, d s q - m t; q of 2 bits, s and t of 4."""

from kukri.quant.types.schema import Bits, Block, QuantType, TileWords, struct_of

Q2_K = QuantType(
    *("Q2_K", 10, 256, 84),
    Block(
        struct_of(("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("m", "<f2")),
        (Bits("q", 2, run=32),),
        scales=(Bits("scales", 4, n=1),),
        minimum=(Bits("m", 16),),
        minimums=(Bits("scales", 4, start=4),),
        # two bytes for the first halves of two groups, then two for the last halves
        tile=TileWords(
            struct_of(("scales", "<u2", 8), ("q", "u1", 64)),
            (Bits("q", 2, run=4),),
            scales=(Bits("scales", 4, step=8, run=2),),
            minimums=(Bits("scales", 4, start=4, step=8, n=2, run=2),),
        ),
    ),
    file_type=10,
    stand_in="Q4_0",
)
