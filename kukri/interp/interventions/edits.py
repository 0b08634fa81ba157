"""Resolved interventions on the rows of a request: edits, the conditions of edits, and readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.interp.features.readers import Choose, FeatureReader, Probe
from kukri.interp.hooks.hook_names import Point
from kukri.interp.interventions.positions import Spans
from kukri.kernels.arrays import FloatArray

Op = Literal["capture", "add", "scale", "replace", "ablate", "clamp", "read"]
_ROWS = 64  # rows whose features are read at a time


@dataclass(frozen=True, eq=False)
class When:
    """A condition of an edit: a probe's score, or an autoencoder's feature, is above or below a limit."""

    point: Point
    reader: Probe | FeatureReader
    index: int  # the number of the score or the feature
    above: float
    below: float

    def holds(self, x: FloatArray) -> npt.NDArray[np.bool_]:
        """Return for each row of x [rows, width] whether the condition holds: [rows]."""
        if isinstance(self.reader, Probe):
            found = self.reader.scores(x)[:, self.index]
        else:
            found = self._feature(x)[:, 0]
        return (found > self.above) & (found < self.below)

    @cached_property
    def _feature(self) -> Choose:
        assert not isinstance(self.reader, Probe)
        return self.reader.chooser([self.index])


@dataclass(frozen=True, eq=False)
class Source:
    """An input of edits from an earlier hook: `read` of its rows at some positions, [..., rows, n]."""

    point: Point
    spans: Spans
    read: Callable[[FloatArray], FloatArray]


Found = Mapping[Source, FloatArray]
_NOTHING: Found = {}


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of a tap's rows at some positions, where its condition holds."""

    tap: str
    spans: Spans
    when: When | None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The hooks that the edit reads."""
        return ()

    def __call__(
        self,
        x: FloatArray,
        start: int,
        n_tokens: int,
        chosen: npt.NDArray[np.bool_] | None = None,
        found: Found = _NOTHING,
    ) -> None:
        """Edits x in place: rows of `n_tokens` tokens from `start` on, of the tokens `chosen` alone."""
        wanted = self.spans.mask(start, n_tokens)
        if chosen is not None:
            wanted &= chosen
        if not wanted.any():
            return
        of_tokens = x.reshape(n_tokens, -1, x.shape[1])  # a mixture has a row for each expert it uses
        rows = x if wanted.all() else of_tokens[wanted].reshape(-1, x.shape[1])  # a copy
        with np.errstate(all="ignore"):  # logits that are not numbers end the request
            self._edit(rows, {source: found[source][..., wanted, :] for source in self.sources})
        if rows is not x:
            of_tokens[wanted] = rows.reshape(-1, *of_tokens.shape[1:])

    def _edit(self, x: FloatArray, found: Found) -> None:
        """Edits rows x in place; `found` has the sources of the same rows."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowEdit(Edit):
    """A change of rows by a vector or a factor. Columns None are all."""

    op: Op
    columns: npt.NDArray[np.int64] | None
    vector: FloatArray | None
    strength: float
    matches_norm: bool = False

    def _edit(self, x: FloatArray, found: Found) -> None:
        if self.columns is None:
            self._edit_columns(x)
        else:
            part = x[:, self.columns]
            self._edit_columns(part)
            x[:, self.columns] = part

    def _edit_columns(self, x: FloatArray) -> None:
        vector = self.vector
        if vector is None:
            x *= np.float32(self.strength if self.op == "scale" else 0)
            return
        parts = x.reshape(len(x), -1, len(vector))  # a view: a head each, or one part
        if self.matches_norm:  # the vector has length 1, or the strength
            vector = np.sqrt((parts * parts).sum(-1, keepdims=True)) * vector
        if self.op == "add":
            parts += vector
        elif self.op == "replace":
            parts[...] = vector
        else:  # a product of whole rows, whose bits do not depend on the number of rows
            by = np.float32(self.strength - 1 if self.op == "scale" else -1)
            parts += (parts * vector).sum(-1, keepdims=True) * (by * vector)  # the vector has length 1


@dataclass(frozen=True, eq=False)
class FeatureEdit(Edit):
    """A change of some features, written to a tap: x += (target - feature) * decoder.

    `decoders` are [n, width]. The activations come from `source`, or from the rows themselves by `own`; "add"
    needs neither.
    """

    op: Op
    decoders: FloatArray
    strength: float
    scale: Choose
    own: Choose | None = None
    source: Source | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        return () if self.source is None else (self.source,)

    def _edit(self, x: FloatArray, found: Found) -> None:
        if self.source is not None:
            change = self._change(found[self.source])
        elif self.own is not None:
            change = self._change(self.own(x)) * self.scale(x)
        else:
            change = np.float32(self.strength) * np.repeat(self.scale(x), len(self.decoders), axis=1)
        for i, decoder in enumerate(self.decoders):
            x += change[:, i, None] * decoder

    def _change(self, now: FloatArray) -> FloatArray:
        """The targets of activations less these."""
        strength = np.float32(self.strength)
        return strength - now if self.op == "clamp" else now * (strength - 1 if self.op == "scale" else -1)


@dataclass(frozen=True, eq=False)
class Replacement(Edit):
    """A tap's rows replaced by what features give, which comes from the rows themselves or from `parts`.

    Each part is a source, and which of the hooks that its reader writes this tap is. Products are of all rows
    of a step, so the last bits may depend on how a prompt is cut into steps.
    """

    reader: FeatureReader
    parts: tuple[tuple[Source, int], ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for source, _ in self.parts)

    def _edit(self, x: FloatArray, found: Found) -> None:
        if self.parts:
            x[...] = sum(found[source][i] for source, i in self.parts)
        else:
            x[...] = self.reader.reconstruct(x)[0]


@dataclass(frozen=True, eq=False)
class Reading:
    """A readout of the tokens at some positions."""

    name: str
    point: Point
    reader: Probe | FeatureReader
    spans: Spans
    top_k: int
    features: tuple[int, ...] | None

    def read(self, x: FloatArray) -> list[dict[str, float]]:
        """The readout of each row of x [rows, width]: numbers by label, or by feature."""
        if isinstance(self.reader, Probe):
            scores = self.reader.scores(x)
            return [dict(zip(self.reader.labels, row)) for row in scores.tolist()]
        if self.features is not None:
            return [dict(zip(map(str, self.features), row)) for row in self._chosen(x).tolist()]
        found: list[dict[str, float]] = []
        for start in range(0, len(x), _ROWS):  # an autoencoder has many features
            for row in self.reader.features(x[start : start + _ROWS]):
                active = np.flatnonzero(row > 0)  # few, and sorting all takes longer than computing all
                largest = np.argsort(-row[active], kind="stable")[: self.top_k]
                found.append({str(i): float(row[i]) for i in active[largest].tolist()})
        return found

    @cached_property
    def _chosen(self) -> Choose:
        assert not isinstance(self.reader, Probe)
        return self.reader.chooser(self.features or ())
