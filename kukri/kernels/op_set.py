"""The op set that models are written against.

Shape letters: T tokens in the step, N rows with logits, R any rows, D model width, V vocabulary,
H query heads, G key/value heads, K head size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.weight_handles import Experts, RopeFrequencies, Vector, Weight

EmbedBy = Literal["token_ids", "positions", "token_types"]


# A value inside a step: an ndarray on the reference backend, a buffer handle while a plan is recorded.
Tensor = Any


class Ops(Protocol):
    """The op set that models are written against. Values are float32, row-major [rows, width]."""

    def embed(
        self, weight: Weight, batch: Any, by: EmbedBy = "token_ids", residual: Tensor | None = None
    ) -> Tensor:
        """Rows of `weight` [n, D] for the batch's token ids, positions or token types -> [T, D].

        `residual` [T, D] is added.
        """

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, along each row (Zhang & Sennrich 2019)."""

    def head_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """rms_norm of each head of x [T, heads*K] on its own, by one `weight` [K]; in place."""

    def layer_norm(self, x: Tensor, weight: Vector, bias: Vector, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, along each row (Ba et al. 2016)."""

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """x [R, in] times the transpose of each weight [out_i, in], side by side -> [R, sum of out_i].

        `bias` [sum of out_i], the updates of each row's adapter, if the program has adapters, and `residual`
        (same shape as the result) are added, in this order. `tap` (name, layer) sees the sum before the
        residual; a backend may fuse that addition if the tap is not compiled.
        """

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual, both of one shape; fused with what makes x, if the backend can and x is not read."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        """Column views of x, of the given widths."""

    def head_columns(self, x: Tensor, n_heads: int, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop` - 1 of each head of x [T, H*K] -> [T, H * (stop - start)]."""

    def join_heads(self, parts: Sequence[Tensor], n_heads: int) -> Tensor:
        """Heads [T, H*K_i] side by side, head by head -> [T, H * sum of K_i]."""

    def repeat(self, x: Tensor, times: int) -> Tensor:
        """Each column of x, `times` times side by side [T, times * width]."""

    def head_linear(self, x: Tensor, heads: Experts) -> Tensor:
        """Each head of x [T, H*in] times the transpose of its own matrix [H, out, in] -> [T, H*out].

        No adapter changes such matrices.
        """

    def rope(
        self, q: Tensor, k: Tensor | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates each head of q [T, H*K] and k [T, G*K] by its token's position (half-split); in place.

        A layer that reads another's keys (`spec.reads`) has no k.
        """

    def rotate(self, x: Tensor, rope: RopeFrequencies, spec: AttentionSpec, batch: Any) -> Tensor:
        """`rope` of the heads of x alone [T, heads*K], which may be a part of what attends; in place."""

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, spec: AttentionSpec, batch: Any
    ) -> Tensor:
        """Stores k and v [T, G*K] at the batch's slots, then attends causally or by the mask -> [T, H*K].

        Without both, for a layer that reads another's (`spec.reads`), it stores nothing.
        """

    def conv(self, x: Tensor, spec: ConvSpec, batch: Any) -> Tensor:
        """A convolution of each column of x [T, C] along its sequence, causal or not -> [T, C]."""

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, spec: ScanSpec, batch: Any) -> Tensor:
        """x [T, H*P] through the state space -> [T, H*P]: S = exp(a dt) S + dt b xT, y = cT S + d x.

        b and c are [T, G*N], dt [T, H].
        """

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, spec: DeltaSpec, batch: Any
    ) -> Tensor:
        """v [T, H*P] written under keys k [T, G*K], and what queries q read -> [T, H*P].

        S = exp(a softplus(decay + dt_bias)) S; S += k (sigmoid(beta) (v - kT S)); y = qT S. `decay` and
        `beta` are [T, H].
        """

    def map(
        self, name: str, x: Tensor, other: Tensor | None = None, a: float = 0.0, b: float = 0.0
    ) -> Tensor:
        """The element-wise op `name` of `kukri.kernels.activations`: a function of each number of x, of the
        number of `other` at the same place, and of a and b.
        """

    def route(self, logits: Tensor, routing: Routing, tap: tuple[str, int | None] | None = None) -> Tensor:
        """Chooses experts by the logits [T, E] of a router; of equal scores, the first -> routes.

        `tap` (name, layer) sees the weights [T, E], 0 for experts that are not used, and may change them: an
        expert is used unless its weight is 0. Raises HookError if that leaves more than `n_used`.
        """

    def expert_linear(
        self, x: Tensor, routes: Tensor, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        """x times the transposed matrices of the experts that each token uses, side by side -> [T * n_used,
        sum of out_i]. Row t * n_used + j belongs to token t and its j-th expert, by their numbers.

        x is [T, in], or such rows of another expert_linear. `bias` [E * sum of out_i] is added, an expert's
        after another's. Rows that a token has no expert for are undefined; experts that no token uses are not
        read.
        """

    def combine(
        self,
        x: Tensor,
        routes: Tensor,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """The sum over its experts of each token's rows of x [T * n_used, D], times their weights -> [T, D].

        Experts are summed in the order of their numbers. `tap` and `residual` as in `linear`.
        """

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        """The rows of x [T, D] that the batch wants logits for -> [N, D]."""

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        """x, after the hooks that listen on `name` (TransformerLens spelling) have seen or edited it."""


class StageOps(Ops, Protocol):
    """The op set of a backend that can run a part of a model: `kukri.stages.program` makes such programs."""

    def activations(self, batch: Any, width: int) -> Tensor:
        """The batch's activations -> [T, width]."""


# A model as the backends see it: program(ops, batch) -> logits [N, V], or, of a part without the head, the
# activations [T, D]
Program = Callable[[Ops, Any], Tensor]
