"""Random blocks of any quantized weight type, with scales that keep the weights small and finite."""

from __future__ import annotations

import gguf
import numpy as np

from kukri.quant.blocks import dequantize
from kukri.quant.types import PACKED, QUANT_TYPES

# where float16 scales and minimums lie in a block
HALVES = {type.name: type.layout.halves for type in PACKED}


def dequantized_by_gguf(rows: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns] as the `gguf` package has it; it does not read the newest types."""
    if name in ("Q1_0", "Q2_0"):
        return dequantize(rows, QUANT_TYPES[name])
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float32)


def set_scales(blocks: np.ndarray, name: str, values: np.ndarray) -> None:
    """Writes float16 `values` [n, 1] as scales and minimums of blocks [n, bytes], or in their place."""
    if name == "MXFP4":
        blocks[:, :1] = 127 + np.round(np.log2(values))
    elif name == "NVFP4":
        blocks[:, :4] = np.round(8 * (np.log2(values) + 7)) % 128
    elif name == "IQ1_M":  # a nibble in the top of each of four numbers
        bits = np.arange(0, 16, 4)
        tops = values.astype(np.float16).view(np.uint16) >> bits & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | tops << 4
    else:
        for i, at in enumerate(HALVES[name]):
            halves = np.roll(values, i, axis=0).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8)


def random_rows(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [out, row_bytes] for a matrix (out, in), every bit random but the scales: |w| up to about 0.5."""
    type = QUANT_TYPES[name]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // type.block_size, type.block_bytes), np.uint8)
    set_scales(blocks, name, np.ones((len(blocks), 1)))
    largest = np.abs(dequantize(blocks, type)).max()
    set_scales(blocks, name, rng.uniform(0.1, 0.3, (len(blocks), 1)) / largest)
    return blocks.reshape(shape[0], -1)
