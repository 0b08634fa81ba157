"""A causal model as a program in which each token sees its whole chunk: images that attend both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

from kukri.kernels.op_set import Ops, Program, Tensor
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.weight_handles import RopeFrequencies

# layers in which tokens of a run see each other: none, all, some; "cross": the text sees a run by another
# attention than itself, so the run's rows only store keys and values (`RowKeeper`)
BothWaysLayers = Literal["", "all", "windows", "cross"]


@runtime_checkable
class RowKeeper(Protocol):
    """A model that attends to rows which are no tokens of its text."""

    def keep_rows(self, ops: Ops, batch: Any) -> Tensor:
        """The program that stores the keys and values of such rows."""


class BothWays:
    """A program in which the tokens of a sequence's step see each other and all tokens before them, in all
    layers or in layers with windows.

    A layer's window limits only the tokens before them.
    """

    def __init__(self, program: Program, layers: BothWaysLayers) -> None:
        self._program, self._layers = program, layers

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """The program's result."""
        return self._program(_BothWaysOps(ops, self._layers), batch)


class _BothWaysOps:
    """An op set that attends without causality."""

    def __init__(self, ops: Ops, layers: BothWaysLayers) -> None:
        self._ops, self._layers = ops, layers

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, spec: AttentionSpec, batch: Any
    ) -> Tensor:
        return self._ops.attention(q, k, v, self._spec(spec), batch)

    def rope(
        self, q: Tensor, k: Tensor | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self._ops.rope(q, k, rope, self._spec(spec), batch)

    def _spec(self, spec: AttentionSpec) -> AttentionSpec:
        sees_ahead = self._layers == "all" or spec.window is not None
        return replace(spec, is_causal=False, sees_all_ahead=True) if sees_ahead else spec

    def __getattr__(self, name: str) -> Any:
        """Any other op."""
        return getattr(self._ops, name)
