"""Interventions: edits, captures and readings of a request's activations, said in data and not in code.

So they may come over HTTP. Each belongs to one request; in a step it touches only that request's rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import ConfigError, HookError, RequestError, brief
from kukri.interp.control_vectors import ControlVector
from kukri.interp.names import Point, find, full_name
from kukri.interp.places import Positions, Prompt, Spans, find_places
from kukri.interp.readers import Probe, SparseAutoencoder
from kukri.interp.values import Model
from kukri.kernels.arrays import FloatArray

Op = Literal["capture", "add", "scale", "replace", "ablate", "read"]
MAX_INTERVENTIONS = 64
_MAX_FEATURES = 256  # read out for a token
_ROWS = 32  # that an autoencoder reads at a time
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention:
    """One operation on the activations of a request.

    `op` is "add" (strength * vector), "scale" (times `strength`), "replace" (by vector), "ablate" (to zero;
    with a vector, the part along it is taken away), "capture" or "read". `name` is TransformerLens', full or
    short: "blocks.14.hook_resid_post", "resid_post14". With `heads` it applies only to these.

    The `vector` has as many numbers as the activation of a token (of its heads, side by side), or as one
    head. `control_vector` names one that is loaded, in place of name and vector: its directions work on the
    layers `layers` (first, last), all without. "read" reads out a `probe` or an `sae` that is loaded: of the
    latter the `features`, or the `top_k` largest.

    `positions` are a place: "all", those of the "prompt", its "last", or the "generated" tokens; numbers,
    spans, a text of the prompt, or steps of the answer (see `kukri.interp.places`). With `when` an edit is
    made only to tokens of which a probe or a feature says so: {"probe": "name", "label": "a label", "above":
    0.5}, or {"sae": "name", "feature": 17, "below": 2}; it reads its hook before the edits made there, which
    must not come after the edit's own. With `match_norm` the vector has the length of the row that it
    replaces, or that it is added to, times `strength`.
    """

    op: Op
    name: str | None = None
    vector: Any = None  # numbers
    strength: float = 1.0
    heads: Sequence[int] | None = None
    positions: Positions = "all"
    control_vector: str | None = None
    layers: Sequence[int] | None = None
    probe: str | None = None
    sae: str | None = None
    top_k: int = 8
    features: Sequence[int] | None = None
    match_norm: bool = False
    when: Mapping[str, Any] | None = None


_ALLOWED: dict[str, set[str]] = {
    "capture": set(),
    "add": {"vector", "strength", "heads", "control_vector", "layers", "match_norm", "when"},
    "scale": {"strength", "heads", "when"},
    "replace": {"vector", "heads", "match_norm", "when"},
    "ablate": {"vector", "heads", "control_vector", "layers", "when"},
    "read": {"probe", "sae", "top_k", "features"},
}
_DEFAULTS = {one.name: one.default for one in fields(Intervention)}


class Catalog:
    """The control vectors, probes and autoencoders of a model, by name."""

    def __init__(
        self,
        config: ModelConfig,
        vectors: Mapping[str, Any] | None = None,
        probes: Mapping[str, Any] | None = None,
        saes: Mapping[str, Any] | None = None,
    ) -> None:
        """Values are paths, or the objects themselves. Raises KukriError on what does not fit the model."""
        self.vectors: dict[str, ControlVector] = {}
        self.probes: dict[str, Probe] = {}
        self.saes: dict[str, SparseAutoencoder] = {}
        for name, given in (vectors or {}).items():
            vector = ControlVector.load(given) if _is_path(given) else ControlVector(given)
            vector.check(_checked(name), config.n_layers, config.d_model)
            self.vectors[name] = vector
        for name, given in (probes or {}).items():
            self.probes[_checked(name)] = Probe.load(given) if _is_path(given) else given
        for name, given in (saes or {}).items():
            self.saes[_checked(name)] = SparseAutoencoder.load(given) if _is_path(given) else given

    def check(self, model: Model) -> None:
        """Raises ConfigError if a probe or an autoencoder reads what the model does not have."""
        for kind, readers in (("probe", self.probes), ("sae", self.saes)):
            for name, reader in readers.items():
                try:
                    point = find(full_name(reader.name, model.config.n_layers), model.points)
                except HookError as error:
                    raise ConfigError(f"{kind} {name!r}: {error}") from None
                width = 0 if len(point.needs) != 1 or point.matrix else model.trace.widths[point.tap]
                if width != reader.width:
                    raise ConfigError(
                        f"{kind} {name!r} reads {reader.width} numbers of {reader.name}, which has {width}"
                    )


@dataclass(frozen=True, eq=False)
class When:
    """A condition of an edit: a probe's score, or an autoencoder's feature, is above or below a limit."""

    point: Point
    reader: Probe | SparseAutoencoder
    index: int  # of the score or feature
    above: float
    below: float

    def holds(self, x: FloatArray) -> npt.NDArray[np.bool_]:
        """Of which rows of x [rows, width] it holds, [rows]."""
        if isinstance(self.reader, Probe):
            found = self.reader.scores(x)[:, self.index]
        else:
            parts = range(0, len(x), _ROWS)
            found = np.concatenate([self.reader.features(x[i : i + _ROWS])[:, self.index] for i in parts])
        return (found > self.above) & (found < self.below)


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of a tap's rows at some positions. Columns None are all."""

    op: Op
    tap: str
    spans: Spans
    columns: npt.NDArray[np.int64] | None
    vector: FloatArray | None
    strength: float
    matches_norm: bool = False
    when: When | None = None

    def __call__(
        self, x: FloatArray, start: int, n_tokens: int, chosen: npt.NDArray[np.bool_] | None = None
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
            if self.columns is None:
                self._edit(rows)
            else:
                part = rows[:, self.columns]
                self._edit(part)
                rows[:, self.columns] = part
        if rows is not x:
            of_tokens[wanted] = rows.reshape(-1, *of_tokens.shape[1:])

    def _edit(self, x: FloatArray) -> None:
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
        else:  # a product of whole rows, whose bits do not depend on how many rows there are
            parts -= (parts * vector).sum(-1, keepdims=True) * vector  # of length 1


@dataclass(frozen=True, eq=False)
class Reading:
    """A readout of the tokens at some positions."""

    name: str
    point: Point
    reader: Probe | SparseAutoencoder
    spans: Spans
    top_k: int
    features: tuple[int, ...] | None

    def read(self, x: FloatArray) -> list[dict[str, float]]:
        """The readout of each row of x [rows, width]: numbers by label, or by feature."""
        if isinstance(self.reader, Probe):
            scores = self.reader.scores(x)
            return [dict(zip(self.reader.labels, row)) for row in scores.tolist()]
        found: list[dict[str, float]] = []
        for start in range(0, len(x), _ROWS):  # an autoencoder has many features
            for row in self.reader.features(x[start : start + _ROWS]):
                chosen = self.features
                if chosen is None:
                    largest = np.argsort(-row, kind="stable")[: self.top_k].tolist()
                    chosen = tuple(i for i in largest if row[i] > 0)
                found.append({str(i): float(row[i]) for i in chosen})
        return found


@dataclass(frozen=True, eq=False)
class Resolved:
    """A request's interventions, resolved for a model."""

    edits: list[Edit]
    captures: list[tuple[Point, Spans]]
    readings: list[Reading]


def resolve(
    given: Sequence[Intervention | Mapping[str, Any]], model: Model, catalog: Catalog, prompt: Prompt
) -> Resolved:
    """Checks interventions against a model. Raises RequestError, whose `param` is interventions[i]."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestError("interventions must be a list", param="interventions")
    if len(given) > MAX_INTERVENTIONS:
        raise RequestError(
            f"{len(given)} interventions are more than {MAX_INTERVENTIONS}", param="interventions"
        )
    found = Resolved([], [], [])
    for i, one in enumerate(given):
        try:
            _resolve(_as_intervention(one), model, catalog, prompt, found)
        except (RequestError, HookError) as error:
            raise RequestError(str(error), param=f"interventions[{i}]") from None
    return found


def _as_intervention(given: Intervention | Mapping[str, Any]) -> Intervention:
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in _DEFAULTS]
        if unknown or "op" not in given:
            problem = f"has no field {brief(unknown[0])}" if unknown else "needs an op"
            raise RequestError(f"an intervention {problem}")
        given = Intervention(**given)
    if not isinstance(given, Intervention):
        raise RequestError(f"an intervention is a mapping, not {type(given).__name__}")
    return given


def _resolve(one: Intervention, model: Model, catalog: Catalog, prompt: Prompt, found: Resolved) -> None:
    if not isinstance(one.op, str) or one.op not in _ALLOWED:
        raise RequestError(f"op must be one of {', '.join(get_args(Op))}, not {brief(one.op)}")
    allowed = _ALLOWED[one.op] | {"op", "name", "positions"}
    for name, default in _DEFAULTS.items():
        value = getattr(one, name)
        if name not in allowed and not (type(value) is type(default) and value == default):
            raise RequestError(f"{one.op} takes no {name}")
    spans = find_places(one.positions, prompt)
    if one.op == "read":
        found.readings.append(_reading(one, model, catalog, spans))
    elif one.op == "capture":
        point = _point(one.name, model)
        if any(point is other for other, _ in found.captures):
            raise RequestError(f"{point.name} is captured twice")
        found.captures.append((point, spans))
    elif one.control_vector is not None:
        found.edits.extend(_steering(one, model, catalog, spans))
    else:
        found.edits.append(_edit(one, model, catalog, spans))


def _point(name: Any, model: Model) -> Point:
    if not isinstance(name, str) or len(name) > 200:
        raise RequestError("the intervention needs a name, such as blocks.3.hook_resid_post")
    point = find(full_name(name, model.config.n_layers), model.points)
    if point.form in ("tokens", "cos", "sin", "logits"):
        raise RequestError(f"{point.name} is not an activation of a request")
    return point


def _edit(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Edit:
    point = _point(one.name, model)
    if point.form not in ("plain", "heads") or point.tap != point.edit_tap or _sees_logit_rows(point):
        raise RequestError(f"{point.name} can be captured but not edited")
    width, d_head = model.trace.widths[point.tap], 0
    if point.form == "heads":
        assert point.layer is not None
        d_head = model.trace.heads[point.layer].spec.d_head
    columns = None
    if one.heads is not None:
        columns = _columns(one.heads, point, width, d_head)
        width = len(columns)
    vector = None
    if one.vector is not None:
        vector = _vector(one.vector, {width, d_head} - {0})
    elif one.op in ("add", "replace"):
        raise RequestError(f"{one.op} needs a vector, or the name of a control_vector")
    return _make_edit(one, model, catalog, point.tap, spans, columns, vector)


def _make_edit(
    one: Intervention,
    model: Model,
    catalog: Catalog,
    tap: str,
    spans: Spans,
    columns: npt.NDArray[np.int64] | None,
    vector: FloatArray | None,
) -> Edit:
    strength = one.strength
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not abs(strength) <= 1e6:
        raise RequestError(f"strength must be a number within 1e6 of 0, not {brief(strength)}")
    if type(one.match_norm) is not bool:
        raise RequestError(f"match_norm must be true or false, not {brief(one.match_norm)}")
    if vector is not None and (one.op == "ablate" or one.match_norm):
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if not length > 0:
            raise RequestError("a vector whose length does not count must not be zero")
        vector = (vector / length).astype(np.float32)
    if vector is not None and one.op == "add":
        vector = vector * np.float32(strength)
    when = None if one.when is None else _condition(one.when, tap, model, catalog)
    return Edit(one.op, tap, spans, columns, vector, float(strength), one.match_norm, when)


def _condition(given: Any, tap: str, model: Model, catalog: Catalog) -> When:
    if not isinstance(given, Mapping) or not given.keys() <= {
        "probe",
        "label",
        "sae",
        "feature",
        "above",
        "below",
    }:
        raise RequestError(
            f"when has probe and label, or sae and feature, and above or below, not {brief(given)}"
        )
    if ("probe" in given) == ("sae" in given):
        raise RequestError("when needs a probe or an sae")
    reader: Probe | SparseAutoencoder
    if "probe" in given:
        probe: Probe = _known(given["probe"], catalog.probes, "probe")
        label = given.get("label", probe.labels[0] if len(probe.labels) == 1 else None)
        if "feature" in given or label not in probe.labels:
            raise RequestError(f"when needs a label of the probe: {brief(', '.join(probe.labels))}")
        reader, index = probe, probe.labels.index(label)
    else:
        sae: SparseAutoencoder = _known(given["sae"], catalog.saes, "sae")
        (index,) = _numbers([given.get("feature")], sae.n_features, "when.feature")
        reader = sae
    limits = [given.get("above", -math.inf), given.get("below", math.inf)]
    if not {"above", "below"} & given.keys() or not all(
        type(one) in (int, float) and not math.isnan(one) for one in limits
    ):
        raise RequestError("when needs above or below, a number")
    point = find(full_name(reader.name, model.config.n_layers), model.points)
    order = list(model.trace.taps)
    if order.index(point.tap) > order.index(tap):
        raise RequestError(f"when reads {point.name}, which comes after the edit of {tap}")
    return When(point, reader, index, *map(float, limits))


def _steering(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> list[Edit]:
    """An edit for each direction of a control vector."""
    if one.name is not None or one.vector is not None or one.heads is not None:
        raise RequestError("a control_vector has its own names and vectors: leave out name, vector and heads")
    directions = _known(one.control_vector, catalog.vectors, "control vector").directions
    first, last = 0, model.config.n_layers
    if one.layers is not None:
        layers = list(one.layers) if isinstance(one.layers, Sequence) else []
        if len(layers) != 2 or not all(type(layer) is int for layer in layers) or layers[0] > layers[1]:
            raise RequestError("layers must be the first and the last layer, such as [10, 20]")
        first, last = layers
    chosen = {layer: vector for layer, vector in directions.items() if first <= layer <= last}
    if not chosen:
        raise RequestError(f"control vector {one.control_vector!r} has no layers from {first} to {last}")
    return [
        _make_edit(one, model, catalog, f"blocks.{layer}.hook_resid_post", spans, None, vector)
        for layer, vector in sorted(chosen.items())
        if one.op != "ablate" or vector.any()
    ]


def _reading(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Reading:
    if (one.probe is None) == (one.sae is None):
        raise RequestError("read needs a probe or an sae")
    if one.name is not None:
        raise RequestError("a probe or an sae has its own name: leave out name")
    reader: Probe | SparseAutoencoder
    if one.probe is not None:
        reader, name = _known(one.probe, catalog.probes, "probe"), one.probe
    else:
        assert one.sae is not None
        reader, name = _known(one.sae, catalog.saes, "sae"), one.sae
    if type(one.top_k) is not int or not 1 <= one.top_k <= _MAX_FEATURES:
        raise RequestError(f"top_k must be from 1 to {_MAX_FEATURES}, not {brief(one.top_k)}")
    features = None
    if one.features is not None:
        if isinstance(reader, Probe):
            raise RequestError("features need an sae")
        features = _numbers(one.features, reader.n_features, "features")
        if len(features) > _MAX_FEATURES:
            raise RequestError(f"{len(features)} features are more than {_MAX_FEATURES}")
    point = find(full_name(reader.name, model.config.n_layers), model.points)
    return Reading(name, point, reader, spans, one.top_k, features)


def _known(name: Any, there: Mapping[str, Any], kind: str) -> Any:
    if not isinstance(name, str) or name not in there:
        known = f"there are {', '.join(there)}" if there else "none is loaded"
        raise RequestError(f"there is no {kind} {brief(name)}: {known}")
    return there[name]


def _columns(heads: Any, point: Point, width: int, d_head: int) -> npt.NDArray[np.int64]:
    """The columns of heads, which stand side by side."""
    if not d_head:
        raise RequestError(f"{point.name} has no heads")
    numbers = _numbers(heads, width // d_head, "heads")
    if len(set(numbers)) < len(numbers):
        raise RequestError("heads must not name one twice")
    return (np.array(numbers)[:, None] * d_head + np.arange(d_head)).reshape(-1)


def _numbers(given: Any, n: int, what: str) -> tuple[int, ...]:
    """Whole numbers from 0 to n - 1, at least one."""
    numbers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else ()
    if not numbers or not all(type(i) is int and 0 <= i < n for i in numbers):
        raise RequestError(f"{what} must be numbers from 0 to {n - 1}, at least one")
    return numbers


def _vector(given: Any, lengths: set[int]) -> FloatArray:
    """A vector of one of these lengths, of finite numbers."""
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or len(array) not in lengths:
        wanted = " or ".join(map(str, sorted(lengths)))
        raise RequestError(f"the vector must be a list of {wanted} numbers, not {list(array.shape)}")
    if not (np.abs(array) <= 1e30).all():  # not of NaN
        raise RequestError("the vector must have finite numbers, at most 1e30")
    return array.astype(np.float32)


def _sees_logit_rows(point: Point) -> bool:
    return point.layer is None and point.tap != "hook_embed"


def _is_path(given: Any) -> bool:
    return isinstance(given, str) or hasattr(given, "__fspath__")


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a name has only letters, digits and ._-, at most 64, not {brief(name)}")
    return name
