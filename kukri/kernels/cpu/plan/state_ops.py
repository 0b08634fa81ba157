"""Typed ops of recurrent layers, as those of `ops.py`; their kernels are in `recurrent.py`."""

from __future__ import annotations

from kukri.dataclass import dataclass
from kukri.kernels.cpu.compile.kernel_source import float_bits
from kukri.kernels.cpu.plan.ops import Addresses, Op, Value, whole_vectors
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
        return _channels(self.spec, at) | state_of(at, self.spec.layer, "conv")


@dataclass(eq=False)
class ConvBothWays(Op):
    """A convolution of each column, over inputs before and after."""

    x: Value
    y: Value
    spec: ConvSpec
    kernel = "conv_both_ways"

    def record(self, at: Addresses) -> dict[str, int]:
        return _channels(self.spec, at)


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
        least, most = map(float_bits, self.spec.limits)
        return {"least": least, "most": most} | state_of(at, self.spec.layer, "scan")


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
        return state_of(at, self.spec.layer, "delta")


def _channels(spec: ConvSpec, at: Addresses) -> dict[str, int]:
    """A kernel's parameters for channels in whole vectors: their number and their taps."""
    taps = whole_vectors(spec.taps.data.reshape(spec.n_lines * spec.n_taps, -1))
    return {"n": taps.shape[1], "taps": at.of_array(taps)}


def state_of(at: Addresses, layer: int, name: str) -> dict[str, int]:
    """A kernel's parameters for an array of states: its address, and the bytes of a slot."""
    states = at.cache.states[layer][name]
    return {"state": address_of(states), "slot_bytes": states.strides[0]}
