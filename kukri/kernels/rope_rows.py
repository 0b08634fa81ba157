"""cos and sin of rotary angles by position, as a backend on the host keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.errors import ShapeError
from kukri.kernels.constants import RopeFrequencies

_FIRST_ROWS = 256


class RopeRows:
    """`cos` and `sin` float32 [max_context, rotary_dim / 2], computed as positions need them.

    Memory is reserved at once and rows never change once computed, so addresses stay valid.
    """

    def __init__(self, frequencies: RopeFrequencies) -> None:
        self.frequencies = frequencies
        self.cos = np.empty((frequencies.max_context, len(frequencies.inverse)), np.float32)
        self.sin = np.empty_like(self.cos)
        self.n_rows = 0  # computed so far

    def ensure(self, n_positions: int) -> None:
        """Computes the rows of positions 0 to n_positions - 1. Raises ShapeError beyond max_context."""
        if n_positions <= self.n_rows:
            return
        if n_positions > len(self.cos):
            raise ShapeError(f"position {n_positions - 1} is beyond the RoPE's {len(self.cos)} positions")
        stop = min(len(self.cos), max(n_positions, 2 * self.n_rows, _FIRST_ROWS))
        # float32 angles, as transformers computes them, so that rows are bit-identical
        positions = np.arange(self.n_rows, stop, dtype=np.float32)
        angles = positions[:, None] * np.array(self.frequencies.inverse, np.float32)
        scale: Any = np.float32(self.frequencies.scale)
        if self.frequencies.growth is not None:
            beta, tokens = self.frequencies.growth
            scale = (
                scale * (1 + np.float32(beta) * np.log(1 + np.floor(positions / np.float32(tokens))))[:, None]
            )
        self.cos[self.n_rows : stop] = np.cos(angles) * scale
        self.sin[self.n_rows : stop] = np.sin(angles) * scale
        self.n_rows = stop
