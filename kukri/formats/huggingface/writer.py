"""Writes a checkpoint directory that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import FormatError
from kukri.formats.huggingface.config import hf_config
from kukri.formats.huggingface.safetensors import SINGLE_NAME, write_safetensors
from kukri.formats.huggingface.weights import (
    is_decay,
    joined_name,
    norm_offset,
    parameter_name,
    stored_shape,
)
from kukri.formats.unfinished import unfinished
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.constants import Experts, Weight
from kukri.kernels.cpu.quantize import requantize
from kukri.mapped_files import release_pages
from kukri.models import ARCHITECTURES, Architecture
from kukri.models.recurrent import tiled_heads
from kukri.models.rope import rope_row_order
from kukri.models.weights import WeightSource, expert_name
from kukri.quant.types import QUANT_TYPES, QuantType


class NamedWeights:
    """A `WeightSource` that passes on another's tensors, and records those that a model takes.

    Attributes: matrices, stacks, stacked_vectors and vectors, the shape of each by name.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.matrices: dict[str, tuple[int, int]] = {}
        self.stacks: dict[str, tuple[int, int, int]] = {}  # of experts
        self.stacked_vectors: dict[str, tuple[int, int]] = {}  # biases of experts
        self.vectors: dict[str, int] = {}

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix as it is stored."""
        self.matrices[name] = shape
        return self._source.matrix(name, shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        """Experts' matrices as they are stored."""
        self.stacks[name] = shape
        return self._source.experts(name, shape)

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        """Biases of experts, float32 (experts, out)."""
        self.stacked_vectors[name] = shape
        return self._source.expert_vectors(name, shape)

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


Tensors = dict[str, tuple[str, tuple[int, ...], Callable[[], ByteArray]]]


def _interleaved(weights: NamedWeights, target: QuantType, on_tensor: Callable[[str], None]) -> Tensors:
    """Experts as tensors of all: matrices (experts, in, out), biases (experts, out), gate and up in turns."""

    def stack(name: str) -> npt.NDArray[Any]:
        """Numbers [experts, in, out] of the target's width."""
        on_tensor(name)
        experts = weights.experts(name, weights.stacks[name])
        rows = [requantize(w.data, w.type, target, tensor=w.name) for w in experts.weights]
        return np.stack(rows).view(f"u{target.block_bytes}").swapaxes(1, 2)

    def bias(name: str) -> npt.NDArray[Any]:
        return weights.expert_vectors(name, weights.stacked_vectors[name])

    def in_turns(make: Callable[[str], npt.NDArray[Any]], names: list[str]) -> Callable[[], ByteArray]:
        def made() -> ByteArray:
            parts = np.stack([make(name) for name in names], axis=-1)
            return parts.reshape(len(parts), -1).view(np.uint8)

        return made

    tensors: Tensors = {}
    for name, (n, n_out, n_in) in weights.stacks.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part == "up_proj":
            continue  # gate's tensor has it
        parts = ["down_proj"] if part == "down_proj" else ["gate_proj", "up_proj"]
        fused, width = f"{layer}.{'down_proj' if len(parts) == 1 else 'gate_up_proj'}", len(parts) * n_out
        made = in_turns(stack, [f"{layer}.{p}.weight" for p in parts])
        tensors[fused] = (target.name, (n, n_in, width), made)
        tensors[f"{fused}_bias"] = ("F32", (n, width), in_turns(bias, [f"{layer}.{p}.bias" for p in parts]))
    return tensors


