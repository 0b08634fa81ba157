"""RoPE in config.json, as transformers 4 and 5 write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kukri.config import (
    MAX_CONTEXT,
    MAX_ROPE_FACTOR,
    NO_ROTATION,
    ROPE_SCALINGS,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from kukri.errors import ConfigError, UnsupportedError, brief
from kukri.formats.facts import SCALING_FACTS, SCALING_FIELDS, write_scaling
from kukri.formats.layer_patterns import local_rope
from kukri.models import Architecture
from kukri.models.keys import Keys
from kukri.models.rope import llama3_divisors, section_axes

LAYER_TYPES = ("full_attention", "sliding_attention")
LOCAL_THETA = "rope_local_base_freq"
_MROPE = ("mrope_section", "mrope_interleaved")
_NONE = float(np.float32(NO_ROTATION))


def read_ropes(
    keys: Keys, architecture: Architecture, d_head: int, max_context: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    The second is for layers with a window, if the architecture lets them differ.
    """
    where = "rope_parameters" if keys.value("rope_parameters") is not None else "rope_scaling"
    stated = _object(keys, where, keys.value(where))
    by_type = {name: value for name, value in stated.items() if name in LAYER_TYPES}
    if by_type and not architecture.local_rope:
        raise keys.unsupported(where, "differs between layers, which this architecture does not support")
    if unknown := set(stated) - by_type.keys() if by_type else set():
        raise keys.unsupported(
            where, f"names {brief(min(unknown))} as a type of layers, which is not supported"
        )
    full = _object(keys, f"{where}.full_attention", by_type.get("full_attention")) if by_type else stated
    older = keys.values.get("rope_scaling") or {}
    if where == "rope_parameters" and isinstance(older, dict):
        older = {"rope_type" if key == "type" else key: value for key, value in older.items()}
        if any(value != full.get(key) for key, value in older.items()):
            raise keys.error(where, "and 'rope_scaling' disagree: keep the one that is right")
    theta = keys.value("rope_theta")
    size = d_head, max_context
    place = f"{where}.full_attention" if by_type else where
    rope = _rope(keys, architecture, place, full, 10000.0 if theta is None else theta, *size)
    if not architecture.local_rope:
        return rope, None
    theta = keys.value(LOCAL_THETA) if LOCAL_THETA in architecture.reads else None
    theta = theta or architecture.local_theta or rope.theta
    place = f"{where}.sliding_attention" if by_type else LOCAL_THETA
    local = _object(keys, place, by_type.get("sliding_attention"))
    return rope, _rope(keys, architecture, place, local, theta, *size)


def _object(keys: Keys, key: str, value: Any) -> dict[str, Any]:
    """A key's object, empty if it is null."""
    if value is not None and not isinstance(value, dict):
        raise keys.error(key, f"must be an object, not {brief(value)}")
    return value or {}


def _rope(
    keys: Keys,
    architecture: Architecture,
    where: str,
    stated: Mapping[str, Any],
    theta: Any,
    d_head: int,
    max_context: int,
) -> RopeConfig:
    """RoPE of the parameters `stated` under the key `where`, with `theta` if they have none."""
    share = keys.value("partial_rotary_factor")
    defaults = {"rope_theta": theta, "partial_rotary_factor": 1.0 if share is None else share}
    named = {f"{where}.{name}": value for name, value in stated.items() if value is not None}
    parameters = Keys(named, keys.path, f"{where}.", defaults)
    theta = parameters.positive("rope_theta")
    if parameters.value("rope_type") == "proportional":
        return RopeConfig(theta, d_head, _proportional(parameters, keys, d_head))
    scaling = _scaling(parameters, keys, architecture, max_context)
    rotary_dim = _rotary_dim(parameters, keys, architecture, d_head, scaling)
    if (
        rotary_dim % 2
        and 1 < rotary_dim < d_head
        and (scaling is None or scaling.kind in ("linear", "longrope"))
    ):
        # transformers rotates one dimension more, by exponents that are shares of the odd number
        theta, rotary_dim = theta ** (1 + 1 / rotary_dim), rotary_dim + 1
    if rotary_dim % 2 or rotary_dim == 0:
        own = f"{parameters.value('partial_rotary_factor'):g}"
        message = f"of {own} makes RoPE rotate {rotary_dim} of {d_head} dimensions, but it rotates pairs"
        raise keys.error("partial_rotary_factor", message)
    try:
        return RopeConfig(theta, rotary_dim, scaling, _axes(parameters, keys, rotary_dim))
    except ConfigError as error:
        raise keys.error(where, f"cannot be used: {error}") from None


