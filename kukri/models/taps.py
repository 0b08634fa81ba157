"""The taps of a model, found by running it on ops that compute nothing: the model's code is the only list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kukri.kernels.constants import Experts, RopeFrequencies, Vector, Weight
from kukri.kernels.op_set import EmbedBy, GateBy, Program, Tensor
from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.taps import tap_name


def tap_names(program: Program) -> list[str]:
    """The full hook names of a model, `blocks.0.hook_resid_pre` and so on, in the order of a step."""
    ops = _TapOps()
    program(ops, None)
    return ops.names


def linear_inputs(program: Program) -> dict[str, str]:
    """Full name of the hook that sees a matrix's input, by the name of the weight.

    A weight whose input no hook sees is left out.
    """
    ops = _TapOps()
    program(ops, None)
    return ops.inputs


def linear_matrices(program: Program) -> dict[str, tuple[int, int]]:
    """The name and shape (out, in) of each matrix that is multiplied: no embeddings, and of experts each."""
    ops = _TapOps()
    program(ops, None)
    return {name: shape for name, shape in ops.matrices.items() if name not in ops.embeddings}


class _TapOps:
    """The op set, on values that are the full name of the tap which shows them, or None."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.inputs: dict[str, str] = {}
        self.matrices: dict[str, tuple[int, int]] = {}
        self.embeddings: set[str] = set()

    def embed(
        self, weight: Weight, batch: Any, by: EmbedBy = "token_ids", residual: Tensor | None = None
    ) -> Tensor:
        self.embeddings.add(weight.name)
        return None

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        return None

    def head_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        return None

    def layer_norm(self, x: Tensor, weight: Vector, bias: Vector, eps: float) -> Tensor:
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

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return None

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return None

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return (None,) * len(widths)

    def rope(
        self, q: Tensor, k: Tensor, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor]:
        return None, None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: Any) -> Tensor:
        return None

    def conv(self, x: Tensor, spec: ConvSpec, batch: Any) -> Tensor:
        return None

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, spec: ScanSpec, batch: Any) -> Tensor:
        return None

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, spec: DeltaSpec, batch: Any
    ) -> Tensor:
        return None

    def gated(self, x: Tensor, gate: Tensor, by: GateBy) -> Tensor:
        return None

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return None

    def clamped_swiglu(self, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        return None

    def gelu(self, x: Tensor, is_exact: bool = False) -> Tensor:
        return None

    def tanh(self, x: Tensor) -> Tensor:
        return None

    def route(self, logits: Tensor, routing: Routing, tap: tuple[str, int | None] | None = None) -> Tensor:
        if tap is not None:
            self.tap(*tap, None)
        return None

    def expert_linear(
        self, x: Tensor, routes: Tensor, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        if x is not None:
            self.inputs |= {each.name: x for each in experts}
        self.matrices |= {weight.name: weight.shape for each in experts for weight in each.weights}
        return None

    def combine(
        self,
        x: Tensor,
        routes: Tensor,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        if tap is not None:
            self.tap(*tap, None)
        return None

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        return None

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        full_name = tap_name(name, layer)
        self.names.append(full_name)
        return full_name
