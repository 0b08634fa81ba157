"""The choice of experts by the logits of a router, in NumPy: what `Ops.route` is defined by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray
from kukri.kernels.specs import Routing


@dataclass(frozen=True)
class Choice:
    """The experts of T tokens. A weight is a score divided by the token's total."""

    numbers: npt.NDArray[np.int64]  # [T, n_used], the best first
    scores: FloatArray  # [T, E]: sigmoids, or exp(logit - the largest logit)
    total: FloatArray  # [T, 1]


def choose(logits: FloatArray, routing: Routing) -> Choice:
    """The experts that the logits [T, E] of a router choose; of equal scores, the first."""
    if routing.by_sigmoid:
        with np.errstate(over="ignore"):
            scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    else:
        scores = np.exp(logits - np.fmax.reduce(logits, axis=1, keepdims=True))
    whole = np.ones((len(logits), 1), np.float32) if routing.by_sigmoid else scores.sum(1, keepdims=True)
    by = logits if routing.chooses_by_logits else scores / whole
    if routing.bias is not None:
        by = by + routing.bias.data
    if routing.n_groups > 1:
        by = _within_groups(by, routing)
    numbers = np.argsort(-by, axis=1, kind="stable")[:, : routing.n_used]
    total = np.take_along_axis(scores, numbers, 1).sum(1, keepdims=True) if routing.normalized else whole
    return Choice(numbers, scores, total)


def _within_groups(by: FloatArray, routing: Routing) -> FloatArray:
    """Scores [T, E], -inf outside of the best groups."""
    groups = by.reshape(len(by), routing.n_groups, -1)
    of_groups = np.sort(groups, axis=-1)[..., -routing.n_best :].sum(-1)
    best = np.argsort(-of_groups, axis=1, kind="stable")[:, : routing.n_groups_used]
    kept = np.zeros(of_groups.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=1)
    within: FloatArray = np.where(kept[..., None], groups, np.float32(-np.inf)).reshape(by.shape)
    return within
