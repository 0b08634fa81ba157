"""IQ4_NL and IQ4_XS: quants of 4 bits that stand for 16 values, closer together around zero.

IQ4_NL: 32 weights d * value; IQ4_XS: 256 in 8 groups, d (s - 32) value, s of 6 bits.
"""

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
STRUCT_XS = struct_of(("d", "<f2"), ("tops", "<u2"), ("low", "u1", 4), ("q", "u1", 128))
SCALES_XS = (Bits("low", 4), Bits("tops", 2, left=4))

IQ4_NL = QuantType(
    *("IQ4_NL", 20, 32, 18),
    Block(struct_of(("d", "<f2"), ("q", "u1", 16)), (Bits("q", 4, run=16),), IQ4_VALUES),
    file_type=25,
)
IQ4_XS = QuantType(
    *("IQ4_XS", 23, 256, 136),
    Block(STRUCT_XS, (Bits("q", 4, run=16),), IQ4_VALUES, scales=SCALES_XS, plus=-32, is_slow_to_unpack=True),
    file_type=30,
    stand_in="IQ4_NL",
)
