"""Assistants of Gemma 4 from a directory of safetensors: `model_type` gemma4_assistant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kukri.errors import UnsupportedError
from kukri.formats.huggingface.config import hf_model_config
from kukri.formats.huggingface.weights import SafetensorsWeights
from kukri.formats.json_files import read_json
from kukri.models.assistant import Assistant
from kukri.models.gemma4_text import Gemma4

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_assistant(path: Path) -> bool:
    """True for the directory of an assistant."""
    file = path / "config.json"
    return file.is_file() and read_json(file).get("model_type") in _TYPES


def read_assistant(path: Path, model: Any) -> Assistant:
    """The assistant in a directory, for a model. Raises UnsupportedError if it is not that model's."""
    stated = read_json(path / "config.json")
    text = stated.get("text_config")
    if not isinstance(text, dict) or not isinstance(model, Gemma4):
        raise UnsupportedError(f"{path} is not supported with this model: it is an assistant of Gemma 4")
    if stated.get("backbone_hidden_size") != model.config.d_model:
        raise UnsupportedError(f"{path} is not supported with this model, which has another width")
    # its layers read the model's keys and values, which no key of its own can say
    config = hf_model_config({**text, "num_kv_shared_layers": 0}, path / "config.json")
    return Assistant(config, SafetensorsWeights(path, config), model)
