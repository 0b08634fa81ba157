"""The weight types of GGML, as one table. Names and ids are GGML's (ggml.h, enum ggml_type)."""

from __future__ import annotations

from kukri.quant.types.fp4 import MXFP4, NVFP4, NVFP4_TILES
from kukri.quant.types.iq1 import IQ1_M, IQ1_S, IQ1_TILES
from kukri.quant.types.iq2 import IQ2_S, IQ2_TILES, IQ2_XS, IQ2_XXS
from kukri.quant.types.iq3 import IQ3_S, IQ3_S_TILES, IQ3_XXS, IQ3_XXS_TILES
from kukri.quant.types.iq4 import IQ4_NL, IQ4_XS
from kukri.quant.types.q2_0 import Q1_0, Q2_0
from kukri.quant.types.q2_k import Q2_K
from kukri.quant.types.q3_k import Q3_K
from kukri.quant.types.q4_0 import Q4_0, Q5_0
from kukri.quant.types.q4_1 import Q4_1, Q5_1
from kukri.quant.types.q4_k import Q4_K, Q5_K
from kukri.quant.types.q6_k import Q6_K
from kukri.quant.types.q8_0 import Q8_0
from kukri.quant.types.schema import QuantType as QuantType
from kukri.quant.types.tq import TQ1_0, TQ2_0

FLOATS = (
    QuantType("F32", 0, 1, 4, file_type=0),
    QuantType("F16", 1, 1, 2, file_type=1),
    QuantType("BF16", 30, 1, 2, file_type=32),
)
# the types in blocks that run: types with a quantizer, and types that are only read
WRITTEN = (
    *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS),
    *(Q1_0, Q2_0, TQ1_0, TQ2_0),
)
PACKED = (*WRITTEN, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, NVFP4)
RUN = tuple(type.name for type in (*FLOATS, *PACKED))
# the forms in which the CPU packs some of them
TILES = (IQ1_TILES, IQ2_TILES, IQ3_XXS_TILES, IQ3_S_TILES, NVFP4_TILES)
_OTHERS = (
    QuantType("Q8_1", 9, 32, 36),
    QuantType("Q8_K", 15, 256, 292),
    QuantType("I8", 24, 1, 1),
    QuantType("I16", 25, 1, 2),
    QuantType("I32", 26, 1, 4),
    QuantType("I64", 27, 1, 8),
    QuantType("F64", 28, 1, 8),
)

QUANT_TYPES: dict[str, QuantType] = {t.name: t for t in (*FLOATS, *PACKED, *_OTHERS)}
QUANT_TYPES_BY_ID: dict[int, QuantType] = {t.ggml_id: t for t in QUANT_TYPES.values()}


def fitting_type(type: QuantType, n_columns: int) -> QuantType | None:
    """The type, or the one that stands in for it, of which a row is whole blocks; None if there is none."""
    for fitting in (type, QUANT_TYPES[type.stand_in or type.name]):
        if n_columns % fitting.block_size == 0:
            return fitting
    return None
