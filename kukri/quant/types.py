"""The weight types of GGML, as one table. Names and ids are GGML's (ggml.h, enum ggml_type)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantType:
    """One weight type: `block_size` weights are stored together in `block_bytes` bytes."""

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int

    def row_bytes(self, n_columns: int) -> int:
        """Bytes of a row of `n_columns` weights, which must be a multiple of `block_size`."""
        return n_columns // self.block_size * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size


_TABLE = (
    QuantType("F32", 0, 1, 4),
    QuantType("F16", 1, 1, 2),
    QuantType("Q4_0", 2, 32, 18),
    QuantType("Q4_1", 3, 32, 20),
    QuantType("Q5_0", 6, 32, 22),
    QuantType("Q5_1", 7, 32, 24),
    QuantType("Q8_0", 8, 32, 34),
    QuantType("Q8_1", 9, 32, 36),
    QuantType("Q2_K", 10, 256, 84),
    QuantType("Q3_K", 11, 256, 110),
    QuantType("Q4_K", 12, 256, 144),
    QuantType("Q5_K", 13, 256, 176),
    QuantType("Q6_K", 14, 256, 210),
    QuantType("Q8_K", 15, 256, 292),
    QuantType("IQ2_XXS", 16, 256, 66),
    QuantType("IQ2_XS", 17, 256, 74),
    QuantType("IQ3_XXS", 18, 256, 98),
    QuantType("IQ1_S", 19, 256, 50),
    QuantType("IQ4_NL", 20, 32, 18),
    QuantType("IQ3_S", 21, 256, 110),
    QuantType("IQ2_S", 22, 256, 82),
    QuantType("IQ4_XS", 23, 256, 136),
    QuantType("I8", 24, 1, 1),
    QuantType("I16", 25, 1, 2),
    QuantType("I32", 26, 1, 4),
    QuantType("I64", 27, 1, 8),
    QuantType("F64", 28, 1, 8),
    QuantType("IQ1_M", 29, 256, 56),
    QuantType("BF16", 30, 1, 2),
    QuantType("TQ1_0", 34, 256, 54),
    QuantType("TQ2_0", 35, 256, 66),
    QuantType("MXFP4", 39, 32, 17),
    QuantType("NVFP4", 40, 64, 36),
    QuantType("Q1_0", 41, 128, 18),
    QuantType("Q2_0", 42, 64, 18),
)

QUANT_TYPES: dict[str, QuantType] = {t.name: t for t in _TABLE}
QUANT_TYPES_BY_ID: dict[int, QuantType] = {t.ggml_id: t for t in _TABLE}

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
