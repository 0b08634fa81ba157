"""The taps of a model, found by running it on ops that compute nothing: the model's code is the only list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from kukri.kernels.constants import Experts, Vector, Weight
from kukri.kernels.op_set import Ops, Program, Tensor
from kukri.kernels.taps import tap_name


def tap_names(program: Program) -> list[str]:
    """The full hook names of a model, `blocks.0.hook_resid_pre` and so on, in the order of a step."""
    return _taps(program).names


def linear_inputs(program: Program) -> dict[str, str]:
    """Full name of the hook that sees a matrix's input, by the name of the weight.

    A weight whose input no hook sees is left out.
    """
    return _taps(program).inputs


def linear_matrices(program: Program) -> dict[str, tuple[int, int]]:
    """The name and shape (out, in) of each matrix that is multiplied: no embeddings, and of experts each."""
    ops = _taps(program)
    return {name: shape for name, shape in ops.matrices.items() if name not in ops.embeddings}


def _taps(program: Program) -> _TapOps:
    ops = _TapOps()
    program(cast(Ops, ops), None)
    return ops


class _TapOps:
    """The op set, on values that are the full name of the tap which shows them, or None."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.inputs: dict[str, str] = {}
        self.matrices: dict[str, tuple[int, int]] = {}
        self.embeddings: set[str] = set()

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        """An op of which only the tap matters: any that is not below. Its result has no tap."""
        if op.startswith("_"):
            raise AttributeError(op)

        def run(*values: Any, **options: Any) -> Tensor:
            for value in (*values, *options.values()):
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
                    self.tap(*value, None)
            return None

        return run

    def embed(self, weight: Weight, batch: Any, *rest: Any, **options: Any) -> Tensor:
        self.embeddings.add(weight.name)
        return None

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        if x is not None:
            self.inputs |= {weight.name: x for weight in weights}
        self.matrices |= {weight.name: weight.shape for weight in weights}
        if tap is not None:
            self.tap(*tap, None)
        return None  # for what the tap shows is not the result: a residual is added

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return (None,) * len(widths)

    def rope(self, *values: Any) -> tuple[Tensor, Tensor]:
        return None, None

    def expert_linear(
        self, x: Tensor, routes: Tensor, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        if x is not None:
            self.inputs |= {each.name: x for each in experts}
        self.matrices |= {weight.name: weight.shape for each in experts for weight in each.weights}
        return None

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        full_name = tap_name(name, layer)
        self.names.append(full_name)
        return full_name
