"""The choice of experts by the logits of a router, in NumPy: what `Ops.route` is defined by.

`Routes` is what every backend but the CPU's plans hands from `Ops.route` to the ops that read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray
from kukri.kernels.specs import Routing

NO_EXPERT = -1  # in the place of an expert that a token does not use


@dataclass(frozen=True)
class Routes:
    """The experts of T tokens, as arrays or tensors of a backend."""

    weights: Any  # float32 [T, E], 0 for experts that are not used
    experts: Any  # integers [T, n_used]: the numbers of those used, ascending, then NO_EXPERT


@dataclass(frozen=True)
class Choice:
    """The experts of T tokens."""

    numbers: npt.NDArray[np.int64]  # [T, n_used], the best first
    shares: FloatArray  # [T, n_used], their weights: a score each, divided by a total of scores
    scores: FloatArray  # [T, E]: sigmoids, or exp(logit - the largest logit)
    parts: FloatArray  # [T, n_used or 1, E]: of each total the fractions that are these experts' scores


def used_experts(weights: FloatArray, n_used: int) -> npt.NDArray[np.int64]:
    """The `experts` of Routes by their weights [T, E], of which at most `n_used` in a row are not 0."""
    n_experts = weights.shape[1]
    numbers = np.sort(np.where(weights != 0, np.arange(n_experts), n_experts), axis=1)[:, :n_used]
    return np.where(numbers < n_experts, numbers, NO_EXPERT)


def choose(logits: FloatArray, routing: Routing) -> Choice:
    """The experts that the logits [T, E] of a router choose; of equal scores, the first."""
    if routing.by_sigmoid:
        with np.errstate(over="ignore"):
            scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    else:
        scores = np.exp(logits - np.fmax.reduce(logits, axis=1, keepdims=True))
    total = np.ones((len(logits), 1), np.float32) if routing.by_sigmoid else scores.sum(1, keepdims=True)
    by = logits if routing.chooses_by_logits else scores / total
    if routing.bias is not None:
        by = by + routing.bias.data
    if routing.n_groups > 1:
        by = _within_groups(by, routing)
    numbers = np.argsort(-by, axis=1, kind="stable")[:, : routing.n_used]
    if routing.tolerance:
        parts = _nearest(logits, numbers, routing.tolerance)
        shares = np.take_along_axis(parts, numbers[..., None], 2)[..., 0]
        return Choice(numbers, shares, scores, parts)
    chosen = np.take_along_axis(scores, numbers, 1)
    counted = np.full_like(scores, not routing.by_sigmoid)
    if routing.normalized:
        total = chosen.sum(1, keepdims=True)
        np.put_along_axis(counted := np.zeros_like(scores), numbers, np.float32(1), axis=1)
    return Choice(numbers, chosen / total, scores, (np.where(counted, scores, 0) / total)[:, None])


def _nearest(logits: FloatArray, numbers: npt.NDArray[np.int64], tolerance: float) -> FloatArray:
    """Softmaxes [T, n_used, E] of what is not chosen before an expert and is about as good (`Routing`)."""
    left, found = logits.copy(), []
    for chosen in numbers.T[..., None]:
        best = np.take_along_axis(logits, chosen, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            is_far = (best - logits) / np.maximum(np.abs(logits), best) > np.float32(tolerance)
            shares = np.exp(np.where(is_far, np.float32(-np.inf), left) - best)
        found.append(shares / shares.sum(1, keepdims=True))
        np.put_along_axis(left, chosen, np.float32(-np.inf), axis=1)
    return np.stack(found, axis=1)


def _within_groups(by: FloatArray, routing: Routing) -> FloatArray:
    """Scores [T, E], -inf outside of the best groups."""
    groups = by.reshape(len(by), routing.n_groups, -1)
    of_groups = np.sort(groups, axis=-1)[..., -routing.n_best :].sum(-1)
    best = np.argsort(-of_groups, axis=1, kind="stable")[:, : routing.n_groups_used]
    kept = np.zeros(of_groups.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=1)
    within: FloatArray = np.where(kept[..., None], groups, np.float32(-np.inf)).reshape(by.shape)
    return within
