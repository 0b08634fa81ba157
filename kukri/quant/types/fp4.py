"""MXFP4 and NVFP4: quants are floats of 2 exponent bits and 1 of fraction (OCP Microscaling Formats 1.0).

MXFP4: 32 weights 2^(e - 128) * value. NVFP4: 64 in 4 groups, d value / 2; d has 4 exponent bits and 3 of
fraction.
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

_BYTES = np.arange(256)
_FRACTIONS, _EXPONENTS = _BYTES & 7, _BYTES >> 3 & 15
# halved, as values are doubled; 0x7F is not a number, and GGML takes it for 0
_SCALES = np.where(_EXPONENTS == 0, _FRACTIONS / 2.0**10, (8 + _FRACTIONS) * 2.0 ** (_EXPONENTS - 11)).astype(
    np.float32
)
_SCALES[0x7F] = 0

NVFP4_TILES = QuantType(
    *("NVFP4_TILES", -1, 64, 40),  # d as float16, which it is exactly
    Block(struct_of(("d", "<f2", 4), ("q", "u1", 32)), (Bits("q", 4, run=8),), FP4_VALUES),
)
NVFP4 = QuantType(
    *("NVFP4", 40, 64, 36),
    Block(
        struct_of(("d", "u1", 4), ("q", "u1", 32)),
        (Bits("q", 4, run=8),),
        FP4_VALUES,
        scale=(Bits("d", 8),),
        scale_values=_SCALES,
        tiles=NVFP4_TILES,
    ),
)