def _joined(tensors: Tensors, architecture: Architecture) -> Tensors:
    """The tensors under the names that safetensors have them by, those that lie in one there together."""
    together: dict[str, list[str]] = {}
    for name in tensors:
        together.setdefault(joined_name(name, architecture)[0], []).append(name)

    def maker(parts: list[str]) -> Callable[[], ByteArray]:
        return lambda: np.concatenate([tensors[part][2]() for part in parts], axis=-2)

    joined: Tensors = {}
    for name, parts in together.items():
        parts.sort(key=lambda part: joined_name(part, architecture)[1])
        dtype, shape, make = tensors[parts[0]]
        if len(parts) > 1:
            shape, make = (*shape[:-2], len(parts) * shape[-2], shape[-1]), maker(parts)
        joined[name] = (dtype, shape, make)
    return joined


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
    target, names = (
        QUANT_TYPES[dtype],
        [*weights.matrices, *weights.stacks, *weights.stacked_vectors, *weights.vectors],
    )

    in_pairs = ARCHITECTURES[config.architecture].hf_interleaved_rope

    def stored_order(name: str, n_rows: int) -> tuple[Any, Any]:
        """The rows and the columns as transformers has them."""
        if (order := rope_row_order(name, n_rows, config) if in_pairs else None) is not None:
            return np.argsort(order), slice(None)
        orders = (slice(None), slice(None))
        if config.recurrent is not None and config.recurrent.are_tiled:
            orders = tiled_heads(name, config.recurrent)
        rows, columns = (np.argsort(o) if isinstance(o, np.ndarray) else o for o in orders)
        return rows, columns

    def made(weight: Weight) -> ByteArray:
        on_tensor(weight.name)
        order, columns = stored_order(weight.name, weight.shape[0])
        rows = requantize(weight.data[order], weight.type, target, tensor=weight.name)
        if isinstance(columns, np.ndarray):
            rows = np.take(rows.view(f"u{target.block_bytes}"), columns, axis=1).view(np.uint8)
        release_pages(weight.stored)
        return rows

    def matrix(name: str) -> Callable[[], ByteArray]:
        return lambda: made(weights.matrix(name, weights.matrices[name]))

    def expert(name: str, i: int) -> Callable[[], ByteArray]:
        return lambda: made(stack(name).weights[i])

    def all_of(name: str) -> Callable[[], ByteArray]:
        return lambda: np.stack(
            [made(weight) for weight in weights.experts(name, weights.stacks[name]).weights]
        )

    @lru_cache(maxsize=1)  # its experts come one after another
    def stack(name: str) -> Experts:
        return weights.experts(name, weights.stacks[name])

    def vector(name: str) -> Callable[[], ByteArray]:
        def make() -> ByteArray:
            values = weights.vector(name, weights.vectors[name]) - norm_offset(name, config)
            values = np.log(-values) if is_decay(name) else values
            return np.ascontiguousarray(values[stored_order(name, len(values))[0]]).view(np.uint8)

        return make

    architecture = ARCHITECTURES[config.architecture]
    tensors: Tensors = {
        name: (dtype, stored_shape(name, shape), matrix(name)) for name, shape in weights.matrices.items()
    }
    experts = architecture.experts
    if architecture.joined:
        stacks: Tensors = {name: (dtype, shape, all_of(name)) for name, shape in weights.stacks.items()}
        tensors = _joined(tensors | stacks, architecture)
    elif experts is not None and experts.is_interleaved:
        tensors |= _interleaved(weights, target, on_tensor)
    else:
        for name, (n, *shape) in weights.stacks.items():
            tensors |= {expert_name(name, i): (dtype, tuple(shape), expert(name, i)) for i in range(n)}
    for name, size in weights.vectors.items():
        tensors[parameter_name(name)] = ("F32", (size,), vector(name))
    torch_name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    stated = {**hf_config(config, names), "torch_dtype": torch_name}
    try:
        with unfinished(path, is_directory=True) as folder:
            for name, contents in {"config.json": stated, **text}.items():
                is_text = isinstance(contents, str)
                written = contents if is_text else json.dumps(contents, ensure_ascii=False, indent=2)
                (folder / name).write_text(str(written), encoding="utf-8")
            write_safetensors(folder / SINGLE_NAME, tensors)
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror}", path=path) from None
