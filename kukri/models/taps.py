"""The taps of a model, found by running it on ops that compute nothing: the model's code is the only list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kukri.kernels.types import AttentionSpec, FloatArray, Program, RopeTable, Tensor, Weight, tap_name


def tap_names(program: Program) -> list[str]:
    """The full hook names of a model, `blocks.0.hook_resid_pre` and so on, in the order of a step."""
    ops = _TapOps()
    program(ops, None)
    return ops.names


class _TapOps:
    """The op set, on values that are None."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def embed(self, weight: Weight, batch: Any) -> Tensor:
        return None

    def rms_norm(self, x: Tensor, weight: FloatArray, eps: float) -> Tensor:
        return None

    def head_norm(self, x: Tensor, weight: FloatArray, eps: float) -> Tensor:
        return None

    def layer_norm(self, x: Tensor, weight: FloatArray, bias: FloatArray, eps: float) -> Tensor:
        return None

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        bias: FloatArray | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        return None if tap is None else self.tap(*tap, None)

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return (None,) * len(widths)

    def rope(
        self, q: Tensor, k: Tensor, table: RopeTable, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor]:
        return None, None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: Any) -> Tensor:
        return None

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return None

    def gelu(self, x: Tensor) -> Tensor:
        return None

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        return None

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        self.names.append(tap_name(name, layer))
        return x
