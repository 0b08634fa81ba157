"""A causal model as a program in which each token sees its whole chunk: images that attend both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.kernels.constants import RopeFrequencies
from kukri.kernels.op_set import Ops, Program, Tensor
from kukri.kernels.specs import AttentionSpec


class BothWays:
    """A program whose sequences each bring tokens that see each other, and all those before them.

    A layer's window reaches as far ahead as back.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """The program's result."""
        return self._program(_BothWaysOps(ops), batch)


class _BothWaysOps:
    """An op set that attends without causality."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, spec: AttentionSpec, batch: Any
    ) -> Tensor:
        """See Ops.attention."""
        return self._ops.attention(q, k, v, replace(spec, is_causal=False), batch)

    def rope(
        self, q: Tensor, k: Tensor | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor | None]:
        """See Ops.rope."""
        return self._ops.rope(q, k, rope, replace(spec, is_causal=False), batch)

    def __getattr__(self, name: str) -> Any:
        """Any other op."""
        return getattr(self._ops, name)
