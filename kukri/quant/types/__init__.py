"""The weight types of GGML, as one table. Names and ids are GGML's (ggml.h, enum ggml_type)."""

from __future__ import annotations

from kukri.quant.types.fp4 import MXFP4
from kukri.quant.types.iq4 import IQ4_NL, IQ4_XS
from kukri.quant.types.q2_k import Q2_K
from kukri.quant.types.q3_k import Q3_K
from kukri.quant.types.q4_0 import Q4_0, Q5_0
from kukri.quant.types.q4_1 import Q4_1, Q5_1
from kukri.quant.types.q4_k import Q4_K, Q5_K
from kukri.quant.types.q6_k import Q6_K
from kukri.quant.types.q8_0 import Q8_0
from kukri.quant.types.schema import QuantType as QuantType

FLOATS = (QuantType("F32", 0, 1, 4), QuantType("F16", 1, 1, 2), QuantType("BF16", 30, 1, 2))
# the types in blocks that run
PACKED = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS)
RUN = tuple(type.name for type in (*FLOATS, *PACKED))
_OTHERS = (
    QuantType("Q8_1", 9, 32, 36),
    QuantType("Q8_K", 15, 256, 292),
    QuantType("IQ2_XXS", 16, 256, 66),
    QuantType("IQ2_XS", 17, 256, 74),
    QuantType("IQ3_XXS", 18, 256, 98),
    QuantType("IQ1_S", 19, 256, 50),
    QuantType("IQ3_S", 21, 256, 110),
    QuantType("IQ2_S", 22, 256, 82),
    QuantType("I8", 24, 1, 1),
    QuantType("I16", 25, 1, 2),
    QuantType("I32", 26, 1, 4),
    QuantType("I64", 27, 1, 8),
    QuantType("F64", 28, 1, 8),
    QuantType("IQ1_M", 29, 256, 56),
    QuantType("TQ1_0", 34, 256, 54),
    QuantType("TQ2_0", 35, 256, 66),
    QuantType("NVFP4", 40, 64, 36),
    QuantType("Q1_0", 41, 128, 18),
    QuantType("Q2_0", 42, 64, 18),
)

QUANT_TYPES: dict[str, QuantType] = {t.name: t for t in (*FLOATS, *PACKED, *_OTHERS)}
QUANT_TYPES_BY_ID: dict[int, QuantType] = {t.ggml_id: t for t in QUANT_TYPES.values()}

# what stands in for a type of 256 weights if rows are no multiple of 256 (llama.cpp, src/llama-quant.cpp)
_STAND_INS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}


def fitting_type(type: QuantType, n_columns: int) -> QuantType | None:
    """The type, or the one that stands in for it, of which a row is whole blocks; None if there is none."""
    stand_in = _STAND_INS.get(type.name, type.name)
    for fitting in (type, QUANT_TYPES[stand_in]):
        if n_columns % fitting.block_size == 0:
            return fitting
    return None
