"""Two rows of logits about the same token: how far apart are they?"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.kernels.arrays import BoolArray, DoubleArray, FloatArray

_ROWS = 32  # rows of logits in float64 at a time


@dataclass(frozen=True)
class Divergence:
    """For each row: KL(A || B), and -log of the probabilities that A and B give the token that came, in nats.

    `delta_p` is B's probability of that token less A's; `same_top` says that both think the same likeliest.
    """

    kl: DoubleArray
    nll_a: DoubleArray
    nll_b: DoubleArray
    delta_p: DoubleArray
    same_top: BoolArray


def divergence(a: FloatArray, b: FloatArray, targets: npt.ArrayLike) -> Divergence:
    """The Divergence of logits [T, V] and the tokens [T] that came next. Computed in float64."""
    next_ids = np.asarray(targets)
    kl, nll_a, nll_b = np.empty(len(a)), np.empty(len(a)), np.empty(len(a))
    for start in range(0, len(a), _ROWS):
        rows = slice(start, start + _ROWS)
        log_p, log_q = log_softmax(a[rows]), log_softmax(b[rows])
        column = next_ids[rows, None]
        nll_a[rows] = -np.take_along_axis(log_p, column, 1)[:, 0]
        nll_b[rows] = -np.take_along_axis(log_q, column, 1)[:, 0]
        log_q -= log_p
        kl[rows] = -np.einsum("tv,tv->t", np.exp(log_p, out=log_p), log_q)
    same_top = a.argmax(axis=1) == b.argmax(axis=1)
    # rounding may leave -1e-17 if both agree
    return Divergence(np.maximum(kl, 0), nll_a, nll_b, np.exp(-nll_b) - np.exp(-nll_a), same_top)


def token_nll(logits: FloatArray, targets: npt.ArrayLike) -> DoubleArray:
    """-log of the probabilities, by logits [T, V], of the tokens [T] that came next: float64, nats."""
    next_ids = np.asarray(targets)
    nll = np.empty(len(logits))
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        nll[rows] = -np.take_along_axis(log_softmax(logits[rows]), next_ids[rows, None], 1)[:, 0]
    return nll


def log_softmax(logits: FloatArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Along each row, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x
