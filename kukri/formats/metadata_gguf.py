"""GGUF keys of a model's configuration: what `config_gguf` reads, written as llama.cpp's converter does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig, RopeScaling
from kukri.errors import UnsupportedError
from kukri.formats.config_gguf import (
    GGUF_ARCHITECTURES,
    HEAD_KEY,
    LABELS_KEY,
    NOPE_KEY,
    PAD_KEY,
    PROBLEM_KEY,
    ROPE_TENSORS,
    GGUFArchitecture,
)

_GGUF_OF = {fixed.architecture: name for name, fixed in GGUF_ARCHITECTURES.items()} | {"mistral": "llama"}


def gguf_architecture(config: ModelConfig) -> tuple[str, GGUFArchitecture]:
    """GGUF's name for an architecture, and what its files leave unsaid."""
    name = _GGUF_OF[config.architecture]
    return name, GGUF_ARCHITECTURES[name]


def model_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys of a configuration. Raises UnsupportedError for what no key can say."""
    name, fixed = gguf_architecture(config)
    keys: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.max_context,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ffn,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.d_head,
        "attention.value_length": config.d_head,
        fixed.epsilon_key: float(config.norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.rotary_dim,
        "vocab_size": config.n_vocab,
        **_windows(config, name),
        **(_scaling(config.rope.scaling, config.max_context) if config.rope.scaling else {}),
    }
    nope = [i for i, layer in enumerate(config.layers) if not layer.use_rope]
    if fixed.nope_interval or nope:
        keys[NOPE_KEY] = np.array(nope, np.int32)
    keys |= _head(config)
    return {
        "general.architecture": name,
        "general.type": "model",
        "general.name": config.name or name,
        **{f"{name}.{key}": value for key, value in keys.items()},
    }


def _head(config: ModelConfig) -> dict[str, Any]:
    head = config.head
    if head.kind == "language_model":
        return {}
    keys: dict[str, Any] = {HEAD_KEY: head.kind}
    if head.labels:
        keys[LABELS_KEY] = list(head.labels)
    if head.problem_type is not None:
        keys[PROBLEM_KEY] = head.problem_type
    if head.pad_id is not None and 0 <= head.pad_id < config.n_vocab:  # another is in no text
        keys[PAD_KEY] = head.pad_id
    return keys


def rope_tensors(config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors that are configuration: what RoPE's frequencies are divided by, for llama3 and longrope."""
    scaling = config.rope.scaling
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {
            ROPE_TENSORS[1]: np.array(scaling.short_factors, np.float32),
            ROPE_TENSORS[2]: np.array(scaling.long_factors, np.float32),
        }
    factors = scaling.factors or _llama3_factors(config.rope.theta, config.rope.rotary_dim, scaling)
    return {ROPE_TENSORS[0]: np.array(factors, np.float32)}


def _llama3_factors(theta: float, rotary_dim: int, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Slow frequencies divided by the factor, fast ones by 1, a blend between (Llama 3.1)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = scaling.original_context / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / ((1 - kept) / scaling.factor + kept)
    return factors


def _windows(config: ModelConfig, name: str) -> dict[str, Any]:
    windows = {layer.window for layer in config.layers}
    if windows == {None}:
        return {"attention.sliding_window": 0} if name == "phi3" else {}
    sizes = windows - {None}
    if len(sizes) > 1:
        raise UnsupportedError(f"GGUF has no key for windows of several sizes: {sorted(sizes, key=str)}")
    keys: dict[str, Any] = {"attention.sliding_window": sizes.pop()}
    if None in windows:
        keys["attention.sliding_window_pattern"] = np.array(
            [layer.window is not None for layer in config.layers]
        )
    return keys


def _scaling(scaling: RopeScaling, max_context: int) -> dict[str, Any]:
    if scaling.kind == "llama3":
        return {}  # its tensor says all
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    keys: dict[str, Any] = {"rope.scaling.original_context_length": scaling.original_context}
    if scaling.kind == "longrope":
        factor, original = max(scaling.factor, 1.0), scaling.original_context
        by_paper = math.sqrt(1 + math.log(factor) / math.log(original))
        return {**keys, "rope.scaling.attn_factor": float(scaling.attention_factor or by_paper)}
    keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    return keys | _yarn(scaling) if scaling.kind == "yarn" else keys


def _yarn(scaling: RopeScaling) -> dict[str, Any]:
    if not scaling.truncate:
        raise UnsupportedError("GGUF has no key for YaRN without rounded bounds (truncate: false)")
    log = math.log(max(scaling.factor, 1.0))
    base = 0.1 * log + 1  # what readers multiply the key by
    wanted = scaling.attention_factor
    if wanted is None and scaling.mscale and scaling.mscale_all_dim:
        wanted = (0.1 * scaling.mscale * log + 1) / (0.1 * scaling.mscale_all_dim * log + 1)
    keys = {
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }
    return keys if wanted is None else {**keys, "rope.scaling.attn_factor": wanted / base}
