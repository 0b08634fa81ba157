"""RoPE's frequencies, plain and scaled beyond a model's training context: one pure function for each kind;
and the order of interleaved rows.

Rounding follows transformers' `ROPE_INIT_FUNCTIONS` (modeling_rope_utils.py): float32 after each
operation.

Two kinds depend on the length of a sequence in transformers, which recomputes them as a sequence grows, and
so rotates the keys of one sequence by several sets of frequencies. Here they are fixed, and a token's key
never depends on what comes later: both kinds use `max_context`, the longest sequence that the loaded model
may see. Dynamic NTK takes the base of a sequence of that length; longrope takes its long factors if
max_context exceeds the original context, its short factors otherwise. A smaller max_context gives other
frequencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kukri.config import MAX_CONTEXT, MAX_ROPE_FACTOR, ModelConfig, RopeConfig, RopeScaling
from kukri.errors import ConfigError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import RopeFrequencies

_ONE = np.float32(1)
_ROTATED = re.compile(r".*\bself_attn\.[qk]_proj\.(?:weight|bias)")
_HEAD_BY_HEAD = re.compile(r".*\bself_attn\.qkv_proj\.(?:weight|bias)")
_LATENT = re.compile(r".*\bself_attn\.(?:q_proj|q_b_proj|(?P<kv>kv_a_proj_with_mqa))\.(?:weight|bias)")
USER_SCALINGS = ("linear", "dynamic", "yarn")  # kinds that need no parameter but a factor


def rope_frequencies(rope: RopeConfig, max_context: int) -> RopeFrequencies:
    """The frequencies of a rotary embedding for positions below max_context, and its attention factor."""
    inverse = tuple(inverse_frequencies(rope, max_context).tolist())
    return RopeFrequencies(inverse, max_context, attention_factor(rope.scaling), axes=rope.axes)


def section_axes(sections: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """The axis of each pair of dimensions: sections[i] pairs turn by axis i (Wang et al. 2024, M-RoPE).

    They lie one after another, or the axes take turns, axis 0 having the turns that others leave.
    """
    axes = [axis for axis, n in enumerate(sections) for _ in range(n)]
    if interleaved:
        axes = [0] * len(axes)
        for axis, n in enumerate(sections[1:], 1):
            own = range(axis, min(n * len(sections), len(axes)), len(sections))
            for pair in own:
                axes[pair] = axis
    return tuple(axes)


def with_scaling(config: ModelConfig, kind: str, factor: float) -> ModelConfig:
    """The configuration of a model whose context a user stretches `factor` times: linear, dynamic or yarn.

    Replaces a scaling of the checkpoint's own, and counts from the context before that one if it is known.
    Raises ConfigError on other kinds, whose parameters only a checkpoint has, on a factor below 1, and for a
    model without RoPE.
    """
    if not config.rope.rotary_dim:
        raise ConfigError("RoPE scaling (--rope-scaling) is not supported by a model without RoPE")
    if kind not in USER_SCALINGS:
        raise ConfigError(f"RoPE scaling must be one of {', '.join(USER_SCALINGS)}, not {kind!r}")
    if not 1 <= factor <= MAX_ROPE_FACTOR:
        raise ConfigError(f"the RoPE scaling factor must be from 1 to {MAX_ROPE_FACTOR}, not {factor}")
    own = config.rope.scaling
    original = own.original_context if own and own.original_context else config.max_context
    if original * factor > MAX_CONTEXT:
        raise ConfigError(f"{original} tokens times {factor:g} must be at most {MAX_CONTEXT} tokens")
    rope = replace(config.rope, scaling=RopeScaling(kind, factor, 0 if kind == "linear" else original))
    return replace(config, rope=rope, max_context=int(original * factor))


def inverse_frequencies(rope: RopeConfig, max_context: int) -> FloatArray:
    """Radians per token of each pair of dimensions, float32 [rotary_dim / 2]."""
    scaling = rope.scaling
    if scaling is None:
        return _ONE / _powers(rope.theta, rope.rotary_dim)
    if scaling.kind == "linear":
        return _ONE / _powers(rope.theta, rope.rotary_dim) / np.float32(scaling.factor)
    if scaling.kind == "dynamic":
        return _ONE / _powers(_dynamic_theta(rope, scaling, max_context), rope.rotary_dim)
    if scaling.kind == "longrope":
        is_long = max_context > scaling.original_context
        factors = scaling.long_factors if is_long else scaling.short_factors
        return _ONE / (np.array(factors, np.float32) * _powers(rope.theta, rope.rotary_dim))
    return _yarn(rope, scaling) if scaling.kind == "yarn" else _llama3(rope, scaling)


def llama3_divisors(theta: float, rotary_dim: int, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Slow frequencies divided by the factor, fast ones by 1, a blend between (Llama 3.1)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = scaling.original_context / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / ((1 - kept) / scaling.factor + kept)
    return factors


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor of cos and sin: sharper attention for YaRN and longrope, else 1."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "longrope":  # Ding et al. 2024
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def _powers(theta: float, rotary_dim: int) -> FloatArray:
    """theta^(2i / rotary_dim)."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    base = np.float64(np.float32(theta))  # torch rounds a number that meets a float32 tensor
    powers: FloatArray = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    return powers


