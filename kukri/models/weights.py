"""`WeightSource`: gives models their weights, by canonical name, with shapes checked."""

from __future__ import annotations

import re
from typing import Protocol

from kukri.kernels.arrays import FloatArray
from kukri.kernels.constants import Experts, Weight

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
