"""Types that the `gguf` package does not read yet, weight by weight as ggml-quants.c states them."""

from __future__ import annotations

import numpy as np


def _q1_0(block: np.ndarray) -> list[np.float32]:
    d = np.float32(block[:2].view(np.float16)[0])
    return [d if block[2 + i // 8] >> i % 8 & 1 else -d for i in range(128)]


def _q2_0(block: np.ndarray) -> list[np.float32]:
    d = np.float32(block[:2].view(np.float16)[0])
    return [np.float32(int(block[2 + i // 4] >> 2 * (i % 4) & 3) - 1) * d for i in range(64)]


NEWER = {"Q1_0": (18, _q1_0), "Q2_0": (18, _q2_0)}


def dequantized(data: np.ndarray, name: str) -> np.ndarray:
    """uint8 [rows, bytes] -> float32 [rows, columns]."""
    n_bytes, read = NEWER[name]
    weights = [read(block) for block in np.ascontiguousarray(data).reshape(-1, n_bytes)]
    return np.array(weights, np.float32).reshape(len(data), -1)


def quantized(weights: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns] -> uint8 [rows, bytes]: signs and the mean size, or thirds of the largest."""
    size = 128 if name == "Q1_0" else 64
    made = []
    for x in weights.reshape(-1, size):
        if name == "Q1_0":
            total = np.float32(0)
            for weight in x:
                total += abs(weight)
            d, bits = total / np.float32(size), x >= 0
            packed = np.packbits(bits, bitorder="little")
        else:
            d = abs(x).max()
            inverse = np.float32(1) / d if d > 0 and np.isfinite(np.float32(1) / d) else np.float32(0)
            value = x * inverse
            nearest = np.trunc(value) + np.trunc((value - np.trunc(value)) * 2)
            q = np.clip(nearest + 1, 0, 3).astype(np.uint8).reshape(-1, 4)
            packed = (q << np.array([0, 2, 4, 6], np.uint8)).sum(1).astype(np.uint8)
        made.append(np.concatenate([np.float16([d]).view(np.uint8), packed]))
    return np.array(made, np.uint8).reshape(len(weights), -1)
