"""What recurrent layers have in common: a causal convolution whose state is its last inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kukri.kernels.types import ConvSpec, StateLayer, Vector
from kukri.models.layers import Parameter, matrix_parameter, vector_parameter
from kukri.quant.blocks import dequantize

if TYPE_CHECKING:
    from kukri.models.weights import WeightSource


class Convolution:
    """The weights of a convolution of `n` channels: a matrix (channels, taps), and a bias if there is one.

    Attributes: spec; states, its arrays of a `StateLayer`; parameters.
    """

    def __init__(
        self, source: WeightSource, name: str, n: int, n_taps: int, layer: int, *, is_activated: bool = False
    ) -> None:
        weight = source.matrix(f"{name}.weight", (n, n_taps))
        taps = np.ascontiguousarray(dequantize(weight.data, weight.type).T).reshape(-1)
        self.parameters: list[Parameter] = [matrix_parameter(f"{name}.weight", weight)]
        bias: Vector | None = None
        if source.has(f"{name}.bias"):
            bias = Vector(source.vector(f"{name}.bias", n), f"{name}.bias")
            self.parameters.append(vector_parameter(bias))
        self.spec = ConvSpec(layer, n_taps, Vector(taps, f"{name}.weight"), bias, is_activated)
        self.states = (("conv", (n_taps - 1, n)),)


def state_layer(*parts: tuple[tuple[str, tuple[int, ...]], ...]) -> StateLayer:
    """The cache entry of a layer that keeps the arrays of its parts."""
    return StateLayer(tuple(array for part in parts for array in part))
