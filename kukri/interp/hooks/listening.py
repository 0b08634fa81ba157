"""The listener of a step: keeps the taps that are wanted, and calls hooks in TransformerLens' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kukri.config import ModelConfig
from kukri.dataclass import dataclass
from kukri.errors import HookError, RequestError
from kukri.interp.hooks.hook_names import LOGITS, Point, find, full_name
from kukri.interp.hooks.hook_values import Model, Rows
from kukri.kernels.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class HookPoint:
    """Told to a hook besides the value: the `name` it listens on, and the first token's position in its text.

    `ctx` is a dictionary that lasts as long as the hook is there.
    """

    name: str
    layer_index: int | None
    start: int
    ctx: dict[str, Any]

    def layer(self) -> int:
        """The layer. Raises HookError outside the blocks."""
        if self.layer_index is None:
            raise HookError(f"{self.name} must be a hook of a layer")
        return self.layer_index


# hook(value, hook=HookPoint): edits the value [batch, pos, ...] in place, or returns another
PointHook = Callable[..., Any]
NamesFilter = None | str | Sequence[str] | Callable[[str], bool]
FwdHooks = Iterable[tuple[Any, PointHook]]


@dataclass(frozen=True, eq=False)
class Listening:
    """A hook on a point."""

    point: Point
    hook: PointHook
    ctx: dict[str, Any]


class Selects(Protocol):
    """What finds points by names."""

    def select(self, names: NamesFilter) -> list[Point]:
        """See Names."""


class Names:
    """The points of a model, found by names and filters. Attributes: points, by full name; config."""

    points: Mapping[str, Point]
    config: ModelConfig

    def point(self, name: Any) -> Point:
        """The point of a full or short name, or of a tuple such as ("resid_pre", 3). Raises HookError."""
        return find(full_name(name, self.config.n_layers), self.points)

    def select(self, names: NamesFilter) -> list[Point]:
        """The points that a filter names; all but `attn.hook_result` for None, as in TransformerLens. The
        inputs of heads, which are `n_heads` times the stream, are taken if they are named.
        """
        found = [point for point in self.points.values() if point.form != "head_inputs"]
        if names is None:
            return [point for point in found if point.form != "result"]
        if callable(names):
            return [point for point in found if names(point.name)]
        is_key = isinstance(names, tuple) and len(names) > 1 and not isinstance(names[1], str)  # ("q", 3)
        return [self.point(name) for name in ([names] if is_key or isinstance(names, str) else names)]

    def listen(self, fwd_hooks: FwdHooks) -> list[Listening]:
        """Hooks by name, or by a filter of names. Raises HookError on names and edits that do not exist."""
        found: list[Listening] = []
        for name, hook in fwd_hooks:
            if not callable(hook):
                raise HookError(f"the hook on {name!r} must be callable, not a {type(hook).__name__}")
            for point in self.select(name) if callable(name) else [self.point(name)]:
                if not point.edit_tap:
                    raise HookError(f"{point.name} does not support hooks, only reading (run_with_cache)")
                found.append(Listening(point, hook, {}))
        return found


class StepListener:
    """The listener of a step, or of a request's part of one: see `kukri.kernels.taps.TapListener`.

    `keep` are the taps whose values are wanted, which `kept` has afterwards, copied after the hooks' edits.
    """

    def __init__(
        self,
        model: Model,
        rows: Rows,
        ids: IntArray,
        hooks: Sequence[Listening],
        keep: Iterable[str],
        start: int = 0,
    ) -> None:
        self._model, self._rows, self._ids, self._start = model, rows, ids, start
        self._hooks: dict[str, list[tuple[Point, Listening]]] = {}
        self._keep = set(keep)
        for listening in hooks:
            for point in (listening.point, *listening.point.then):
                self._hooks.setdefault(point.edit_tap, []).append((point, listening))
                self._keep |= set(point.edit_needs)
        self._inputs: dict[Listening, FloatArray] = {}  # as hooks left them, for the points that follow
        self.kept: dict[str, FloatArray] = {}

    @property
    def names(self) -> frozenset[str]:
        """The full names of the taps."""
        return frozenset(self._keep | self._hooks.keys()) - {LOGITS}

    def __call__(self, name: str, x: FloatArray) -> None:
        """Lets the hooks of a tap edit x in place. Raises HookError naming a hook that raised."""
        for point, listening in self._hooks.get(name, ()):
            self._edit(point, listening, name, x)
        if name in self._keep:
            self.kept[name] = x.copy()

    def _edit(self, point: Point, listening: Listening, tap: str, x: FloatArray) -> None:
        if point.form in ("scores", "pattern"):
            self._edit_attention(listening, x)
            return
        if point.form == "head_inputs":
            self._edit_head_inputs(point, listening, x)
            return
        kept = {**self.kept, tap: x} if point.tap in (tap, "") else self.kept
        value = self._model.value(point, kept, self._rows, self._ids)
        before = np.array(value, np.float32)
        after = self._call(listening, before.copy())
        differs = after != before  # true of NaN as well
        if not differs.any():
            return
        n_rows = self._rows.n_rows
        is_edited = self._rows.rows(differs).reshape(n_rows, -1).any(axis=1).repeat(len(x) // n_rows)
        x[is_edited] = self._model.edited(point, after, self._rows)[is_edited]

    def _edit_attention(self, listening: Listening, z: FloatArray) -> None:
        """Recomputes z for the heads and queries whose pattern a hook has changed."""
        point, model, rows = listening.point, self._model, self._rows
        before = model.scores(point, self.kept, rows)
        if point.form == "pattern":
            before = model.pattern(point, before)
        after = self._call(listening, before.copy())
        is_edited = (after != before).any(axis=-1)  # [B, H, T]
        if not is_edited.any():
            return
        assert point.layer is not None
        weights = after if point.form == "pattern" else model.pattern(point, after)
        spec = model.trace.heads[point.layer].spec
        mixed = model.mixed(point.layer, weights, self.kept[point.edit_needs[2]], rows)
        wanted = rows.rows(is_edited.transpose(0, 2, 1))  # [rows, H]
        _replace_heads(z, wanted, model.heads(mixed, spec.d_head)[wanted])

    def _edit_head_inputs(self, point: Point, listening: Listening, x: FloatArray) -> None:
        """Computes queries, keys or values x [rows, H*K] again for heads whose input a hook has changed."""
        model = self._model
        before = np.array(model.value(point, self.kept, self._rows, self._ids), np.float32)
        if point is listening.point:
            after = self._inputs[listening] = self._call(listening, before.copy())
        else:
            after = self._inputs[listening][:, :, : before.shape[2]]
        wanted = self._rows.rows((after != before).any(axis=-1))  # [rows, H]
        _replace_heads(x, wanted, model.of_inputs(point, self._rows.rows(after), wanted))

    def _call(self, listening: Listening, value: FloatArray) -> FloatArray:
        """The value that a hook leaves."""
        point = listening.point
        where = HookPoint(point.name, point.layer, self._start, listening.ctx)
        try:
            found = listening.hook(value.view(), hook=where)  # resized, it leaves the value unchanged
            after = value if found is None else np.asarray(found)
        except Exception as error:
            raise HookError(f"the hook on {point.name} raised {type(error).__name__}: {error}") from error
        if after.shape != value.shape or after.dtype.kind not in "fiu":
            raise HookError(
                f"the hook on {point.name} must return float32 {list(value.shape)}, or None, not "
                f"{after.dtype} {list(after.shape)}"
            )
        return after.astype(np.float32, copy=False)


def _replace_heads(x: FloatArray, wanted: Any, values: FloatArray) -> None:
    """Replaces the heads `wanted` [rows, H] of x [rows, H*K] by values [n, K]; the others keep their bits."""
    heads = x.reshape(*wanted.shape, -1).copy()
    heads[wanted] = values
    x[...] = heads.reshape(x.shape)


def usable_points(model: Selects, names: NamesFilter) -> list[Point]:
    """Return the points of names whose gradient is a tap's gradient. Raises RequestError, HookError."""
    found = model.select(names)
    usable = [p for p in found if p.form in ("plain", "heads") and p.tap == p.edit_tap and p.tap != LOGITS]
    if names is not None and not callable(names) and len(usable) < len(found):
        lacking = next(point.name for point in found if point not in usable)
        raise RequestError(f"gradients of {lacking} are not supported: name its inputs", param="names")
    return usable
