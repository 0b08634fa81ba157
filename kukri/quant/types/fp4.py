"""MXFP4: quants that are floats of 2 exponent bits and 1 of fraction (OCP Microscaling Formats 1.0).

MXFP4: 32 weights 2^(e - 128) * value.
"""

import numpy as np

from kukri.quant.types.schema import Bits, Block, QuantType, struct_of

FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
POWERS = np.ldexp(np.float32(1), np.arange(256) - 128)

MXFP4 = QuantType(
    *("MXFP4", 39, 32, 17),
    Block(
        struct_of(("e", "u1"), ("q", "u1", 16)),
        (Bits("q", 4, run=16),),
        FP4_VALUES,
        scale=(Bits("e", 8),),
        scale_values=POWERS,
    ),
)
