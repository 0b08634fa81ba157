"""Mixtures of experts: a router chooses a few of many small MLPs for each token (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.constants import Vector
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import Routing
from kukri.models.layers import Linear
from kukri.models.weights import WeightSource


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


class Mixture:
    """The weighted sum of the chosen experts, each down(silu(gate(x)) * up(x)).

    Taps inside experts see [T * n_used, width]: a token's experts one after another, in their order.
    """

    router_name = "gate"
    has_biases = False

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        mixture = config.mixture
        assert mixture is not None, "the configuration's readers see to that"
        n, d_ffn = mixture.n_experts, mixture.d_ffn
        self.layer = layer
        self.routing = Routing(n, mixture.n_used, mixture.normalized)
        self.router = Linear(source, [f"{name}.{self.router_name}"], (n,), config.d_model)
        names = [f"{name}.experts.{part}" for part in ("gate_proj", "up_proj")]
        self.gate_up = ExpertLinear(source, names, (d_ffn, d_ffn), config.d_model, n, self.has_biases)
        down = [f"{name}.experts.down_proj"]
        self.down = ExpertLinear(source, down, (config.d_model,), d_ffn, n, self.has_biases)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mixture(x), both [T, D]."""
        return self.experts(ops, x, residual, "hook_mlp_out")

    def experts(self, ops: Ops, x: Tensor, residual: Tensor, tap: str) -> Tensor:
        """The same, the mixture's part shown to a tap of this name."""
        return self.chosen(ops, x, self.router(ops, x), residual, tap)

    def chosen(self, ops: Ops, x: Tensor, logits: Tensor, residual: Tensor, tap: str) -> Tensor:
        """The same for experts that the router's `logits` [T, E] choose."""
        logits = ops.tap("mlp.hook_router_logits", self.layer, logits)
        routes = ops.route(logits, self.routing, ("mlp.hook_expert_weights", self.layer))
        gate, up = ops.split(self.gate_up(ops, x, routes), self.gate_up.n_outs)
        gate = ops.tap("mlp.experts.hook_pre", self.layer, gate)
        up = ops.tap("mlp.experts.hook_pre_linear", self.layer, up)
        hidden = ops.tap("mlp.experts.hook_post", self.layer, self.activate(ops, gate, up))
        return ops.combine(self.down(ops, hidden, routes), routes, residual, (tap, self.layer))

    def activate(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of an expert, of both [T * n_used, F]."""
        return ops.gated(up, gate, "silu")
