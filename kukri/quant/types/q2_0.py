"""Q2_0 and Q1_0, for models trained with so few bits (Bonsai).

Q2_0: 64 weights d * (q - 1), of 2 bits, of which ternary models use three. Q1_0: 128 weights, d or -d.
"""

from kukri.quant.types.schema import Bits, Block, QuantType, TileWords, struct_of


def _tile(n_bits: int) -> TileWords:
    return TileWords(struct_of(("q", "u1", 16)), (Bits("q", n_bits, run=4),))


Q2_0 = QuantType(
    *("Q2_0", 42, 64, 18),
    Block(struct_of(("d", "<f2"), ("q", "u1", 16)), (Bits("q", 2),), offset=1, tile=_tile(2)),
    file_type=41,
    stand_in="Q4_0",
    embedding="Q4_K",
)
Q1_0 = QuantType(
    *("Q1_0", 41, 128, 18),
    Block(struct_of(("d", "<f2"), ("q", "u1", 16)), (Bits("q", 1),), (-1, 1), tile=_tile(1)),
    file_type=40,
)
