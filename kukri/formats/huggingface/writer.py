"""Writes a checkpoint directory that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import FormatError
from kukri.formats.gguf.weights import rope_row_order
from kukri.formats.huggingface.config import hf_config
from kukri.formats.huggingface.safetensors import SINGLE_NAME, write_safetensors
from kukri.formats.huggingface.weights import norm_offset
from kukri.kernels.cpu.quantize import requantize
from kukri.kernels.types import ByteArray, Experts, FloatArray, Weight
from kukri.mapped_files import release_pages
from kukri.models import ARCHITECTURES
from kukri.models.weights import WeightSource, expert_name
from kukri.quant.types import QUANT_TYPES


class NamedWeights:
    """A `WeightSource` that passes on another's tensors, and records those that a model takes.

    Attributes: matrices, stacks and vectors, the shape of each by name.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.matrices: dict[str, tuple[int, int]] = {}
        self.stacks: dict[str, tuple[int, int, int]] = {}  # of experts
        self.vectors: dict[str, int] = {}

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix as it is stored."""
        self.matrices[name] = shape
        return self._source.matrix(name, shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        """Experts' matrices as they are stored."""
        self.stacks[name] = shape
        return self._source.experts(name, shape)

    def vector(self, name: str, size: int) -> FloatArray:
        """A vector as float32 [size]."""
        self.vectors[name] = size
        return self._source.vector(name, size)

    def has(self, name: str) -> bool:
        """True if there is such a tensor."""
        return self._source.has(name)

    def done(self) -> None:
        """Raises UnusedTensorError listing the tensors that no layer took."""
        self._source.done()


def write_directory(
    path: Path,
    config: ModelConfig,
    weights: NamedWeights,
    dtype: str,
    text: Mapping[str, Any],
    on_tensor: Callable[[str], None],
) -> None:
    """Writes a model as transformers saves it; the directory appears complete or not at all.

    `weights` are those a model has taken, `text` the contents of its tokenizer's files by their names.
    Matrices become `dtype` (F32, F16 or BF16), vectors stay F32.
    """
    target, names = QUANT_TYPES[dtype], [*weights.matrices, *weights.stacks, *weights.vectors]

    in_pairs = ARCHITECTURES[config.architecture].hf_interleaved_rope

    def stored_order(name: str, n_rows: int) -> Any:
        order = rope_row_order(name, n_rows, config) if in_pairs else None
        return slice(None) if order is None else np.argsort(order)

    def made(weight: Weight) -> ByteArray:
        on_tensor(weight.name)
        rows = weight.data[stored_order(weight.name, weight.shape[0])]
        rows = requantize(rows, weight.type, target, tensor=weight.name)
        release_pages(weight.stored)
        return rows

    def matrix(name: str) -> Callable[[], ByteArray]:
        return lambda: made(weights.matrix(name, weights.matrices[name]))

    def expert(name: str, i: int) -> Callable[[], ByteArray]:
        return lambda: made(stack(name).weights[i])

    @lru_cache(maxsize=1)  # its experts come one after another
    def stack(name: str) -> Experts:
        return weights.experts(name, weights.stacks[name])

    def vector(name: str) -> Callable[[], ByteArray]:
        def make() -> ByteArray:
            values = weights.vector(name, weights.vectors[name]) - norm_offset(name, config)
            return np.ascontiguousarray(values[stored_order(name, len(values))]).view(np.uint8)

        return make

    tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], ByteArray]]] = {
        name: (dtype, shape, matrix(name)) for name, shape in weights.matrices.items()
    }
    for name, (n, *shape) in weights.stacks.items():
        tensors |= {expert_name(name, i): (dtype, tuple(shape), expert(name, i)) for i in range(n)}
    tensors |= {name: ("F32", (size,), vector(name)) for name, size in weights.vectors.items()}
    torch_name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    stated = {**hf_config(config, names), "torch_dtype": torch_name}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.mkdir()
        for name, contents in {"config.json": stated, **text}.items():
            written = (
                contents if isinstance(contents, str) else json.dumps(contents, ensure_ascii=False, indent=2)
            )
            (unfinished / name).write_text(written, encoding="utf-8")
        write_safetensors(unfinished / SINGLE_NAME, tensors)
        unfinished.rename(path)
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror}", path=path) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