def _axes(parameters: Keys, keys: Keys, rotary_dim: int) -> tuple[int, ...]:
    """The axis of each pair of dimensions, of a model whose tokens have several positions."""
    if not parameters.has("mrope_section"):
        return ()
    sections = parameters.items("mrope_section", int)
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2:
        raise parameters.error("mrope_section", f"must be three numbers with the sum {rotary_dim // 2}")
    # classes of transformers leave the key unread, and files leave it out
    interleaved = keys.defaults.get("mrope_interleaved", parameters.value("mrope_interleaved", False))
    return section_axes(sections, interleaved=bool(interleaved))


def _proportional(parameters: Keys, keys: Keys, d_head: int) -> RopeScaling:
    """A share of the frequencies of a whole head, as divisors; the others do not rotate."""
    stated = {name.removeprefix(parameters.prefix) for name in parameters.values}
    if unknown := stated - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}:
        where = parameters.prefix.removesuffix(".")
        raise keys.unsupported(where, f"has the parameter {brief(min(unknown))}, which is not supported")
    share = parameters.positive("partial_rotary_factor", most=1)
    n_rotating, factor = int(share * d_head // 2), parameters.positive("factor", 1.0, most=MAX_ROPE_FACTOR)
    factors = (*[factor] * n_rotating, *[_NONE] * (d_head // 2 - n_rotating))
    return RopeScaling("llama3", factors=factors)


def local_rope_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """RoPE by types of layers, as transformers 5 has it, in addition to the keys of transformers 4."""
    local = local_rope(config, architecture)
    if local is None:
        return {}
    scaling = scaling_keys(config.rope) if config.rope.scaling else {"rope_type": "default"}
    types = {
        "full_attention": {**scaling, "rope_theta": config.rope.theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local.theta},
    }
    older = {LOCAL_THETA: local.theta} if LOCAL_THETA in architecture.reads else {}
    return {"rope_parameters": types, **older}


def _rotary_dim(
    parameters: Keys, keys: Keys, architecture: Architecture, d_head: int, scaling: RopeScaling | None
) -> int:
    """Dimensions of a head that rotate.

    In transformers (5.23) partial_rotary_factor counts only for some classes. Others leave it out if RoPE
    is not scaled, and cannot run with it if it is.
    """
    share = parameters.positive("partial_rotary_factor")
    if not architecture.partial_rotary and scaling is not None and share != 1:
        message = (
            f"is {share:g} together with a scaling: transformers' {architecture.name} does not support that "
            "either"
        )
        raise keys.unsupported("partial_rotary_factor", message)
    rotary_dim = int(d_head * share)
    if share > 1:
        raise keys.error("partial_rotary_factor", f"must be at most 1, not {share:g}")
    return rotary_dim if architecture.partial_rotary else d_head


def _scaling(
    parameters: Keys, keys: Keys, architecture: Architecture, max_context: int
) -> RopeScaling | None:
    where = parameters.prefix.removesuffix(".")
    kind = parameters.value("rope_type", parameters.value("type", "default"))
    if parameters.has("short_factor") and kind in ("su", "yarn"):
        kind = "longrope"  # older names that Phi-3's files have for it
    kind = "default" if kind == "mrope" else kind
    if kind != "default" and kind not in ROPE_SCALINGS:
        known = ", ".join(("default", *ROPE_SCALINGS))
        raise keys.unsupported(where, f"has 'rope_type' {brief(kind)}: only {known} are supported")
    fields = () if kind == "default" else SCALING_FIELDS[kind]
    names = {SCALING_FACTS[field].hf: field for field in (*fields, "original_context")}
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *architecture.ignores, *_MROPE}
    common |= {fact.hf for fact in SCALING_FACTS.values()}  # transformers does not read other kinds'
    stated = [name.removeprefix(parameters.prefix) for name in parameters.values]
    if unknown := set(stated) - names.keys() - common:
        raise keys.unsupported(where, f"has the parameter {brief(min(unknown))}, which is not supported")
    if kind == "default":
        return None
    found = {
        field: _parameter(parameters, name, SCALING_FACTS[field].kind)
        for name, field in names.items()
        if parameters.has(name)
    }
    try:
        return RopeScaling(kind, **_completed(kind, found, keys, parameters, max_context))
    except ConfigError as error:
        raise keys.error(where, f"cannot be used: {error}") from None


def _parameter(parameters: Keys, name: str, kind: type) -> Any:
    """A parameter of a scaling, checked."""
    if kind is tuple:
        return tuple(parameters.as_positive(name, factor) for factor in parameters.items(name, object))
    if kind is bool:
        return bool(parameters.value(name))
    return parameters.whole(name, most=MAX_CONTEXT) if kind is int else parameters.positive(name)


def _completed(
    kind: str, found: dict[str, Any], keys: Keys, parameters: Keys, max_context: int
) -> dict[str, Any]:
    """The parameters, with the ones that follow from others, as in transformers, which reads no others."""
    top = SCALING_FACTS["original_context"].hf
    if keys.value(top) is not None:
        found["original_context"] = keys.whole(top, most=MAX_CONTEXT)
    found.setdefault("original_context", max_context)
    if kind == "dynamic":  # stretches from max_position_embeddings, whatever else the file says
        found["original_context"] = max_context
    if kind == "linear":
        del found["original_context"]
    if kind in ("yarn", "longrope"):
        found.setdefault("factor", max_context / found["original_context"])
    for field in ("factor", "low_freq_factor", "high_freq_factor", "short_factors", "long_factors"):
        if field in SCALING_FIELDS[kind] and field not in found:
            raise parameters.error(
                SCALING_FACTS[field].hf, "must be a number, or a list of them: it is missing"
            )
    return found


def scaling_keys(rope: RopeConfig) -> dict[str, Any]:
    """`rope_scaling` of a configuration."""
    scaling = rope.scaling
    assert scaling is not None
    if _NONE in scaling.factors:
        return _proportional_keys(scaling.factors)
    if scaling.factors:
        scaling = _llama3_parameters(rope, scaling)
    # original_context of dynamic follows from the model's context, factor of longrope from both
    left_out = {"dynamic": "original_context", "longrope": "factor"}.get(scaling.kind)
    fields = [field for field in SCALING_FIELDS[scaling.kind] if field != left_out]
    defaults = RopeScaling("linear")
    unsaid = [
        f for f in ("mscale", "mscale_all_dim", "truncate") if getattr(scaling, f) == getattr(defaults, f)
    ]
    stated = write_scaling(scaling, "hf", tuple(field for field in fields if field not in unsaid))
    return {"rope_type": scaling.kind, **stated}


def _proportional_keys(factors: Sequence[float]) -> dict[str, Any]:
    """The parameters of `_proportional`."""
    n_rotating = factors.index(_NONE)
    if set(factors[n_rotating:]) != {_NONE} or len({*factors[:n_rotating]}) > 1:
        raise UnsupportedError("the divisors in rope_freqs.weight must follow proportional RoPE")
    keys = {"rope_type": "proportional", "partial_rotary_factor": n_rotating / len(factors)}
    return keys | ({"factor": factors[0]} if n_rotating and factors[0] != 1 else {})


def _llama3_parameters(rope: RopeConfig, scaling: RopeScaling) -> RopeScaling:
    """The parameters that give the divisors of a GGUF file, which holds only those."""
    for power in range(3, 21):
        trial = RopeScaling("llama3", round(max(scaling.factors), 3), 1 << power)
        made = llama3_divisors(rope.theta, rope.rotary_dim, trial).astype(np.float32)
        if np.allclose(made, scaling.factors, rtol=1e-5):
            return trial
    raise UnsupportedError("the divisors in rope_freqs.weight must follow Llama 3's formula")
