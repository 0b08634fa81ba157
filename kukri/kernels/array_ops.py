"""The ops that leave no choice of an algorithm, once for arrays of NumPy and tensors of PyTorch.

What has such a choice (products, norms, attention, scans, experts, routing) each backend writes its own way,
so that the reference backend shares nothing with what it judges but what can be written in one way only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kukri.kernels.activations import NUMPY, activate, slopes
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.host_step import StateStep, StoppedError, batch_activations, state_steps
from kukri.kernels.op_set import StageOps, Tensor
from kukri.kernels.specs import AttentionSpec, ConvSpec
from kukri.kernels.step import ForwardBatch
from kukri.kernels.taps import Hook, tap_name
from kukri.kernels.weight_handles import AdapterSlots, LowRank, RopeFrequencies, Vector, Weight


class ArrayOps(StageOps):
    """The op set on arrays or tensors: each op returns a new one, and `split` views.

    `xp` has the functions of NumPy, with those of `NumPyFunctions`, or of PyTorch.
    """

    xp: Any

    def __init__(self, cache: Any, taps: frozenset[str] = frozenset(), adapters: AdapterSlots = ()) -> None:
        self.cache, self.taps, self.adapters = cache, taps, adapters
        self.row_adapters: IntArray | None = None  # the slot of each row; None: no row has one
        self._adapter_rows: dict[int, Any] = {}  # the rows of each slot
        self.on_tap: Hook | None = None  # the step's
        self.stop: str | None = None  # the tap that ends the step

    @abstractmethod
    def product(self, x: Tensor, weights: Sequence[Weight]) -> Tensor:
        """x [R, in] times each weight [out_i, in] transposed, side by side."""

    @abstractmethod
    def low_rank(self, x: Tensor, update: LowRank) -> Tensor:
        """What an adapter adds to the product of x [R, in] with a matrix -> [R, out]."""

    @abstractmethod
    def cos_and_sin(self, rope: RopeFrequencies, batch: Any) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's tokens, [T, rotary_dim / 2]."""

    def vector(self, vector: Vector) -> Tensor:
        """A constant, float32 [n]."""
        return vector.data

    def floats(self, x: Tensor) -> Tensor:
        """A value as float32, computed if it was put off."""
        return x

    def on_host(self, x: Tensor) -> FloatArray:
        """A value as an array of NumPy."""
        array: FloatArray = x
        return array

    def from_host(self, array: Any) -> Tensor:
        """An array of NumPy as a value."""
        return array

    def host_batch(self, batch: Any) -> ForwardBatch:
        """The batch whose arrays are NumPy's."""
        host: ForwardBatch = batch
        return host

    def activations(self, batch: Any, width: int) -> Tensor:
        return self.from_host(batch_activations(self.host_batch(batch), width).copy())

    def head_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        return self.rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps).reshape(x.shape)

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        y = self.product(x, weights)
        if bias is not None:
            y = y + self.vector(bias)
        self.update(y, x, weights)
        if tap is not None:
            y = self.tap(*tap, y)
        return y if residual is None else y + residual

    def set_row_adapters(self, slots: IntArray | None) -> None:
        """Sets the slot of each row's adapter; None: no row has one."""
        self.row_adapters, self._adapter_rows = slots, {}
        if slots is not None:
            for slot in np.unique(slots[slots >= 0]).tolist():
                self._adapter_rows[slot] = self.from_host(np.flatnonzero(slots == slot))

    def update(self, y: Tensor, x: Tensor, weights: Sequence[Weight]) -> None:
        """Adds to each row of y, in place, what its adapter makes of the row of x."""
        for slot, rows in self._adapter_rows.items():
            start = 0
            for weight in weights:
                stop = start + weight.shape[0]
                update = (self.adapters[slot] or {}).get(weight.name)
                if update is not None:
                    y[rows, start:stop] += self.low_rank(x[rows], update)
                start = stop

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.floats(x) + self.floats(residual)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self.floats(x) * float(factor)

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        x = self.floats(x)
        return tuple(x[:, stop - width : stop] for width, stop in zip(widths, accumulate(widths)))

    def head_columns(self, x: Tensor, n_heads: int, start: int, stop: int) -> Tensor:
        x = self.floats(x)
        return x.reshape(len(x), n_heads, -1)[..., start:stop].reshape(len(x), -1)

    def join_heads(self, parts: Sequence[Tensor], n_heads: int) -> Tensor:
        heads = [(x := self.floats(part)).reshape(len(x), n_heads, -1) for part in parts]
        return self.xp.concat(heads, -1).reshape(len(heads[0]), -1)

    def repeat(self, x: Tensor, times: int) -> Tensor:
        x = self.floats(x)
        return self.xp.broadcast_to(x[..., None], (*x.shape, times)).reshape(len(x), -1)

    def rope(
        self, q: Tensor, k: Tensor | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor | None]:
        angles = self.cos_and_sin(rope, batch)
        q, k = (None if x is None else rotated(self.xp, x, *angles, spec.d_head) for x in (q, k))
        return q, k

    def rotate(self, x: Tensor, rope: RopeFrequencies, spec: AttentionSpec, batch: Any) -> Tensor:
        return rotated(self.xp, self.floats(x), *self.cos_and_sin(rope, batch), spec.d_head)

    def conv(self, x: Tensor, spec: ConvSpec, batch: Any) -> Tensor:
        taps, n_before = self.vector(spec.taps).reshape(spec.n_lines * spec.n_taps, -1), spec.n_taps - 1
        y = self.xp.zeros_like(x)
        if spec.bias is not None:
            y = y + self.vector(spec.bias)
        if spec.n_after is not None:
            seen = [*self._seen(batch)]
            rows = [slice(start, start + n_seen) for start, _, n_seen in seen]
            convolve(y, x, rows, taps, n_before - spec.n_after, spec.n_lines)
            for start, stop, n_seen in seen:
                y[start + n_seen : stop] = 0
            return y
        for step, states, past in self._states("conv", spec.layer, batch):
            seen = self.xp.concat([past, x[step.start : step.stop]])  # row i is n_before tokens earlier
            for i, weights in enumerate(taps):
                y[step.start : step.stop] += weights * seen[i : i + step.stop - step.start]
            for t, slot in (*step.saves, (step.stop - 1, step.slot)):
                last = t - step.start + 1
                states[slot] = seen[last : last + n_before]
        return self.xp.silu(y) if spec.is_activated else y

    def _seen(self, batch: Any) -> Iterator[tuple[int, int, int]]:
        """The tokens of each sequence, from one to before another, and how many of them are seen."""
        host = self.host_batch(batch)
        starts = host.query_start.tolist()
        for start, stop, n_seen in zip(starts, starts[1:], host.context_len.tolist()):
            yield start, stop, min(n_seen, stop - start)

    def _states(self, name: str, layer: int, batch: Any) -> Iterator[tuple[StateStep, Any, Tensor]]:
        """Each sequence of a step, a layer's states by slot, and the sequence's own."""
        states = self.cache.states[layer][name]
        for step in state_steps(self.host_batch(batch)):
            yield step, states, self.xp.zeros_like(states[0]) if step.begins else states[step.slot]

    def map(
        self, name: str, x: Tensor, other: Tensor | None = None, a: float = 0.0, b: float = 0.0
    ) -> Tensor:
        return activate(self.xp, name, self.floats(x), self.floats(other), a, b)

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        if self.row_adapters is not None:  # only for the rows from here on
            self.set_row_adapters(self.row_adapters[self.host_batch(batch).logit_rows])
        return self.floats(x)[batch.logit_rows]

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        full_name = tap_name(name, layer)
        if self.on_tap is None or full_name not in self.taps:
            return x
        array = self.on_host(self.floats(x))
        replacement = self.on_tap(full_name, array)
        if full_name == self.stop:
            raise StoppedError
        # an array on the host that was edited in place is to be read too
        return self.from_host(array if replacement is None else replacement)


