"""Mixtures of experts: a router chooses a few of many small MLPs for each token (Shazeer et al. 2017).

Some also have an MLP for all tokens. Some of these multiply its result by a gate, which makes it a mixture of
one expert, whose weight is a sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import Routing
from kukri.kernels.weight_handles import Experts, Vector, Weight
from kukri.models.layers import Composite, GatedMLP, Linear, activated, stored_vector
from kukri.models.weights import WeightSource
from kukri.quant.types import QUANT_TYPES


class ExpertLinear:
    """y = x Wᵀ with the W of each token's experts, for one matrix of an expert or several side by side."""

    def __init__(
        self,
        source: WeightSource,
        names: Sequence[str],
        n_outs: Sequence[int],
        n_in: int,
        n_experts: int,
        has_bias: bool,
    ) -> None:
        self.n_outs = tuple(n_outs)
        self.experts = tuple(
            source.experts(f"{name}.weight", (n_experts, n, n_in)) for name, n in zip(names, n_outs)
        )
        self.bias: Vector | None = None
        if has_bias:
            biases = [source.expert_vectors(f"{name}.bias", (n_experts, n)) for name, n in zip(names, n_outs)]
            self.bias = Vector(np.concatenate(biases, axis=1).reshape(-1), f"{names[0]}.bias")

    def __call__(self, ops: Ops, x: Tensor, routes: Tensor) -> Tensor:
        """x [T or T * n_used, in] -> [T * n_used, sum of n_outs]."""
        return ops.expert_linear(x, routes, self.experts, self.bias)


class SharedMLP(GatedMLP):
    """A gated MLP that each token passes in addition to its experts."""

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor = None) -> Tensor:
        """mlp(x) [T, D], with nothing added unless a residual is given."""
        gate, up = self.gate_up.parts(ops, x)
        hidden = ops.tap("mlp.hook_shared_post", self.layer, self.activate(ops, gate, up))
        return self.down(ops, hidden, residual, ("mlp.hook_shared_out", self.layer))

    def width(self, config: ModelConfig, layer: int) -> int:
        """The width that the mixture states, or the width of the model's MLPs."""
        assert config.mixture is not None, "it stands next to one"
        return config.mixture.d_shared or config.mlp_width(layer)


