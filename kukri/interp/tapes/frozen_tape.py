"""A tape of the model as a linear map: attention patterns, norms' scales and gates are constants of the run.

Between the outputs of MLPs, which are given, all ops are then linear in the residual stream, so a gradient
times a source is exactly what the source adds to a target (Ameisen et al. 2025). Gradients of many targets
are computed at once, [targets, rows, width], for rows up to the targets' last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kukri.errors import UnsupportedError
from kukri.interp.tapes.tape import Tape, TextRows, Variable, _shares, shared_op
from kukri.kernels.activations import NUMPY, activate, slopes
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Program
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import Vector, Weight
from kukri.quant.blocks import dequantize

_map = shared_op("map")


class FrozenTape(Tape):
    """Runs one text. `skips` are linear maps [D out, D in] by layer, from an MLP's input to its output.

    The taps `reads` are the inputs of MLPs, `writes` their outputs.
    """

    def __init__(
        self, matrices: Any, ropes: Any, reads: Sequence[str], writes: Sequence[str], skips: Mapping[int, Any]
    ) -> None:
        super().__init__(matrices, ropes)
        self.reads, self.writes, self._skips = reads, writes, skips
        self._at: dict[str, int] = {}  # the node of a tap
        self._constants: list[FloatArray] = []  # patterns, scales and gates, in the order of the run
        self._is_running = False
        self.keeps_matrices = False  # True: matrices of MLPs too, for many runs

    def run(self, program: Program, batch: TextRows) -> Variable:
        self._is_running = True
        try:
            return super().run(program, batch)
        finally:
            self._is_running = False

    def pull_back(self, targets: Mapping[str, FloatArray]) -> Iterator[tuple[str, FloatArray]]:
        """Gradients [targets, rows, width] at the taps that MLPs write and at "hook_embed", by name, from the
        last to the first, without gradients that are zero.

        `targets` are the gradients to begin with, by tap: [targets, rows, width] with the same rows.
        """
        for variable, _ in self._nodes:
            variable.grad = None
        for tap, begin in targets.items():
            self._tapped[tap].add(begin)
        names = {id(self._tapped[tap]): tap for tap in (*self.writes, "hook_embed")}
        last = max(self._at[tap] for tap in targets)
        for variable, pull in reversed(self._nodes[: last + 1]):
            grad, variable.grad = variable.grad, None
            if grad is not None:
                pull(grad)
                if id(variable) in names:
                    yield names[id(variable)], grad

    def attention(
        self, q: Variable, k: Variable | None, v: Variable | None, spec: AttentionSpec, batch: TextRows
    ) -> Variable:
        """Attention whose gradient reaches the values alone: the pattern is frozen."""
        if k is None or v is None:
            k, v = self._kv[spec.kv_layer]
        self._kv[spec.layer] = k, v
        shape = len(q.x), spec.n_kv_heads, spec.group, spec.d_head
        shares = self._frozen(
            lambda: _shares(q.x, k.x, spec, self.seen(spec, len(q.x)))[1], is_pattern=True
        )  # [G, R, T, T]
        values = v.x.reshape(len(v.x), spec.n_kv_heads, -1).transpose(1, 0, 2)
        out = (shares @ values[:, None]).transpose(2, 0, 1, 3).reshape(q.x.shape)
        found = v

        def pull(g: FloatArray) -> None:
            n, lead = g.shape[-2], g.shape[:-2]
            own = np.moveaxis(g.reshape(*lead, n, *shape[1:]), -4, -2)  # [..., G, R, T, K]
            back = (shares[..., :n, :n].swapaxes(-1, -2) @ own).sum(-3)  # [..., G, T, K]
            found.add(np.moveaxis(back, -3, -2).reshape(*lead, n, -1))

        return self._new(out, pull)

    def map(
        self, name: str, x: Variable, other: Variable | None = None, a: float = 0.0, b: float = 0.0
    ) -> Variable:
        """Return a gated value with a frozen gate, linear in x: no gradient reaches the gate."""
        if other is None:
            return _map(self, name, x, other, a, b)
        if name == "gated_itself":
            raise UnsupportedError("attribution graphs require gates that are not the gated value itself")
        factor = self._frozen(lambda: slopes(NUMPY, name, x.x, other.x, a, b)[0])
        rest = self._frozen(lambda: activate(NUMPY, name, x.x, other.x, a, b) - x.x * factor)
        return self._new(x.x * factor + rest, lambda g: x.add(g * factor[: g.shape[-2]]))

    def delta_rule(self, *inputs: Any, **options: Any) -> Variable:
        """Raises UnsupportedError: a recurrent layer's mixing is not a pattern."""
        raise UnsupportedError("attribution graphs are not supported for models with recurrent layers")

    def tap(self, name: str, layer: int | None, x: Variable) -> Variable:
        """Note x under its name. An MLP's output is a constant, apart from a linear skip."""
        full_name = tap_name(name, layer)
        if full_name not in self.writes:
            found = super().tap(name, layer, x)
        else:
            out = self._output(full_name, x.x)
            skip = None if layer is None else self._skips.get(layer)
            if skip is None:
                found = self._new(out, lambda g: None)
            else:
                read = self._tapped[self.reads[layer or 0]]
                found = self._new(out, lambda g: read.add((g.reshape(-1, len(skip)) @ skip).reshape(g.shape)))
            self._tapped[full_name] = found
        self._at[full_name] = len(self._nodes) - 1
        return found

    def _frozen(self, make: Callable[[], FloatArray], is_pattern: bool = False) -> FloatArray:
        """A constant of the run."""
        self._constants.append(make())
        return self._constants[-1]

    def _output(self, tap: str, x: FloatArray) -> FloatArray:
        """Return an MLP's output."""
        return x

    def _matrix(self, weight: Weight) -> FloatArray:
        """Return a matrix in float32, kept if gradients need it. They pass by MLPs, most of a model."""
        if self._is_running and not self.keeps_matrices and weight not in self.matrices:
            return dequantize(weight.data, weight.type)
        return super()._matrix(weight)

    def _normed(
        self, x: Variable, parts: FloatArray, weight: Vector, bias: Vector | None, eps: float, shape: Any
    ) -> Variable:
        centred = parts if bias is None else parts - parts.mean(-1, keepdims=True)
        least = np.float32(eps)
        inverse = self._frozen(lambda: 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + least))
        factor = inverse * weight.data

        def pull(g: FloatArray) -> None:
            back = g.reshape(*g.shape[:-1], *parts.shape[1:]) * factor[: g.shape[-2]]
            if bias is not None:
                back = back - back.mean(-1, keepdims=True)
            x.add(back.reshape(g.shape))

        y = centred * factor
        return self._new((y if bias is None else y + bias.data).reshape(shape), pull)


class ReplayedTape(FrozenTape):
    """The same run again, with patterns, scales and gates of `first`, or with its patterns alone, and MLPs
    that write something else.

    `output(tap, x)` replaces an MLP's output x once its input is known, which is the `value` of its tap.
    """

    def __init__(
        self,
        first: FrozenTape,
        output: Callable[[str, FloatArray], FloatArray],
        holds_patterns_alone: bool = False,
    ) -> None:
        super().__init__(first.matrices, first._ropes, first.reads, first.writes, first._skips)
        self._given_output, self._replayed = output, iter(first._constants)
        self._holds_patterns_alone = holds_patterns_alone
        self.keeps_matrices = first.keeps_matrices

    def _frozen(self, make: Callable[[], FloatArray], is_pattern: bool = False) -> FloatArray:
        constant = next(self._replayed)
        return make() if self._holds_patterns_alone and not is_pattern else constant

    def _output(self, tap: str, x: FloatArray) -> FloatArray:
        return self._given_output(tap, x)
