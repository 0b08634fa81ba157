"""Hooks and captures of one request, while it generates beside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kukri.engine import Request
from kukri.errors import HookError
from kukri.interp.cache import ActivationCache
from kukri.interp.listening import Listening, StepListener
from kukri.interp.names import Point
from kukri.interp.values import Model, Rows
from kukri.kernels.types import FloatArray


class RequestTaps:
    """What one request listens on: see `kukri.kernels.taps.SequenceTaps`.

    Captures are of each token that was an input, the prompt's and all generated but the last; edits are made
    to each chunk of the prompt and to each token. A request that is preempted is computed anew, edits
    included.
    """

    def __init__(self, model: Model, wanted: Sequence[Point], hooks: Sequence[Listening]) -> None:
        for point in (*wanted, *(listening.point for listening in hooks)):
            if point.form == "logits":
                raise HookError(f"{point.name} is seen in runs of whole texts alone: run_with_hooks")
        for listening in hooks:
            point = listening.point
            if point.form in ("scores", "pattern") or (
                point.layer is None and point.edit_tap != "hook_embed"
            ):
                raise HookError(f"{point.name} takes hooks in runs of whole texts alone: run_with_hooks")
        self._model, self._wanted, self._hooks = model, wanted, hooks
        self._keep = {tap for point in wanted for tap in point.needs}
        self.names = StepListener(model, Rows(np.ones(1, np.int32)), _NO_IDS, hooks, self._keep).taps
        self.edits = bool(hooks)
        self._listener: StepListener | None = None  # of the chunk that starts at
        self._start = -1
        self._kept: dict[str, dict[int, tuple[int, FloatArray]]] = {
            tap: {} for tap in self._keep
        }  # by the first position

    def __call__(self, name: str, x: FloatArray, start: int, n_tokens: int) -> None:
        """Shows a chunk's rows at a tap."""
        listener = self._listener
        if listener is None or start != self._start:
            rows = Rows(np.array([n_tokens], np.int32))
            listener = self._listener = StepListener(
                self._model, rows, _NO_IDS, self._hooks, self._keep, start
            )
            self._start = start
        listener(name, x)
        if name in self._keep:
            self._kept[name][start] = n_tokens, listener.kept[name]

    def cache(self, request: Request) -> ActivationCache:
        """What was captured of a request that has ended."""
        n = request.n_tokens - 1  # the last token generated was no input
        taps = {tap: _joined(chunks, n) for tap, chunks in self._kept.items()}
        names = [point.name for point in self._wanted]
        return ActivationCache(self._model, taps, Rows(np.array([n], np.int32)), request.tokens[:n], names)


_NO_IDS: Any = np.zeros(0, np.int32)


def _joined(chunks: dict[int, tuple[int, FloatArray]], n: int) -> FloatArray:
    """The first n tokens of chunks, which come by their first token, with their number of tokens."""
    parts = [
        x[: max(0, n - start) * (len(x) // n_tokens)]
        for start, (n_tokens, x) in sorted(chunks.items())
        if start < n
    ]
    return np.concatenate(parts)