def _dynamic_theta(rope: RopeConfig, scaling: RopeScaling, max_context: int) -> float:
    """The base that stretches the slowest frequency to max_context, and leaves the fastest alone."""
    n_tokens = max(max_context, scaling.original_context)
    stretch = scaling.factor * n_tokens / scaling.original_context - (scaling.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def yarn_mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor of cos and sin for a stretch, 1 without a stretch."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1


def _yarn(rope: RopeConfig, scaling: RopeScaling) -> FloatArray:
    """Fast dimensions kept, slow ones divided by the factor, a ramp between (Peng et al. 2023, 3.2)."""
    powers = _powers(rope.theta, rope.rotary_dim)
    low, high = (_yarn_bound(rope, scaling, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(len(powers), dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = _ONE - ramp.clip(0, 1)
    frequencies: FloatArray = (
        _ONE / (np.float32(scaling.factor) * powers) * (_ONE - kept) + _ONE / powers * kept
    )
    return frequencies


def _yarn_bound(rope: RopeConfig, scaling: RopeScaling, n_rotations: float) -> float:
    """The dimension pair that turns `n_rotations` times within the original context."""
    turns = scaling.original_context / (n_rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))


def _llama3(rope: RopeConfig, scaling: RopeScaling) -> FloatArray:
    """Slow frequencies divided by the factor, fast ones kept, a blend between (Llama 3.1)."""
    plain = _ONE / _powers(rope.theta, rope.rotary_dim)
    if scaling.factors:
        divided: FloatArray = np.divide(plain, np.array(scaling.factors, np.float32))
        return divided
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    factor, n_tokens = np.float32(scaling.factor), np.float32(scaling.original_context)
    wavelengths: npt.NDArray[np.float32] = np.float32(2 * math.pi) / plain
    blend = (n_tokens / wavelengths - low) / (high - low)
    blended = (_ONE - blend) * plain / factor + blend * plain
    slow, fast = wavelengths > n_tokens / low, wavelengths < n_tokens / high
    frequencies: FloatArray = np.where(slow, plain / factor, np.where(fast, plain, blended))
    return frequencies


def rope_row_order(name: str, n_rows: int, config: ModelConfig) -> npt.NDArray[np.int64] | None:
    """`half_split_order` for a projection of q or k, by its Hugging Face name; None for other tensors.

    If attention has gates, the files' rows of q are of each head its query and its gate: all queries, then
    all gates. Of q, k and v in one matrix, such files have them head by head. Of latent attention, the last
    rows of q's heads and of the latent's matrix rotate.
    """
    if config.latent is not None:
        match, n_rotary = _LATENT.fullmatch(name), config.rope.rotary_dim
        if match is None:
            return None
        n_before = config.latent.rank if match["kv"] else config.latent.d_nope
        rows = np.arange(n_rows).reshape(-1, n_before + n_rotary)
        rows[:, n_before:] = rows[:, n_before + half_split_order(n_rotary, n_rotary, n_rotary)]
        return rows.reshape(-1)
    if _HEAD_BY_HEAD.fullmatch(name) is not None:
        return np.arange(n_rows).reshape(-1, 3, config.d_head).swapaxes(0, 1).reshape(-1)
    if _ROTATED.fullmatch(name) is None:
        return None
    if config.has_gates:
        if ".k_proj." in name:  # attention may have a single key head
            return None
        return np.arange(n_rows).reshape(-1, 2, config.d_head).swapaxes(0, 1).reshape(-1)
    return half_split_order(n_rows, config.d_head, config.rope.rotary_dim)


def half_split_order(n_rows: int, d_head: int, rotary_dim: int) -> npt.NDArray[np.int64]:
    """For each row of a half-split q or k, its row in an interleaved one: int64 [n_rows].

    Of a head's rotary rows, interleaved files hold the pair (2i, 2i + 1) where transformers
    has (i, i + rotary_dim / 2); the others stay. Undoes `permute` of llama.cpp's convert_hf_to_gguf.py.
    """
    heads = np.arange(n_rows).reshape(-1, d_head)
    pairs = heads[:, :rotary_dim].reshape(len(heads), rotary_dim // 2, 2)
    heads[:, :rotary_dim] = pairs.swapaxes(1, 2).reshape(len(heads), rotary_dim)
    return heads.reshape(-1)
