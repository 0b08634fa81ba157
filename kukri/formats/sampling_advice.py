"""The sampling parameters that a checkpoint advises, as fields of SamplingParams; unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
    "kukri.typical_p": "typical_p",  # kukri's own: llama.cpp has no key for it
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
            value = value.item() if isinstance(value, np.generic) else value
            advice[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return advice


def advice_keys(advice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a GGUF file with the advice of a directory."""
    made: dict[str, Any] = {}
    for key, name in _GGUF.items():
        value = advice.get(name)
        if name == "top_k":
            if type(value) is int:
                made[f"general.sampling.{key}"] = np.int32(max(0, min(value, 2**31 - 1)))
        elif name in _HUGGINGFACE and type(value) in (int, float):
            made[f"general.sampling.{key}"] = np.float32(value)
    return made


def generation_keys(advice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a generation_config.json with the advice of a GGUF file."""
    stated = {name: advice[name] for name in _HUGGINGFACE if name in advice}
    if stated.get("temperature") == 0:
        return {"do_sample": False}
    return {"do_sample": True, **stated} if stated else {}
