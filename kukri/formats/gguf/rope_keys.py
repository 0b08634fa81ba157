"""RoPE in GGUF files: its keys, and the tensors that are configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import MAX_CONTEXT, ModelConfig, RopeConfig, RopeScaling
from kukri.errors import FormatError, brief
from kukri.formats.facts import SCALING_FACTS, write_scaling
from kukri.formats.gguf.reader import GGUFFile
from kukri.kernels.cache import MAX_HEAD
from kukri.models import Architecture
from kukri.models.keys import Keys
from kukri.models.rope import attention_factor, llama3_divisors, section_axes

# Tensors that are configuration: divisors of RoPE's frequencies.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# kukri's own: llama.cpp stops at a kind of scaling it does not know
DYNAMIC_KEY = "rope.scaling.dynamic_factor"
# kukri's own: others round the bounds of YaRN, or do not, as the architecture has it
TRUNCATE_KEY = "rope.scaling.yarn_truncate"
SECTIONS_KEY = "rope.dimension_sections"
_ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
ROPE_KEYS = frozenset(
    [
        *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", DYNAMIC_KEY, *_ATTENTION_FACTORS),
        TRUNCATE_KEY,
        *(fact.gguf for fact in SCALING_FACTS.values()),
    ]
)


def read_rope(
    keys: Keys, gguf: GGUFFile, architecture: Architecture, d_head: int, max_context: int
) -> RopeConfig:
    """The RoPE of all layers without one of their own. Raises FormatError, UnsupportedError."""
    rotary_dim = keys.whole("rope.dimension_count", d_head, most=d_head)
    if rotary_dim % 2:
        raise keys.error("rope.dimension_count", f"is {rotary_dim}, which is odd")
    theta = keys.positive("rope.freq_base", 10000.0)
    axes = _axes(keys, rotary_dim, architecture)
    return RopeConfig(theta, rotary_dim, _scaling(keys, gguf, architecture, max_context), axes)


def has_sections(architecture: Architecture, name: str) -> bool:
    """True if tokens of images may have several positions in files of this name; text has equal ones."""
    return architecture.gguf_seeing == name != "" or "mrope_interleaved" in architecture.defaults


def _axes(keys: Keys, rotary_dim: int, architecture: Architecture) -> tuple[int, ...]:
    """The axis of each pair of dimensions, of a model whose tokens have several positions."""
    if not has_sections(architecture, keys.prefix[:-1]) or not keys.has(SECTIONS_KEY):
        return ()
    sections = keys.items(SECTIONS_KEY, int)[:3]  # a fourth is for other kinds of tokens
    if len(sections) < 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2:
        return ()  # images are refused; texts need none
    return section_axes(sections, interleaved=bool(architecture.defaults.get("mrope_interleaved")))


def _scaling(keys: Keys, gguf: GGUFFile, architecture: Architecture, max_context: int) -> RopeScaling | None:
    kind = _scaling_kind(keys, gguf)
    if kind == "llama3":
        return RopeScaling(kind, factors=_divisors(gguf, "factors"))
    original_key = SCALING_FACTS["original_context"].gguf
    original = keys.whole(original_key, max_context, least=0, most=MAX_CONTEXT) or max_context
    if kind == "longrope":
        return RopeScaling(
            kind,
            max_context / original,
            original,
            attention_factor=_attention_factor(keys, 1.0),
            short_factors=_divisors(gguf, "short_factors"),
            long_factors=_divisors(gguf, "long_factors"),
        )
    factor_key = DYNAMIC_KEY if keys.has(DYNAMIC_KEY) else SCALING_FACTS["factor"].gguf
    if kind == "none" or keys.value(factor_key) == 0:  # 0 means no scaling, as in llama.cpp
        return None
    factor = keys.positive(factor_key)
    if kind == "linear":
        return RopeScaling(kind, factor)
    scaling = RopeScaling(kind, factor, original)
    if kind == "dynamic":
        return scaling
    return replace(
        scaling,
        attention_factor=_attention_factor(keys, attention_factor(scaling)),
        beta_fast=SCALING_FACTS["beta_fast"].read(keys, "gguf", scaling.beta_fast),
        beta_slow=SCALING_FACTS["beta_slow"].read(keys, "gguf", scaling.beta_slow),
        truncate=keys.flag(TRUNCATE_KEY, True),
    )


def _scaling_kind(keys: Keys, gguf: GGUFFile) -> str:
    """The kind that the file names, or that its tensors of divisors imply: converters then write none."""
    tensors = gguf.tensors.keys()
    by_tensors = "llama3" if ROPE_TENSORS[0] in tensors else ""
    by_tensors = by_tensors or ("longrope" if tensors & set(ROPE_TENSORS[1:]) else "")
    default = "linear" if keys.has("rope.scaling.factor") else "none"  # llama.cpp's
    default = "dynamic" if keys.has(DYNAMIC_KEY) else default
    kind = keys.text("rope.scaling.type", by_tensors or default)
    if kind == "linear" and keys.value("rope.scaling.factor") == 0:  # as llama.cpp saves it
        kind = "none"
    if by_tensors:
        if kind not in (by_tensors, "none"):
            message = f"is {brief(kind)} in a file with {by_tensors} factors"
            raise keys.unsupported("rope.scaling.type", message)
        return by_tensors
    if kind not in ("none", "linear", "dynamic", "yarn"):
        message = "only none, linear, dynamic and yarn are supported, and others by their factors"
        raise keys.unsupported("rope.scaling.type", f"is {brief(kind)}: {message}")
    return kind


def _attention_factor(keys: Keys, base: float) -> float | None:
    """The file's attention factor, which multiplies `base`; None if it says nothing."""
    for key in _ATTENTION_FACTORS:
        if keys.has(key):
            return keys.positive(key) * base
    return None


