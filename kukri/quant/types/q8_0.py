"""Q8_0: 32 weights d * q, of 8 bits, signed."""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

Q8_0 = QuantType(
    *("Q8_0", 8, 32, 34),
    Block(struct_of(("d", "<f2"), ("q", "i1", 32)), (Bits("q", 8),)),
    file_type=7,
)
