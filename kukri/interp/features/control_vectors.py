"""Control vectors: a direction for each layer, added to the residual stream (Zou et al. 2023).

Files are GGUF of the architecture `controlvector`, as llama.cpp's cvector-generator and repeng write them:
tensors `direction.N`, float32 [D]. Both add `direction.N` to the output of block N, counted from 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import ConfigError, FormatError, brief, reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.arrays import FloatArray
from kukri.quant.types import QUANT_TYPES

_ARCHITECTURE = "controlvector"
_PREFIX = "direction."
_MAX_LAYERS = 4096


class ControlVector:
    """Directions by layer. Attribute: directions, float32 [D] that belong to `blocks.N.hook_resid_post`.

    `directions` may be a mapping of arrays, or an object with such an attribute, as repeng's ControlVector.
    Raises ConfigError if they are not finite vectors of one length.
    """

    def __init__(self, directions: Any) -> None:
        given = getattr(directions, "directions", directions)
        if not isinstance(given, Mapping) or not given:
            raise ConfigError("a control vector must be a mapping of layers to vectors, at least one")
        self.directions: dict[int, FloatArray] = {}
        for layer, vector in given.items():
            array = np.array(vector, np.float32)
            if not isinstance(layer, (int, np.integer)) or not 0 <= layer < _MAX_LAYERS:
                raise ConfigError(f"layers of a control vector must start at 0, not {brief(layer)}")
            if array.ndim != 1 or not np.isfinite(array).all():
                raise ConfigError(f"the direction of layer {layer} must be a vector of finite numbers")
            self.directions[int(layer)] = array
        if len({len(vector) for vector in self.directions.values()}) > 1:
            raise ConfigError("the directions of a control vector must have the same length")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ControlVector:
        """Reads a GGUF file. Raises FormatError if it is not a control vector."""
        with reading(path), GGUFFile(path) as file:
            architecture = file.metadata.get("general.architecture")
            if architecture != _ARCHITECTURE:
                raise FormatError(
                    f"must be a control vector: its architecture is {brief(architecture)}, not "
                    f"{_ARCHITECTURE!r}",
                    path=path,
                )
            found: dict[int, FloatArray] = {}
            for name in file.tensors:
                number = name.removeprefix(_PREFIX)
                if not name.startswith(_PREFIX) or not number.isascii() or not number.isdigit():
                    raise FormatError("must be a direction, with a name direction.N", path=path, tensor=name)
                found[int(number[:9])] = np.array(file.array(name))
            return cls(found)

    def save(self, path: str | os.PathLike[str], model_hint: str = "") -> None:
        """Writes a GGUF file that llama.cpp and repeng read; `model_hint` is the model's architecture."""
        f32 = QUANT_TYPES["F32"]
        metadata = {
            "general.architecture": _ARCHITECTURE,
            f"{_ARCHITECTURE}.model_hint": model_hint,
            f"{_ARCHITECTURE}.layer_count": len(self.directions),
        }
        tensors = {
            f"{_PREFIX}{layer}": (f32, vector, vector.shape) for layer, vector in self.directions.items()
        }
        write_gguf(Path(path), metadata, tensors)

    def check(self, name: str, n_layers: int, d_model: int) -> None:
        """Raises ConfigError unless it fits a model."""
        width, last = len(next(iter(self.directions.values()))), max(self.directions)
        if width != d_model or last >= n_layers:
            raise ConfigError(
                f"control vector {name!r} cannot be used with this model: it has {width} numbers and layer "
                f"{last}, the model {d_model} and layers 0 to {n_layers - 1}"
            )
