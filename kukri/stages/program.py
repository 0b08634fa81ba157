"""A part of a model as a program: its ops between two layers.

The model's code runs from its start to its end, and does not know: ops before the part are passed over, and
at the tap of the first layer after it the run ends. So any model whose layers begin with a tap
`hook_resid_pre` can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kukri.kernels.cache import CacheLayout, KVLayer, StateLayer
from kukri.kernels.op_set import Program, StageOps, Tensor

_BORDER = "hook_resid_pre"  # the tap at the beginning of each layer


class StageProgram:
    """`layers` of a model: from the embedding if they begin with 0, to the end if they reach `n_layers`.

    Between two stages go the activations [T, D], D being `width`.
    """

    def __init__(self, program: Program, layers: range, n_layers: int, width: int) -> None:
        self._program, self._width = program, width
        self._start = layers.start
        self._stop = layers.stop if layers.stop < n_layers else None

    def __call__(self, ops: Any, batch: Any) -> Tensor:
        """The result of the model, or the activations [T, D] for the next stage. `ops` are `StageOps`."""
        try:
            return self._program(_PartOps(ops, batch, self._width, self._start, self._stop), batch)
        except _EndOfPartError as end:
            return end.activations


def stage_layout(layout: CacheLayout, layers: range, n_layers: int) -> tuple[KVLayer | StateLayer, ...]:
    """Return the layout of a stage's cache. It has an entry for every layer, and only its own layers take
    memory.

    A model of `n_layers` has an entry for each, or keys and values for each and then states.
    """
    some = next((entry for entry in layout if isinstance(entry, KVLayer)), KVLayer(0, 64))

    def elsewhere(entry: KVLayer | StateLayer) -> KVLayer:
        """A layer of a size that the cache's type can hold, in its pool: all stages number pools alike."""
        return replace(entry if isinstance(entry, KVLayer) else some, n_kv_heads=0)

    return tuple(entry if i % n_layers in layers else elsewhere(entry) for i, entry in enumerate(layout))


class _EndOfPartError(Exception):
    """Ends the run of a part that is not the last."""

    def __init__(self, activations: Tensor) -> None:
        self.activations = activations


class _PartOps:
    """An op set that skips the ops before a layer, and ends the run at a later layer."""

    def __init__(self, ops: StageOps, batch: Any, width: int, start: int, stop: int | None) -> None:
        self._ops, self._batch, self._width = ops, batch, width
        self._start, self._stop = start, stop
        self._is_before = start > 0

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        if name == _BORDER:
            if layer == self._stop:
                raise _EndOfPartError(x)
            if self._is_before and layer == self._start:
                self._is_before = False
                return self._ops.activations(self._batch, self._width)
        return None if self._is_before else self._ops.tap(name, layer, x)

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(None for _ in widths) if self._is_before else self._ops.split(x, widths)

    def rope(self, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return (None, None) if self._is_before else self._ops.rope(q, k, *others)

    def __getattr__(self, name: str) -> Any:
        """Any other op; each has one result."""
        return _nothing if self._is_before else getattr(self._ops, name)


def _nothing(*_: Any, **__: Any) -> None:
    """The result of an op that is passed over."""
