"""Q4_0 and Q5_0: 32 weights d * (q - 8) or d * (q - 16), of 4 or 5 bits."""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

Q4_0 = QuantType(
    *("Q4_0", 2, 32, 18),
    Block(struct_of(("d", "<f2"), ("q", "u1", 16)), (Bits("q", 4, run=16),), offset=8),
    file_type=2,
)
Q5_0 = QuantType(
    *("Q5_0", 6, 32, 22),
    Block(
        struct_of(("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
        (Bits("q", 4, run=16), Bits("high", 1, left=4)),
        offset=16,
        packed_like="Q5_0",
    ),
    file_type=8,
)