class GatedSharedMLP:
    """sigmoid(gate(x)) * mlp(x), of all tokens: a mixture of one expert."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        assert config.mixture is not None, "it stands next to one"
        self.layer, self.activation = layer, f"gated_{config.activation}"
        d_model, d_ffn = config.d_model, config.mixture.d_shared
        self.routing = Routing(1, 1, normalized=False, by_sigmoid=True)
        gate = f"{name.removesuffix('shared_experts')}shared_expert_gate.weight"
        row = np.ascontiguousarray(source.vector(gate, d_model)).view(np.uint8)
        self.gate = Weight(row.reshape(1, -1), QUANT_TYPES["F32"], (1, d_model), gate)

        def matrix(part: str, n_out: int, n_in: int) -> Experts:
            stored = f"{name}.{part}.weight"
            return Experts((source.matrix(stored, (n_out, n_in)),), stored)

        self.gate_up = tuple(matrix(part, d_ffn, d_model) for part in ("gate_proj", "up_proj"))
        self.down = (matrix("down_proj", d_model, d_ffn),)
        self.widths = (d_ffn, d_ffn)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        """residual + this of x, both [T, D]."""
        routes = ops.route(ops.linear(x, (self.gate,)), self.routing, ("mlp.hook_shared_gate", self.layer))
        gate, up = ops.split(ops.expert_linear(x, routes, self.gate_up), self.widths)
        hidden = ops.tap("mlp.hook_shared_post", self.layer, ops.map(self.activation, up, gate))
        out = ops.expert_linear(hidden, routes, self.down)
        return ops.combine(out, routes, residual, ("mlp.hook_shared_out", self.layer))


class Mixture(Composite):
    """The weighted sum of the chosen experts, each down(f(gate(x)) * up(x)), f being the model's activation.

    Taps inside experts see [T * n_used, width]: a token's experts one after another, in their order.
    """

    in_names: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_type: Callable[..., Any] = SharedMLP
    router_name = "gate"
    has_biases = False
    finish: Callable[[Ops, Tensor], Tensor] | None = (
        None  # changes the result [T, D], before it joins the stream
    )

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        mixture = config.mixture
        assert mixture is not None, "the configuration's readers see to that"
        n, d_ffn, d_in = mixture.n_experts, mixture.d_ffn, mixture.d_latent or config.d_model
        is_gated = len(self.in_names) > 1
        self.layer, self.activation = layer, f"gated_{config.activation}" if is_gated else config.activation
        bias: Vector | None = None
        if mixture.has_bias:
            bias = stored_vector(source, f"{name}.gate.e_score_correction.bias", n)
        self.routing = Routing(
            n,
            mixture.n_used,
            mixture.normalized,
            None if mixture.scale == 1 else Vector(np.full(n, mixture.scale, np.float32)),
            mixture.by_sigmoid,
            bias,
            mixture.n_groups,
            mixture.n_groups_used,
            tolerance=mixture.tolerance,
        )
        self.router = Linear(source, [f"{name}.{self.router_name}"], (n,), config.d_model)
        names = [f"{name}.experts.{part}" for part in self.in_names]
        self.gate_up = ExpertLinear(source, names, (d_ffn,) * len(names), d_in, n, self.has_biases)
        down = [f"{name}.experts.down_proj"]
        self.down = ExpertLinear(source, down, (d_in,), d_ffn, n, self.has_biases)
        self.into = self.out = None  # around the experts, if they have a width of their own
        if mixture.d_latent:
            self.into = Linear(source, [f"{name}.fc1_latent_proj"], (d_in,), config.d_model)
            self.out = Linear(source, [f"{name}.fc2_latent_proj"], (config.d_model,), d_in)

        self.shared: Any = None
        if mixture.d_shared:
            self.shared = self.shared_type(source, f"{name}.shared_experts", config, layer)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mixture(x), both [T, D], and the MLP of all tokens."""
        if self.shared is None and self.finish is None:
            return self.experts(ops, x, residual, "hook_mlp_out")
        found = self.experts(ops, x, None, "mlp.hook_experts_out")
        found = found if self.shared is None else self.shared(ops, x, found)
        found = found if self.finish is None else self.finish(ops, found)
        return ops.add(ops.tap("hook_mlp_out", self.layer, found), residual)

    def experts(self, ops: Ops, x: Tensor, residual: Tensor | None, tap: str) -> Tensor:
        """Return residual + experts(x), and tap the experts' part under this name."""
        return self.chosen(ops, x, self.router(ops, x), residual, tap)

    def chosen(self, ops: Ops, x: Tensor, logits: Tensor, residual: Tensor | None, tap: str) -> Tensor:
        """The same for experts that the router's `logits` [T, E] choose."""
        logits = ops.tap("mlp.hook_router_logits", self.layer, logits)
        routes = ops.route(logits, self.routing, ("mlp.hook_expert_weights", self.layer))
        x = x if self.into is None else self.into(ops, x)
        gate, *rest = ops.split(self.gate_up(ops, x, routes), self.gate_up.n_outs)
        gate = ops.tap("mlp.experts.hook_pre", self.layer, gate)
        up = ops.tap("mlp.experts.hook_pre_linear", self.layer, rest[0]) if rest else None
        hidden = ops.tap("mlp.experts.hook_post", self.layer, self.activate(ops, gate, up))
        found = self.down(ops, hidden, routes)
        if self.out is None:
            return ops.combine(found, routes, residual, (tap, self.layer))
        return self.out(ops, ops.combine(found, routes), residual, (tap, self.layer))

    def activate(self, ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        """The activation of an expert, of both [T * n_used, F], if it has both."""
        return activated(ops, self.activation, gate, up)
