"""cos and sin of rotary angles by position, as a backend on the host keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.errors import CapacityError, ShapeError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.weight_handles import RopeFrequencies

_FIRST_ROWS = 256
_MIXED_ROWS = 1 << 16  # for a step's tokens with several positions; memory only as far as they are used


class RopeRows:
    """`cos` and `sin` float32 [max_context, rotary_dim / 2], computed as positions need them.

    Memory is reserved at once and rows never change once computed, so addresses stay valid. Frequencies with
    axes have rows after those, for `mix`.
    """

    def __init__(self, frequencies: RopeFrequencies) -> None:
        self.frequencies = frequencies
        n_rows = frequencies.max_context + _MIXED_ROWS * bool(frequencies.axes)
        self.cos = np.empty((n_rows, len(frequencies.inverse)), np.float32)
        self.sin = np.empty_like(self.cos)
        self.n_rows = 0  # computed so far

    def ensure(self, n_positions: int) -> None:
        """Computes the rows of positions 0 to n_positions - 1. Raises ShapeError beyond max_context."""
        if n_positions <= self.n_rows:
            return
        most = self.frequencies.max_context
        if n_positions > most:
            raise ShapeError(f"position {n_positions - 1} is beyond the RoPE's {most} positions")
        stop = min(most, max(n_positions, 2 * self.n_rows, _FIRST_ROWS))
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

    def at(self, positions: IntArray) -> tuple[FloatArray, FloatArray]:
        """cos and sin [T, rotary_dim / 2] of tokens by their positions, [T] or [axes, T]."""
        if positions.ndim == 1:
            return self.cos[positions], self.sin[positions]
        axes = self.frequencies.axes
        if max(axes, default=len(positions)) >= len(positions):
            raise ShapeError(f"bad step: {len(positions)} positions a token, and the RoPE has {axes or None}")
        rows, columns = positions[list(axes)].T, np.arange(len(axes))
        return self.cos[rows, columns], self.sin[rows, columns]

    def mix(self, positions: IntArray) -> int:
        """Writes what `at` gives for positions [axes, T] to rows of their own; the first of them.

        They are valid until the next call. Raises CapacityError on more tokens than there are rows.
        """
        n, first = positions.shape[1], self.frequencies.max_context
        cos, sin = self.at(positions)
        if n > _MIXED_ROWS:
            raise CapacityError(f"a step of {n} tokens with several positions: at most {_MIXED_ROWS}")
        self.cos[first : first + n], self.sin[first : first + n] = cos, sin
        return first
