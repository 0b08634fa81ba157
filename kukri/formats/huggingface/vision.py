"""The encoder of images in a checkpoint's directory: its configuration, processor and weights."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import FormatError, UnsupportedError, UnusedTensorError, brief, brief_list
from kukri.formats.huggingface.safetensors import open_files
from kukri.formats.huggingface.weights import RUNS, is_of_images, packed_type, stored_data
from kukri.formats.json_files import read_json
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models.keys import Keys
from kukri.models.weights import WeightSource
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES, QuantType, fitting_type
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders import family_of
from kukri.vision.processors import ImageProcessor, image_processor

_log = logging.getLogger("kukri.formats")
_UNPACKED = ("model.embed_patches.weight", "model.embed_positions.weight")  # every patch is embedded by them


def vision_family(stated: Mapping[str, Any]) -> VisionFamily | None:
    """The family of the encoder that config.json states, if it states one that runs."""
    return family_of(stated.get("model_type")) if isinstance(stated.get("vision_config"), dict) else None


def vision_config(stated: Mapping[str, Any], path: Path, d_text: int) -> VisionConfig | None:
    """The encoder that `stated`, the contents of the config.json at `path`, describes; None if none runs.

    Its rows have the width `d_text` of the text. Raises FormatError on a key that is missing or nonsense, and
    UnsupportedError on one that asks for what kukri does not run.
    """
    family = vision_family(stated)
    if family is None:
        return None
    keys = Keys(stated, path, defaults=family.defaults)
    vision = Keys(stated["vision_config"], path, defaults=family.vision_defaults)
    with keys.reading(), vision.reading():
        return family.read_hf(keys, vision, d_text)


class EncoderWeights(WeightSource):
    """A `WeightSource` without experts, of an encoder of images."""

    path: Path

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        raise FormatError("is missing", path=self.path, tensor=name)

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        raise FormatError("is missing", path=self.path, tensor=name)


class VisionWeights(EncoderWeights):
    """The `WeightSource` of the encoder of images in a directory's safetensors files.

    `quantize_to` packs matrices as it does the text's; the patches' and the positions' stay as they
    are. Raises FormatError for what is broken or absent, and ConfigError for a type that weights cannot be
    packed to.
    """

    def __init__(
        self, directory: str | os.PathLike[str], family: VisionFamily, quantize_to: str | None = None
    ) -> None:
        self.path, self._family = Path(directory), family
        self._target = None if quantize_to is None else packed_type(quantize_to)
        self._files = open_files(self.path)
        self._taken: set[str] = set()

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix (out, in), as stored or packed; a convolution's (out, 3, height, width) is one too."""
        if name in self._family.transposed:
            data, kind = self._take(name, shape[::-1])
            numbers = data.view(f"u{kind.block_bytes}").reshape(shape[::-1])
            data = np.ascontiguousarray(numbers.T).view(np.uint8)
        else:
            data, kind = self._take(name, shape)
        weight = Weight(data.reshape(shape[0], -1), kind, shape, name)
        target = self._target and fitting_type(self._target, shape[1])
        if target is None or name in _UNPACKED:
            return weight
        return Weight(requantize(weight.data, kind, target, tensor=name), target, shape, name)

    def vector(self, name: str, size: int) -> FloatArray:
        data, kind = self._take(name, (size,))
        values = np.ascontiguousarray(dequantize(data.reshape(1, -1), kind).reshape(size))
        return values + np.float32(1) if name in self._family.lacks_one else values

    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._files

    def done(self) -> None:
        left = [name for name in self._files if is_of_images(name) and name not in self._taken]
        unused = [name for name in left if not re.fullmatch(self._family.unused, name)]
        if unused:
            raise UnusedTensorError(
                f"holds tensors that no layer of {self._family.name}'s encoder takes: "
                f"{brief_list([*map(brief, unused)])}; check 'model_type' in config.json",
                path=self.path,
            )

    def _stored_name(self, name: str) -> str:
        """The tensor's name in the files, or that which it most likely would have."""
        prefix = next((one for one in self._family.names if f"{name}.".startswith(f"{one}.")), None)
        stems = self._family.names[prefix] if prefix is not None else ("",)
        rest = name.removeprefix(prefix or "")
        names = [f"{front}{stem}{rest}" for stem in stems for front in ("model.", "")]
        return next((one for one in names if one in self._files), names[0])

    def _take(self, name: str, shape: tuple[int, ...]) -> tuple[ByteArray, QuantType]:
        name = self._stored_name(name)
        file = self._files.get(name)
        if file is None:
            raise FormatError("is missing", path=self.path, tensor=name)
        tensor = file.tensors[name]
        if (tensor.shape or (1,))[:1] != shape[:1] or prod(tensor.shape) != prod(shape):
            message = f"has shape {tensor.shape} where the configuration asks for {shape}"
            raise FormatError(message, path=file.path, offset=tensor.offset, tensor=name)
        data = stored_data(file, name, RUNS)
        self._taken.add(name)
        return data, QUANT_TYPES[tensor.dtype]


def read_image_processor(directory: Path) -> ImageProcessor | None:
    """The processor of a model that sees, by preprocessor_config.json and processor_config.json.

    None, with a warning, if there is neither, or if it is of a kind that is not known here. Raises
    FormatError on values that no checkpoint has.
    """
    stated, processor, model = (
        _read(directory / name)
        for name in ("preprocessor_config.json", "processor_config.json", "config.json")
    )
    try:
        if not stated and not processor:
            raise UnsupportedError("preprocessor_config.json was not found")
        return image_processor(stated, processor, model)
    except UnsupportedError as error:
        _log.warning("%s: images are not read: %s", directory, error)
        return None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
