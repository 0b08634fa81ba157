"""EAGLE-3's draft layers from a directory of safetensors, in the form that SGLang and vLLM load.

As in their `llama_eagle3.py`: tensors `fc`, `midlayer`, `norm` and `lm_head`; `d2t` says how far a token's id
lies after the head's. Embeddings are the model's, which training leaves as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import FormatError, UnsupportedError
from kukri.formats.huggingface.config import hf_model_config
from kukri.formats.huggingface.safetensors import open_files
from kukri.formats.huggingface.weights import SafetensorsWeights, stored_data
from kukri.formats.json_files import read_json
from kukri.kernels.arrays import IntArray
from kukri.models.eagle3 import N_ROWS, Eagle3
from kukri.models.llama import Llama

_IDS, _INNER, _NORMS = "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_residual"


class _Names:
    """A `WeightSource` in which the only layer is called `midlayer`, and nothing `model`."""

    def __init__(self, source: SafetensorsWeights) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        """A method whose first argument is a tensor's name."""
        method = getattr(self._source, name)

        def renamed(tensor: str, *others: Any) -> Any:
            return method(tensor.replace("model.layers.0.", "midlayer.").removeprefix("model."), *others)

        return renamed


def is_eagle3(path: Path) -> bool:
    """True for the directory of such a layer."""
    file = path / "config.json"
    names = read_json(file).get("architectures") if file.is_file() else None
    return isinstance(names, list) and any(isinstance(name, str) and "Eagle3" in name for name in names)


def read_eagle3(path: Path, model: Any, quantize_to: str | None = None) -> Eagle3:
    """The layer in a directory, for a model, packed as SafetensorsWeights does. Raises UnsupportedError if it
    is not that model's, or is of another form, and FormatError for what is broken.
    """
    file = path / "config.json"
    stated = read_json(file)
    if not isinstance(model, Llama):
        raise UnsupportedError(f"{path} requires a Llama-style model, as EAGLE-3 layers do")
    to_target = _to_target(path, model.config.n_vocab)
    usual = {key: value for key, value in stated.items() if key not in (_IDS, _INNER, _NORMS)}
    own = {"model_type": "llama", "vocab_size": len(to_target), "tie_word_embeddings": False}
    config = hf_model_config({**usual, **own}, file)
    if config.n_layers != 1 or config.d_model != model.config.d_model:
        raise UnsupportedError(
            f"{path} must have 1 layer of the model's width {model.config.d_model}, not {config.n_layers} "
            f"of {config.d_model}"
        )
    config = replace(config, n_vocab=model.config.n_vocab, max_context=model.config.max_context)
    source: Any = _Names(SafetensorsWeights(path, config, quantize_to))
    norms_residual = stated.get(_NORMS) is True
    depths = _depths(stated, model.config.n_layers, file)
    return Eagle3(config, source, model, depths, to_target, norms_residual=norms_residual)


def _depths(stated: Mapping[str, Any], n_layers: int, file: Path) -> list[int]:
    """The layers before which the model's stream is read."""
    inner = stated.get(_INNER)
    ids = inner.get(_IDS) if isinstance(inner, dict) else None
    if ids is not None:  # these are layers after which
        ids = [i + 1 if isinstance(i, int) else i for i in ids] if isinstance(ids, list) else ids
    else:
        ids = stated.get(_IDS) or [2, n_layers // 2, n_layers - 3]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < n_layers for i in ids):
        raise FormatError(f"key {_IDS!r} must list layers of the model's {n_layers}", path=file)
    if len(ids) != N_ROWS or sorted(set(ids)) != ids:
        raise UnsupportedError(f"{file}: the model's stream must be read before {N_ROWS} layers, in order")
    return ids


def _to_target(path: Path, n_vocab: int) -> IntArray:
    """The model's token for each of the head's."""
    files = open_files(path)
    if "lm_head.weight" not in files:
        raise FormatError("is missing", path=path, tensor="lm_head.weight")
    ids = np.arange(files["lm_head.weight"].tensors["lm_head.weight"].shape[0], dtype=np.int64)
    if "d2t" in files:
        steps = stored_data(files["d2t"], "d2t", ("I64",)).view(np.int64)
        if steps.shape != ids.shape:
            raise FormatError(f"must have {len(ids)} numbers, not {len(steps)}", path=path, tensor="d2t")
        ids = ids + steps
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= n_vocab:
        raise FormatError(f"must name only tokens of the model's {n_vocab}", path=path, tensor="d2t")
    return ids.astype(np.int32)
