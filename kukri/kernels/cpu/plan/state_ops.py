"""Typed ops of recurrent layers, as those of `ops.py`; their kernels are in `recurrent.py`."""

from __future__ import annotations

from dataclasses import dataclass

from kukri.kernels.cpu.compile.kernel_source import float_bits
from kukri.kernels.cpu.plan.ops import Addresses, Op, Value
from kukri.kernels.cpu.run.memory import address_of
from kukri.kernels.specs import ConvSpec, DeltaSpec, ScanSpec


@dataclass(eq=False)
class Conv(Op):
    """A causal convolution of each column."""

    x: Value
    y: Value
    spec: ConvSpec
    kernel = "conv"

    def record(self, at: Addresses) -> dict[str, int]:
        state = state_of(at, self.spec.layer, "conv")
        return _conv_fields(self, at) | state | {"is_activated": int(self.spec.is_activated)}


@dataclass(eq=False)
class ConvBothWays(Op):
    """A convolution of each column, over inputs before and after."""

    x: Value
    y: Value
    spec: ConvSpec
    kernel = "conv_both_ways"

    def record(self, at: Addresses) -> dict[str, int]:
        return _conv_fields(self, at) | {"n_after": self.spec.n_after or 0}


def _conv_fields(op: Conv | ConvBothWays, at: Addresses) -> dict[str, int]:
    """What both convolutions have in their records."""
    spec = op.spec
    return {
        "batch": at.batch,
        "x": at.of(op.x),
        "x_stride": op.x.stride,
        "n": op.x.width,
        "taps": at.of_array(spec.taps.data),
        "bias": 0 if spec.bias is None else at.of_array(spec.bias.data),
        "n_taps": spec.n_taps,
        "y": at.of(op.y),
        "y_stride": op.y.stride,
    }


@dataclass(eq=False)
class Scan(Op):
    """A state space."""

    x: Value
    b: Value
    c: Value
    dt: Value
    y: Value
    spec: ScanSpec
    kernel = "scan"

    def record(self, at: Addresses) -> dict[str, int]:
        spec, (least, most) = self.spec, self.spec.limits
        return (
            {
                "batch": at.batch,
                "n_heads": spec.n_heads,
                "n_groups": spec.n_groups,
                "d_state": spec.d_state,
                "d_head": spec.d_head,
                "a": at.of_array(spec.a.data),
                "d": at.of_array(spec.d.data),
                "dt_bias": at.of_array(spec.dt_bias.data),
                "least": float_bits(least),
                "most": float_bits(most),
            }
            | _named(at, x=self.x, b=self.b, c=self.c, dt=self.dt, y=self.y)
            | state_of(at, spec.layer, "scan")
        )


@dataclass(eq=False)
class DeltaRule(Op):
    """A gated delta rule."""

    q: Value
    k: Value
    v: Value
    decay: Value
    beta: Value
    y: Value
    spec: DeltaSpec
    kernel = "delta_rule"

    def record(self, at: Addresses) -> dict[str, int]:
        spec = self.spec
        return (
            {
                "batch": at.batch,
                "n_heads": spec.n_heads,
                "n_groups": spec.n_groups,
                "are_tiled": int(spec.are_tiled),
                "d_state": spec.d_state,
                "d_head": spec.d_head,
                "a": at.of_array(spec.a.data),
                "dt_bias": at.of_array(spec.dt_bias.data),
            }
            | _named(at, q=self.q, k=self.k, v=self.v, decay=self.decay, beta=self.beta, y=self.y)
            | state_of(at, spec.layer, "delta")
        )


def _named(at: Addresses, **values: Value) -> dict[str, int]:
    """A kernel's parameters for values by name: their addresses and strides."""
    addresses = {name: at.of(value) for name, value in values.items()}
    return addresses | {f"{name}_stride": value.stride for name, value in values.items()}


def state_of(at: Addresses, layer: int, name: str) -> dict[str, int]:
    """A kernel's parameters for an array of states: its address, and the bytes of a slot."""
    states = at.cache.states[layer][name]
    return {"state": address_of(states), "slot_bytes": states.strides[0]}