def rotated(xp: Any, x: Tensor, cos: Tensor, sin: Tensor, d_head: int) -> Tensor:
    """x [T, heads*K], of which dimension i of each head is rotated with dimension i + rotary_dim / 2 by the
    angles of cos and sin [T, rotary_dim / 2] (Su et al. 2021).
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    heads = x.reshape(len(x), -1, d_head)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]]
    return xp.concat(parts, -1).reshape(x.shape)


def convolve(
    y: Tensor, x: Tensor, texts: Sequence[slice], taps: Tensor, n_before: int, n_lines: int = 1
) -> None:
    """Adds to the rows of texts in y, in place, the taps [n_lines * n, C] times rows of x.

    The first tap of a line is `n_before` rows earlier; lines are for as many texts before as after a text.
    """
    n_taps = len(taps) // n_lines
    for number, own in enumerate(texts):
        for i, weights in enumerate(taps):
            other = number + i // n_taps - n_lines // 2
            if not 0 <= other < len(texts):
                continue
            n = n_before - i % n_taps  # the tap reads this many rows earlier; later ones below 0
            into, read = own.start + max(n, 0), texts[other].start + max(-n, 0)
            size = max(min(own.stop - into, texts[other].stop - read), 0)
            y[into : into + size] += weights * x[read : read + size]


def _columns_grad(g: FloatArray, x: FloatArray, n_heads: int, start: int, stop: int) -> tuple[FloatArray]:
    """Zeros in the other columns of each head."""
    back = np.zeros((*g.shape[:-1], n_heads, x.shape[1] // n_heads), np.float32)
    back[..., start:stop] = g.reshape(*back.shape[:-1], -1)
    return (back.reshape(*g.shape[:-1], -1),)


def _parts_grads(g: FloatArray, parts: Sequence[FloatArray], n_heads: int) -> list[FloatArray]:
    """A part's columns of each head."""
    stops = [*accumulate(part.shape[1] // n_heads for part in parts)]
    heads = np.split(g.reshape(*g.shape[:-1], n_heads, -1), stops[:-1], axis=-1)
    return [own.reshape(*g.shape[:-1], -1) for own in heads]


# The gradients of an op's inputs, from the gradient of its result and what the op was given. NumPy's alone:
# PyTorch has its own.
DERIVATIVES: dict[str, Callable[..., Iterable[FloatArray]]] = {
    "add": lambda g, x, residual: (g, g),
    "scale": lambda g, x, factor: (g * np.float32(factor),),
    "repeat": lambda g, x, times: (g.reshape(*g.shape[:-1], -1, times).sum(-1),),
    "head_columns": _columns_grad,
    "join_heads": _parts_grads,
    "map": lambda g, name, *inputs, **numbers: (
        g * slope for slope in slopes(NUMPY, name, *inputs, **numbers)
    ),
}
