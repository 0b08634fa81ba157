"""`config.json` of a configuration: what `config_hf` reads, in words of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig, RopeConfig, RopeScaling
from kukri.errors import UnsupportedError
from kukri.formats.config_hf import HF_ARCHITECTURES
from kukri.formats.metadata_gguf import rope_tensors

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
}


def hf_config(config: ModelConfig, names: Collection[str]) -> dict[str, Any]:
    """The contents of config.json; `names` are the checkpoint's tensors, Hugging Face's names.

    Raises UnsupportedError for what no key can say.
    """
    if config.head.kind != "language_model":
        raise UnsupportedError(
            f"kukri writes directories of language models, and this one's head is {config.head.kind}:"
            " transformers names such a model's tensors otherwise in each architecture"
        )
    windows = [layer.window for layer in config.layers]
    kind = config.architecture
    if kind == "llama" and any(windows):
        kind = "mistral"  # its GGUF files say llama
    if kind not in _CLASSES:
        raise UnsupportedError(f"kukri writes no config.json for {kind}: it does for {', '.join(_CLASSES)}")
    known = HF_ARCHITECTURES[kind]
    made: dict[str, Any] = {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ffn,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "vocab_size": config.n_vocab,
        "max_position_embeddings": config.max_context,
        "hidden_act": known.activation,
        known.norm_eps_key: config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config) if config.rope.scaling else None,
        # the tokenizer's files say them; left out, each class has ids of its own that the vocabulary may lack
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_windows(kind, windows),
    }
    if config.rope.rotary_dim != config.d_head or "partial_rotary_factor" in known.defaults:
        made["partial_rotary_factor"] = config.rope.rotary_dim / config.d_head
    if kind == "smollm3":
        made["no_rope_layers"] = [int(layer.use_rope) for layer in config.layers]
    if kind == "phi3":
        scaling = config.rope.scaling
        made["original_max_position_embeddings"] = scaling.original_context if scaling else config.max_context
    for module, key in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
        if key in known.reads:
            made[key] = any(f".{module}." in name and name.endswith(".bias") for name in names)
    return made


def _windows(kind: str, windows: list[int | None]) -> dict[str, Any]:
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise UnsupportedError(f"config.json has no key for windows of several sizes: {sorted(sizes)}")
    size = min(sizes, default=None)
    if kind in ("mistral", "phi3"):
        if size is not None and None in windows:
            raise UnsupportedError(f"{kind} has no key for a window in some layers alone")
        return {"sliding_window": size}
    if "layer_types" not in HF_ARCHITECTURES[kind].reads or size is None:
        return {"use_sliding_window": False} if "layer_types" in HF_ARCHITECTURES[kind].reads else {}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": types}


def _scaling(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    assert scaling is not None
    if scaling.kind == "llama3":
        scaling = _llama3(config, scaling)
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    made: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("yarn", "longrope"):
        made["original_max_position_embeddings"] = scaling.original_context
        if scaling.attention_factor is not None:
            made["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        made |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.kind == "longrope":
        made |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        del made["factor"]
    return made


def _llama3(config: ModelConfig, scaling: RopeScaling) -> RopeScaling:
    """The parameters that give the divisors of a GGUF file, which holds those alone."""
    if not scaling.factors:
        return scaling
    for power in range(3, 21):
        trial = RopeScaling("llama3", round(max(scaling.factors), 3), 1 << power)
        rope = RopeConfig(config.rope.theta, config.rope.rotary_dim, trial)
        made = rope_tensors(replace(config, rope=rope))["rope_freqs.weight"]
        if np.allclose(made, scaling.factors, rtol=1e-5):
            return trial
    raise UnsupportedError("the divisors in rope_freqs.weight are not those of Llama 3's formula")