def _divisors(gguf: GGUFFile, field: str) -> tuple[float, ...]:
    """The divisors of RoPE's frequencies in the tensor of a field."""
    name = SCALING_FACTS[field].gguf
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise FormatError("is missing", path=gguf.path, tensor=name)
    if len(tensor.shape) != 1 or tensor.type.name != "F32" or tensor.shape[0] > MAX_HEAD:
        raise FormatError("must be a list of F32 factors", path=gguf.path, tensor=name)
    return tuple(gguf.array(name).tolist())


def rope_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of a configuration's RoPE. Raises UnsupportedError for a scaling without a key."""
    rope = config.rope
    keys: dict[str, Any] = {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.rotary_dim}
    if rope.axes and has_sections(
        architecture, architecture.gguf_seeing
    ):  # else a file of texts, whose tokens have one position
        keys[SECTIONS_KEY] = np.array([*(rope.axes.count(axis) for axis in range(3)), 0], np.int32)
    return keys | (_scaling_keys(rope.scaling, architecture) if rope.scaling else {})


def _scaling_keys(scaling: RopeScaling, architecture: Architecture) -> dict[str, Any]:
    if scaling.kind == "llama3":
        return {}  # its tensor says all
    if scaling.kind == "dynamic":
        return {DYNAMIC_KEY: float(scaling.factor), **write_scaling(scaling, "gguf", ("original_context",))}
    if scaling.kind == "longrope":
        stated = {"rope.scaling.type": scaling.kind, _ATTENTION_FACTORS[0]: attention_factor(scaling)}
        return stated | write_scaling(scaling, "gguf", ("original_context",))
    fields: tuple[str, ...] = ("factor",)
    if scaling.kind == "yarn":
        fields = ("factor", "original_context", "beta_fast", "beta_slow")
    keys = {"rope.scaling.type": scaling.kind, **write_scaling(scaling, "gguf", fields)}
    usual = architecture.gguf_defaults.get(TRUNCATE_KEY, True)
    if scaling.kind == "yarn" and scaling.truncate != usual:
        keys[TRUNCATE_KEY] = scaling.truncate
    return keys | _yarn_factor(scaling) if scaling.kind == "yarn" else keys


def _yarn_factor(scaling: RopeScaling) -> dict[str, Any]:
    """The attention factor divided by the paper's, which readers multiply it by, unless it is the paper's."""
    base = attention_factor(RopeScaling("yarn", scaling.factor, scaling.original_context))
    wanted = attention_factor(scaling)
    return {} if math.isclose(wanted, base) else {_ATTENTION_FACTORS[0]: wanted / base}


def rope_tensors(config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors that are configuration: divisors of RoPE's frequencies, for llama3 and longrope."""
    scaling = config.rope.scaling
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        values = write_scaling(scaling, "gguf", ("short_factors", "long_factors"))
        return {name: np.array(factors, np.float32) for name, factors in values.items()}
    factors = scaling.factors or llama3_divisors(config.rope.theta, config.rope.rotary_dim, scaling)
    return {ROPE_TENSORS[0]: np.array(factors, np.float32)}
