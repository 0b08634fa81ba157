"""The common part of recurrent layers: a causal convolution whose state is its last inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import StateLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.specs import ConvSpec
from kukri.kernels.weight_handles import Vector
from kukri.models.layers import optional_bias
from kukri.models.weights import WeightSource
from kukri.quant.blocks import dequantize

# GGUF's keys of layers with a state for each head
STATE_KEYS = {
    **{"n_taps": "ssm.conv_kernel", "n_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count"},
    **{"d_state": "ssm.state_size", "d_inner": "ssm.inner_size"},
}


class Convolution:
    """The weights of a convolution: a matrix (channels, taps), and a bias if there is one.

    `widths` are the channels of each of the matrices that hold its rows, by name; several have no bias.
    `activation` is an op that follows, "" for none; the convolution itself has SiLU.
    Attributes: spec; states, its arrays of a `StateLayer`.
    """

    def __init__(
        self,
        source: WeightSource,
        widths: Mapping[str, int],
        n_taps: int,
        layer: int,
        activation: str = "",
    ) -> None:
        name, n = next(iter(widths)), sum(widths.values())
        weights = [source.matrix(f"{part}.weight", (width, n_taps)) for part, width in widths.items()]
        rows = np.concatenate([dequantize(weight.data, weight.type) for weight in weights])
        taps = np.ascontiguousarray(rows.T).reshape(-1)
        bias = optional_bias(source, name, n)
        self.spec = ConvSpec(layer, n_taps, Vector(taps, f"{name}.weight"), bias, activation == "silu")
        self.states = (("conv", (n_taps - 1, n)),)
        self.activation = "" if activation == "silu" else activation

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, n] -> [T, n]. Writes the layer's states."""
        y = ops.conv(x, self.spec, batch)
        return ops.map(self.activation, y) if self.activation else y

    def multiply(self, factors: FloatArray) -> None:
        """Multiplies the input of each channel by its factor [n]: the taps are what has them."""
        taps = self.spec.taps
        data = (taps.data.reshape(self.spec.n_taps, -1) * factors).reshape(-1)
        self.spec = replace(self.spec, taps=Vector(data, taps.name))


def state_layer(*parts: tuple[tuple[str, tuple[int, ...]], ...]) -> StateLayer:
    """The cache entry of a layer that keeps the arrays of its parts."""
    return StateLayer(tuple(array for part in parts for array in part))
