"""Reads the sampling parameters that a checkpoint advises, as fields of SamplingParams; unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# generation_config.json has most of them under the same names
_HUGGINGFACE = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
# keys general.sampling.* of GGUF, as llama.cpp reads them; its `sequence` of stages is left to kukri
_GGUF = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def huggingface_advice(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The advice of a generation_config.json; one with `do_sample` false advises the likeliest token."""
    if generation_config.get("do_sample") is False:
        return {"temperature": 0.0}
    stated = {name: generation_config.get(name) for name in _HUGGINGFACE}
    return {name: value for name, value in stated.items() if value is not None}


def gguf_advice(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The advice of a GGUF file's metadata. Its float32 are rounded to short decimals: 0.95."""
    advice = {}
    for key, name in _GGUF.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            value = value.item() if hasattr(value, "item") else value
            advice[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return advice
