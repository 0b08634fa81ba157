"""The steps from the stream to a head's query, key or value, forward and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kukri.interp.hooks.hook_names import apply_norm, norm_scale, normalized
from kukri.interp.hooks.weights import bias, rows
from kukri.kernels.arrays import FloatArray
from kukri.models.trace import Matrix, Norm, Step


def head_steps(steps: Sequence[Step], d_head: int, n_heads: int) -> tuple[list[Step], list[list[Step]]]:
    """Return the steps that heads share, and each head's own: its rows of the last matrix, and the rest."""
    last = max(i for i, step in enumerate(steps) if isinstance(step, Matrix))
    matrix = steps[last]
    assert isinstance(matrix, Matrix)
    starts = range(matrix.start, matrix.start + n_heads * d_head, d_head)
    own = [replace(matrix, start=start, stop=start + d_head) for start in starts]
    return [*steps[:last]], [[one, *steps[last + 1 :]] for one in own]


def through(steps: Sequence[Step], x: FloatArray) -> FloatArray:
    """Return the result of steps on x [n, D]: [n, K]."""
    for step in steps:
        x = _after(step, x)
    return x


def gradient(steps: Sequence[Step], x: FloatArray, grad: FloatArray) -> FloatArray:
    """The gradient at x [n, D], from that at what steps make of it, [n, K]."""
    given = [x]
    for step in steps[:-1]:
        given.append(_after(step, given[-1]))
    for step, before in zip(reversed(steps), reversed(given)):
        grad = _back(step, before, grad)
    return grad


def _after(step: Step, x: FloatArray) -> FloatArray:
    if isinstance(step, Matrix):
        made: FloatArray = x @ rows(step).T + bias(step)
        return made
    if isinstance(step, Norm):
        return apply_norm(step, _parts(step, x)).reshape(x.shape)
    return x * np.float32(step)


def _back(step: Step, x: FloatArray, grad: FloatArray) -> FloatArray:
    if isinstance(step, Matrix):
        back: FloatArray = grad @ rows(step)
        return back
    if not isinstance(step, Norm):
        return grad * np.float32(step)
    back = _parts(step, grad) * step.weight.data
    if step.centers:
        back -= back.mean(axis=-1, keepdims=True)
    unit = normalized(step, _parts(step, x))
    back = (back - unit * (back * unit).mean(axis=-1, keepdims=True)) / norm_scale(step, _parts(step, x))
    return back.reshape(x.shape)


def _parts(norm: Norm, x: FloatArray) -> FloatArray:
    """Return x [n, width] in the shape that is normed: [n, 1, width], or [n, heads, K]."""
    return x.reshape(len(x), -1, len(norm.weight))
