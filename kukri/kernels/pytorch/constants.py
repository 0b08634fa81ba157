"""A model's constants on one device: matrices, vectors, and cos and sin by position."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from kukri.kernels.pytorch.weights import FLOATS, DeviceMatrix, tensor_of, to_device
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.weight_handles import RopeFrequencies, Vector, Weight


class RopeTable:
    """cos and sin float32 [max_context, rotary_dim / 2] on a device, filled as positions need them."""

    def __init__(self, frequencies: RopeFrequencies, device: torch.device) -> None:
        self._rows, self._n_filled = RopeRows(frequencies), 0
        host = torch.from_numpy(self._rows.cos), torch.from_numpy(self._rows.sin)
        self._host = host
        self.cos, self.sin = (t if device.type == "cpu" else torch.empty_like(t, device=device) for t in host)

    def ensure(self, n_positions: int) -> None:
        """Fills the rows of positions 0 to n_positions - 1. Raises ShapeError beyond the RoPE's context."""
        if n_positions <= self._n_filled:
            return
        self._rows.ensure(n_positions)
        new = slice(self._n_filled, self._rows.n_rows)
        for target, source in zip((self.cos, self.sin), self._host, strict=True):
            if target is not source:
                target[new] = source[new].to(target.device)
        self._n_filled = self._rows.n_rows


class DeviceConstants:
    """A model's constants on one device, copied when they are first used and shared by all programs.

    Matrices are kept as floats while `unpacked_bytes` last, others packed and dequantized at each use.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, unpacked_bytes: int) -> None:
        self.device, self.dtype, self._bytes_left = device, dtype, unpacked_bytes
        self._matrices: dict[Weight, DeviceMatrix] = {}
        self._tables: dict[Weight, DeviceMatrix] = {}
        self._vectors: dict[Vector, Tensor] = {}
        self.rope_tables: dict[RopeFrequencies, RopeTable] = {}

    def matrix(self, weight: Weight) -> DeviceMatrix:
        """A matrix, as floats or packed."""
        found = self._matrices.get(weight)
        if found is None:
            found = to_device(weight, self.device, self.dtype)
            n_bytes = prod(weight.shape) * self.dtype.itemsize
            if n_bytes <= self._bytes_left:
                self._bytes_left -= n_bytes
                found = found.unpacked()
            self._matrices[weight] = found
        return found

    def table(self, weight: Weight) -> DeviceMatrix:
        """A matrix whose rows are read, not multiplied: floats stay what they are in the file."""
        dtype = FLOATS.get(weight.type.name, torch.float32)
        if dtype == self.dtype:
            return self.matrix(weight)
        if weight not in self._tables:
            self._tables[weight] = to_device(weight, self.device, dtype)
        return self._tables[weight]

    def vector(self, vector: Vector) -> Tensor:
        """A vector, float32."""
        if vector not in self._vectors:
            self._vectors[vector] = tensor_of(np.ascontiguousarray(vector.data)).to(self.device)
        return self._vectors[vector]

    def rope_table(self, frequencies: RopeFrequencies) -> RopeTable:
        """cos and sin by position."""
        if frequencies not in self.rope_tables:
            self.rope_tables[frequencies] = RopeTable(frequencies, self.device)
        return self.rope_tables[frequencies]
