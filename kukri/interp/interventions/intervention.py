"""Interventions: edits, captures and readings of a request's activations, as data instead of code.

So they may come over HTTP. Each belongs to one request; in a step it touches only that request's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass, fields, replace
from kukri.errors import HookError, RequestError, brief
from kukri.interp.features.readers import FeatureReader, Probe
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.hooks.hook_names import Point, find, full_name
from kukri.interp.hooks.hook_values import Model
from kukri.interp.interventions.catalog import Catalog
from kukri.interp.interventions.edits import (
    Edit,
    FeatureEdit,
    Op,
    Reading,
    Replacement,
    RowEdit,
    Source,
    When,
)
from kukri.interp.interventions.positions import END, Positions, Prompt, Spans, find_places
from kukri.kernels.arrays import FloatArray

MAX_INTERVENTIONS = 64
_MAX_FEATURES = 256  # read out for a token, or steered by
MAX_VECTORS = 256  # in an intervention, one for each position


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention:
    """One operation on the activations of a request.

    `op` is "add" (strength * vector), "scale" (times `strength`; with a vector, only the part along it),
    "replace" (by vector), "ablate" (to zero; with a vector, the part along it is taken away), "clamp",
    "capture" or "read". `name` is TransformerLens', full or short: "blocks.14.hook_resid_post",
    "resid_post14". With `heads` it applies only to these.

    The `vector` has as many numbers as the activation of a token (of its heads, side by side), or as one
    head; a list of vectors has one for each of the `positions`, in their order. `control_vector` names one
    that is loaded, in place of name and vector: its directions work on the layers `layers` (first, last), all
    without. "read" reads out a `probe`, an `sae`, or the `layer` of a `transcoder` that is loaded: of the
    latter two the `features`, or the `top_k` largest.

    With an `sae` or a `transcoder` and `features`, an edit is of these features: "add" adds `strength` to
    each, "scale" multiplies it, "clamp" makes it `strength`, "ablate" 0, and the directions of what that
    changes are added where they write. "replace" puts what an autoencoder, or the transcoder of each of the
    `layers`, gives in place of what it stands for: what it misses, the error, is dropped.

    `positions` are a place: "all", those of the "prompt", its "last", or the "generated" tokens; numbers,
    spans, a text of the prompt, or steps of the answer (see `kukri.interp.interventions.positions`). With
    `when` an edit is made only to tokens of which a probe or a feature says so: {"probe": "name", "label": "a
    label", "above": 0.5}, or {"sae": "name", "feature": 17, "below": 2}, or a `transcoder` and its `layer`;
    it reads its hook before the edits made there, which must not come after the edit's own. With `match_norm`
    the vector has the length of the row that it replaces, or that it is added to, times `strength`.
    """

    op: Op
    name: str | None = None
    vector: Any = None  # numbers, or several vectors
    strength: float = 1.0
    heads: Sequence[int] | None = None
    positions: Positions = "all"
    control_vector: str | None = None
    layers: Sequence[int] | None = None
    probe: str | None = None
    sae: str | None = None
    transcoder: str | None = None
    layer: int | None = None
    top_k: int = 8
    features: Sequence[int] | None = None
    match_norm: bool = False
    when: Mapping[str, Any] | None = None


_OF_FEATURES = {"sae", "transcoder", "layer", "features"}
_ALLOWED: dict[str, set[str]] = {
    "capture": set(),
    "add": {"vector", "strength", "heads", "control_vector", "layers", "match_norm", "when", *_OF_FEATURES},
    "scale": {"vector", "strength", "heads", "when", *_OF_FEATURES},
    "replace": {"vector", "heads", "match_norm", "when", "sae", "transcoder", "layers"},
    "ablate": {"vector", "heads", "control_vector", "layers", "when", *_OF_FEATURES},
    "clamp": {"strength", "when", *_OF_FEATURES},
    "read": {"probe", "top_k", *_OF_FEATURES},
}
_NOT_OF_FEATURES = ("name", "vector", "heads", "control_vector", "match_norm")
_CONDITION = {"probe", "label", "sae", "transcoder", "layer", "feature", "above", "below"}
_DEFAULTS = {one.name: one.default for one in fields(Intervention)}


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
        raise RequestError.of("interventions", "must be a list")
    if len(given) > MAX_INTERVENTIONS:
        raise RequestError.of("interventions", f"must be at most {MAX_INTERVENTIONS}, not {len(given)}")
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
            problem = f"cannot have {brief(unknown[0])}" if unknown else "requires 'op'"
            raise RequestError(f"an intervention {problem}")
        given = Intervention(**given)
    if not isinstance(given, Intervention):
        raise RequestError(f"an intervention must be a mapping, not {type(given).__name__}")
    return given


def _resolve(one: Intervention, model: Model, catalog: Catalog, prompt: Prompt, found: Resolved) -> None:
    if not isinstance(one.op, str) or one.op not in _ALLOWED:
        raise RequestError(f"'op' must be one of {', '.join(get_args(Op))}, not {brief(one.op)}")
    allowed = _ALLOWED[one.op] | {"op", "name", "positions"}
    for name, default in _DEFAULTS.items():
        value = getattr(one, name)
        if name not in allowed and not (type(value) is type(default) and value == default):
            raise RequestError(f"{name!r} is not supported by {one.op}")
    spans = find_places(one.positions, prompt)
    if one.op == "read":
        found.readings.append(_reading(one, model, catalog, spans))
    elif one.op == "capture":
        point = _point(one.name, model)
        if any(point is other for other, _ in found.captures):
            raise RequestError(f"{point.name} must be captured once")
        found.captures.append((point, spans))
    elif one.op == "clamp" or one.sae is not None or one.transcoder is not None:
        found.edits.extend(_of_features(one, model, catalog, spans))
    elif one.features is not None or one.layer is not None:
        raise RequestError("'features' and 'layer' require an sae or a transcoder")
    elif one.control_vector is not None:
        found.edits.extend(_steering(one, model, catalog, spans))
    else:
        found.edits.extend(_edits(one, model, catalog, spans))


def _edits(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Iterator[Edit]:
    """An edit by one vector, or by one for each position."""
    try:
        n_dimensions = np.ndim(one.vector)
    except ValueError:
        raise RequestError("'vector' must have as many numbers for each position") from None
    if n_dimensions != 2:
        yield _edit(one, model, catalog, spans)
        return
    n = len(one.vector)
    if not 1 <= n <= MAX_VECTORS or len(spans) != n:
        wanted = "all" if len(spans) > END // 2 else len(spans)
        raise RequestError(
            f"'vector' must be a list of numbers, or one for each position: {n} for {wanted} positions, of "
            f"at most {MAX_VECTORS}"
        )
    for vector, position in zip(one.vector, spans.split(), strict=True):
        yield _edit(replace(one, vector=vector), model, catalog, position)


def _point(name: Any, model: Model) -> Point:
    if not isinstance(name, str) or len(name) > 200:
        raise RequestError("'name' is required, such as blocks.3.hook_resid_post")
    point = find(full_name(name, model.config.n_layers), model.points)
    if point.form in ("tokens", "cos", "sin", "logits"):
        raise RequestError(f"{point.name} is not supported in requests")
    return point


def _editable(name: Any, model: Model) -> Point:
    point = _point(name, model)
    if point.form not in ("plain", "heads") or point.tap != point.edit_tap or _sees_logit_rows(point):
        raise RequestError(f"{point.name} cannot be edited, only captured")
    return point


def _edit(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Edit:
    if one.layers is not None:
        raise RequestError("'layers' requires a 'control_vector', or a 'transcoder' that replaces MLPs")
    point = _editable(one.name, model)
    width, d_head = model.trace.widths[point.tap], 0
    if point.form == "heads":
        d_head = model.trace.head_width(point.tap)
    columns = None
    if one.heads is not None:
        columns = _columns(one.heads, point, width, d_head)
        width = len(columns)
    vector = None
    if one.vector is not None:
        vector = _vector(one.vector, {width, d_head} - {0})
    elif one.op in ("add", "replace"):
        raise RequestError(f"{one.op} requires 'vector', or the name of a 'control_vector'")
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
    strength = _strength(one)
    if type(one.match_norm) is not bool:
        raise RequestError(f"'match_norm' must be true or false, not {brief(one.match_norm)}")
    if vector is not None and (one.op in ("ablate", "scale") or one.match_norm):
        length = float(np.linalg.norm(vector.astype(np.float64)))
        if not length > 0:
            raise RequestError("'vector' must not be zero if its length does not count")
        vector = (vector / length).astype(np.float32)
    if vector is not None and one.op == "add":
        vector = vector * np.float32(strength)
    when = _condition(one.when, tap, model, catalog)
    return RowEdit(tap, spans, when, one.op, columns, vector, strength, one.match_norm)


def _strength(one: Intervention) -> float:
    strength = one.strength
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not abs(strength) <= 1e6:
        raise RequestError(f"'strength' must be a number within 1e6 of 0, not {brief(strength)}")
    return float(strength)


def _of_features(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Iterator[Edit]:
    """Return edits of an autoencoder's or a transcoder's features, or by their output."""
    if (one.sae is None) == (one.transcoder is None):
        raise RequestError(f"{one.op} requires either an sae or a transcoder, not both")
    for name in _NOT_OF_FEATURES:
        if getattr(one, name) not in (None, False):
            raise RequestError(f"{name!r} is not supported by an edit of features")
    if one.op == "replace":
        yield from _replacements(one, model, catalog, spans)
        return
    if one.layers is not None:
        raise RequestError("'layers' is not supported by an edit of features, which have one layer")
    reader = catalog.feature_reader(one.sae, one.transcoder, one.layer)
    features = _numbers(one.features, reader.n_features, "features")
    if len(features) > _MAX_FEATURES:
        raise RequestError(f"'features' must be at most {_MAX_FEATURES}, not {len(features)}")
    decoders = reader.decoders(features)
    own = None if one.op == "add" else reader.chooser(features)
    source = None
    if own is not None and one.transcoder is not None:
        source = Source(find(reader.name, model.points), spans, own)
    for i, hook in enumerate(reader.writes):
        tap = _editable(hook, model).tap
        when = _condition(one.when, tap, model, catalog)
        _check_order(source, tap, model)
        yield FeatureEdit(
            tap, spans, when, one.op, decoders[:, i], _strength(one), reader.output_scale, own, source
        )


def _replacements(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Iterator[Edit]:
    """Replace a hook by its autoencoder's output, or MLPs' outputs by transcoders' outputs."""
    if one.sae is not None:
        reader = catalog.feature_reader(one.sae, None, None)
        reader.decoders([0])  # an error if there are none
        tap = _editable(reader.name, model).tap
        yield Replacement(tap, spans, _condition(one.when, tap, model, catalog), reader)
        return
    found: Transcoders = catalog.known("transcoder", one.transcoder)
    first, last = _first_and_last(one.layers, model)
    sources: dict[int, Source] = {}
    chosen = [layer for layer in found.layers if first <= layer <= last]
    if not chosen:
        raise RequestError(f"'layers' from {first} to {last} were not found in transcoder {one.transcoder!r}")
    for layer in chosen:
        reader = found.reader(layer)
        tap = _editable(reader.writes[0], model).tap
        parts: list[tuple[Source, int]] = []
        for i, other in ((i, found.reader(i)) for i in found.layers if i <= layer):
            if layer - i < len(other.writes):
                if i not in sources:
                    sources[i] = Source(find(other.name, model.points), spans, other.reconstruct)
                parts.append((sources[i], layer - i))
                _check_order(sources[i], tap, model)
        yield Replacement(tap, spans, _condition(one.when, tap, model, catalog), reader, tuple(parts))


def _check_order(source: Source | None, tap: str, model: Model) -> None:
    order = list(model.trace.taps)
    if source is not None and order.index(source.point.tap) >= order.index(tap):
        raise RequestError(f"the transcoder must read what comes before {tap}, not {source.point.name}")


def _first_and_last(given: Any, model: Model) -> tuple[int, int]:
    if given is None:
        return 0, model.config.n_layers
    layers = list(given) if isinstance(given, Sequence) else []
    if len(layers) != 2 or not all(type(layer) is int for layer in layers) or layers[0] > layers[1]:
        raise RequestError("'layers' must be the first and the last layer, such as [10, 20]")
    return layers[0], layers[1]


def _condition(given: Any, tap: str, model: Model, catalog: Catalog) -> When | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given.keys() <= _CONDITION:
        raise RequestError(
            f"'when' must have probe and label, or sae and feature, and above or below, not be {brief(given)}"
        )
    if len({"probe", "sae", "transcoder"} & given.keys()) != 1:
        raise RequestError("'when' requires a probe, an sae or a transcoder")
    reader: Probe | FeatureReader
    if "probe" in given:
        probe: Probe = catalog.known("probe", given["probe"])
        label = given.get("label", probe.labels[0] if len(probe.labels) == 1 else None)
        if "feature" in given or label not in probe.labels:
            raise RequestError(f"'when' requires a label of the probe: {brief(', '.join(probe.labels))}")
        reader, index = probe, probe.labels.index(label)
    else:
        reader = catalog.feature_reader(given.get("sae"), given.get("transcoder"), given.get("layer"))
        (index,) = _numbers([given.get("feature")], reader.n_features, "when.feature")
    limits = [given.get("above", -math.inf), given.get("below", math.inf)]
    if not {"above", "below"} & given.keys() or not all(
        type(one) in (int, float) and not math.isnan(one) for one in limits
    ):
        raise RequestError("'when' requires above or below, a number")
    point = find(full_name(reader.name, model.config.n_layers), model.points)
    order = list(model.trace.taps)
    if order.index(point.tap) > order.index(tap):
        raise RequestError(f"'when' must read what comes before the edit of {tap}, not {point.name}")
    return When(point, reader, index, *map(float, limits))


def _steering(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> list[Edit]:
    """An edit for each direction of a control vector."""
    if one.name is not None or one.vector is not None or one.heads is not None:
        raise RequestError("'control_vector' cannot be combined with 'name', 'vector' and 'heads'")
    directions = catalog.known("control vector", one.control_vector).directions
    first, last = _first_and_last(one.layers, model)
    chosen = {layer: vector for layer, vector in directions.items() if first <= layer <= last}
    if not chosen:
        raise RequestError(f"'layers' from {first} to {last} were not found in {one.control_vector!r}")
    return [
        _make_edit(one, model, catalog, f"blocks.{layer}.hook_resid_post", spans, None, vector)
        for layer, vector in sorted(chosen.items())
        if one.op != "ablate" or vector.any()
    ]


def _reading(one: Intervention, model: Model, catalog: Catalog, spans: Spans) -> Reading:
    if [one.probe, one.sae, one.transcoder].count(None) != 2:
        raise RequestError("read requires a probe, an sae or a transcoder")
    if one.name is not None:
        raise RequestError("'name' cannot be combined with a probe, an sae or a transcoder")
    reader: Probe | FeatureReader
    if one.probe is not None:
        reader, name = catalog.known("probe", one.probe), one.probe
    else:
        reader = catalog.feature_reader(one.sae, one.transcoder, one.layer)
        name = one.sae or (one.transcoder or "") + ("" if one.layer is None else f".{one.layer}")
    if type(one.top_k) is not int or not 1 <= one.top_k <= _MAX_FEATURES:
        raise RequestError(f"'top_k' must be from 1 to {_MAX_FEATURES}, not {brief(one.top_k)}")
    features = None
    if one.features is not None:
        if isinstance(reader, Probe):
            raise RequestError("'features' requires an sae or a transcoder")
        features = _numbers(one.features, reader.n_features, "features")
        if len(features) > _MAX_FEATURES:
            raise RequestError(f"'features' must be at most {_MAX_FEATURES}, not {len(features)}")
    if features is None and not isinstance(reader, Probe):
        reader.prepare(catalog.product_backend)
    point = find(full_name(reader.name, model.config.n_layers), model.points)
    return Reading(name, point, reader, spans, one.top_k, features)


def _columns(heads: Any, point: Point, width: int, d_head: int) -> npt.NDArray[np.int64]:
    """The columns of heads, which stand side by side."""
    if not d_head:
        raise RequestError(f"'heads' is not supported by {point.name}")
    numbers = _numbers(heads, width // d_head, "heads")
    if len(set(numbers)) < len(numbers):
        raise RequestError("'heads' must not name one twice")
    return (np.array(numbers)[:, None] * d_head + np.arange(d_head)).reshape(-1)


def _numbers(given: Any, n: int, what: str) -> tuple[int, ...]:
    """Whole numbers from 0 to n - 1, at least one."""
    numbers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else ()
    if not numbers or not all(type(i) is int and 0 <= i < n for i in numbers):
        raise RequestError(f"{what!r} must be numbers from 0 to {n - 1}, at least one")
    return numbers


def _vector(given: Any, lengths: set[int]) -> FloatArray:
    """Return a vector of finite numbers, of one of these lengths."""
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or len(array) not in lengths:
        wanted = " or ".join(map(str, sorted(lengths)))
        raise RequestError(f"'vector' must be a list of {wanted} numbers, not {list(array.shape)}")
    if not (np.abs(array) <= 1e30).all():  # not of NaN
        raise RequestError("'vector' must have finite numbers, at most 1e30")
    return array.astype(np.float32)


def _sees_logit_rows(point: Point) -> bool:
    return point.layer is None and point.tap != "hook_embed"
