"""Random blocks of any quantized weight type, with scales that keep the weights small and finite."""

from __future__ import annotations

import gguf
import numpy as np

from kukri.quant.types import PACKED, QUANT_TYPES

# where float16 scales and minimums lie in a block
HALVES = {type.name: type.block.halves for type in PACKED}


def dequantized_by_gguf(rows: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns] as the `gguf` package has it."""
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float32)


def random_rows(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [out, row_bytes] for a matrix (out, in), every bit random but the scales: |w| up to about 0.5."""
    type = QUANT_TYPES[name]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // type.block_size, type.block_bytes), np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(117, 124, len(blocks))
        return blocks.reshape(shape[0], -1)
    for at in HALVES[name]:
        blocks[:, at : at + 2] = np.float16([1]).view(np.uint8)
    largest = np.abs(dequantized_by_gguf(blocks, name)).max()
    for at in HALVES[name]:
        scales = rng.uniform(0.1, 0.3, (len(blocks), 1)) / largest
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)
