"""Batches that fit into memory: sizes of batches, and gradients group by group of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kukri.interp.hooks.hook_values import Rows
from kukri.interp.session import Session
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray, IntArray

_SHARE = 0.4  # part of the free memory to take
_TIMES = 3  # memory of a tape with gradients, as a multiple of the memory of its taps
_Metric = Callable[[FloatArray], tuple[float, FloatArray]]


class GradedRun(NamedTuple):
    """A run of some of the texts, ready for `tape.backward(result, grad)`. `value` is the metric of all."""

    texts: slice
    tape: Any
    result: Any
    grad: FloatArray
    value: float


def most_that_fit(session: Session, n_bytes: int, most: int, left: int | None = None) -> int:
    """Return how many things of `n_bytes` fit into a share of the memory `left`, or free: 1 to `most`."""
    free = session.texts.backend.free_bytes() if left is None else left
    return min(max(int(_SHARE * free) // max(n_bytes, 1), 1), most)


def text_groups(session: Session, texts: Sequence[IntArray], more: int = 0) -> list[slice]:
    """Return groups of texts, in order, whose tapes fit into memory, with `more` bytes for each token."""
    config, heads = session.config, session.trace.heads.values()
    free = most_that_fit(session, 1, 1 << 62)
    of_token = 4 * (_TIMES * sum(session.trace.widths.values()) + 2 * config.n_vocab) + more
    of_pair = 4 * _TIMES * sum(one.spec.n_heads for one in heads)  # for a query and a key
    ends, taken = [0], 0
    for i, ids in enumerate(texts):
        n_bytes = len(ids) * (of_token + of_pair * len(ids))
        if taken and taken + n_bytes > free:
            ends.append(i)
            taken = 0
        taken += n_bytes
    return [slice(start, stop) for start, stop in zip(ends, [*ends[1:], len(texts)])]


def graded_runs(
    session: Session,
    texts: Sequence[IntArray],
    metric: _Metric,
    groups: Sequence[slice],
    make: Callable[[Mapping[str, FloatArray] | None], Any],
    given: Callable[[slice], Mapping[str, FloatArray]] | None = None,
) -> Iterator[GradedRun]:
    """The run of each group, with the gradient of the metric of all texts by its logits.

    `make(given)` makes a tape. Several groups are run twice, since the metric sees the logits of all texts.
    """

    def run(group: slice) -> tuple[Any, Any]:
        tape = make(None if given is None else given(group))
        held[:] = [tape.matrices]  # for the next group's tape
        return tape, tape.run(session.model, TextRows.of(texts[group]))

    held: list[Any] = []
    logits: list[FloatArray] = []
    for group in groups:
        tape = result = None  # the last group is not needed any more
        tape, result = run(group)
        logits.append(tape.values(result))
    rows = Rows(np.array([len(ids) for ids in texts], np.int32))
    value, grad = metric(rows.padded(logits[0] if len(logits) == 1 else np.concatenate(logits)))
    grads = rows.rows(np.asarray(grad, np.float32))
    starts = np.cumsum([0, *map(len, logits)])
    logits.clear()
    for group, start, stop in zip(groups, starts[:-1], starts[1:]):
        if len(groups) > 1:
            tape = result = None
            tape, result = run(group)
        yield GradedRun(group, tape, result, grads[start:stop], value)
