"""`WeightSource`: gives models their weights, by canonical name, with shapes checked.

`TakenWeights` keeps those that a model takes: no model lists its own.
"""

from __future__ import annotations

import re
from math import prod
from typing import Protocol

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import FormatError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import Experts, Weight
from kukri.quant.types import QUANT_TYPES

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def expert_name(name: str, expert: int) -> str:
    """The name of one expert's matrix: `….experts.gate_proj.weight` -> `….experts.3.gate_proj.weight`."""
    return name.replace(".experts.", f".experts.{expert}.")


def of_experts(name: str) -> tuple[str, int]:
    """The inverse of `expert_name`: the name of all experts' matrices, and which one it is; 0 for others."""
    match = _EXPERT.search(name)
    return (name, 0) if match is None else (_EXPERT.sub(".experts.", name), int(match[1]))


class WeightSource(Protocol):
    """The weights of a checkpoint under Hugging Face names, q and k rows in half-split RoPE order."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix (out, in) as stored. Raises FormatError if missing or of another shape."""

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        """The matrices (experts, out, in) of `….mlp.experts.down_proj.weight` and the like, as stored.

        Raises FormatError if some are missing or of another shape.
        """

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        """The biases (experts, out) of such matrices as float32. Raises FormatError as `experts` does."""

    def vector(self, name: str, size: int) -> FloatArray:
        """A vector as float32 [size]. Raises FormatError if missing or of another shape."""

    def has(self, name: str) -> bool:
        """True if the checkpoint has the tensor; does not take it."""

    def done(self) -> None:
        """Raises UnusedTensorError listing the tensors that no layer took."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model, as `kukri inspect` lists it."""

    name: str
    shape: tuple[int, ...]
    type: str  # the weight type it is stored in
    n_bytes: int

    @property
    def n_parameters(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)


class NoWeights(WeightSource):
    """A `WeightSource` of zeros that take no memory: of a model of which the configuration alone is known.

    Raises FormatError on a tensor of more than `most` numbers, as no file holds.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        self._check(name, shape)
        kind = QUANT_TYPES["F32"]
        row = np.zeros((1, kind.row_bytes(shape[1])), np.uint8)
        return Weight(np.broadcast_to(row, (shape[0], row.shape[1])), kind, shape, name)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        self._check(name, shape)
        return Experts((self.matrix(name, shape[1:]),) * shape[0], name)

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        self._check(name, shape)
        return np.zeros(shape, np.float32)

    def vector(self, name: str, size: int) -> FloatArray:
        self._check(name, (size,))
        return np.zeros(size, np.float32)

    def has(self, name: str) -> bool:
        return False

    def done(self) -> None:
        pass

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if prod(shape) > self._most:
            raise FormatError(
                f"tensor {name!r} of shape {shape} must fit a model of {self._most:,} parameters"
            )


class TakenWeights(WeightSource):
    """A `WeightSource` that passes on another's tensors, and keeps those that a model takes.

    Attributes: matrices, stacks (of experts), stacked_vectors (their biases) and vectors, and a parameter for
    each of these, all by name and in order.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.matrices: dict[str, Weight] = {}
        self.stacks: dict[str, Experts] = {}
        self.stacked_vectors: dict[str, FloatArray] = {}
        self.vectors: dict[str, FloatArray] = {}
        self.parameters: dict[str, Parameter] = {}

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self.matrices[name] = self._source.matrix(name, shape)
        self._note(name, shape, weight.type.name, weight.stored.nbytes)
        return weight

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        experts = self.stacks[name] = self._source.experts(name, shape)
        self._note(name, shape, experts.type.name, sum(w.stored.nbytes for w in experts.weights))
        return experts

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        vectors = self.stacked_vectors[name] = self._source.expert_vectors(name, shape)
        self._note(name, shape, "F32", vectors.nbytes)
        return vectors

    def vector(self, name: str, size: int) -> FloatArray:
        vector = self.vectors[name] = self._source.vector(name, size)
        self._note(name, (size,), "F32", vector.nbytes)
        return vector

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def done(self) -> None:
        self._source.done()

    def _note(self, name: str, shape: tuple[int, ...], type_name: str, n_bytes: int) -> None:
        self.parameters[name] = Parameter(name, shape, type_name, n_bytes)
