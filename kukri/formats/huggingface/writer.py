"""Writes a checkpoint directory that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import FormatError
from kukri.formats.head_matrices import join_parts, joined_heads, joined_shape, parts_of_heads
from kukri.formats.huggingface.config import hf_config
from kukri.formats.huggingface.safetensors import SINGLE_NAME, write_safetensors
from kukri.formats.huggingface.weights import is_stacked, joined_name, parameter_name
from kukri.formats.tensor_forms import hf_form, inverse, taken
from kukri.formats.unfinished import unfinished
from kukri.host.files import write_text
from kukri.host.mapped_files import release_pages
from kukri.kernels.arrays import ByteArray
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import ARCHITECTURES
from kukri.models.weights import TakenWeights, expert_name
from kukri.quant.types import QUANT_TYPES, QuantType

Tensors = dict[str, tuple[str, tuple[int, ...], Callable[[], ByteArray]]]


def _interleaved(weights: TakenWeights, target: QuantType, on_tensor: Callable[[str], None]) -> Tensors:
    """Experts as tensors of all: matrices (experts, in, out), biases (experts, out), gate and up in turns."""

    def stack(name: str) -> npt.NDArray[Any]:
        """Numbers [experts, in, out] of the target's width."""
        on_tensor(name)
        rows = [requantize(w.data, w.type, target, tensor=w.name) for w in weights.stacks[name].weights]
        return np.stack(rows).view(f"u{target.block_bytes}").swapaxes(1, 2)

    def in_turns(make: Callable[[str], npt.NDArray[Any]], names: list[str]) -> Callable[[], ByteArray]:
        def made() -> ByteArray:
            parts = np.stack([make(name) for name in names], axis=-1)
            return parts.reshape(len(parts), -1).view(np.uint8)

        return made

    tensors: Tensors = {}
    biases = weights.stacked_vectors.__getitem__
    for name, experts in weights.stacks.items():
        n, n_out, n_in = experts.shape
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part == "up_proj":
            continue  # gate's tensor has it
        parts = ["down_proj"] if part == "down_proj" else ["gate_proj", "up_proj"]
        fused, width = f"{layer}.{'down_proj' if len(parts) == 1 else 'gate_up_proj'}", len(parts) * n_out
        made = in_turns(stack, [f"{layer}.{p}.weight" for p in parts])
        tensors[fused] = (target.name, (n, n_in, width), made)
        tensors[f"{fused}_bias"] = ("F32", (n, width), in_turns(biases, [f"{layer}.{p}.bias" for p in parts]))
    return tensors


def _joined(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors under the names that safetensors have them by, tensors that lie in one there together."""
    architecture, own = ARCHITECTURES[config.architecture], config.recurrent
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
        shape = hf_form(parts[0], config).transform.store_shape(shape, own) if len(shape) == 1 else shape
        name = parameter_name(name, architecture)
        if name.startswith("model."):
            name = architecture.hf_prefix + name.removeprefix("model.")
        joined[name] = (dtype, shape, make)
    return joined


def write_directory(
    path: Path,
    config: ModelConfig,
    weights: TakenWeights,
    dtype: str,
    text: Mapping[str, Any],
    on_tensor: Callable[[str], None],
) -> None:
    """Writes a model as transformers saves it; the directory appears complete or not at all.

    `weights` are those a model has taken, `text` the contents of its tokenizer's files by their names.
    Matrices become `dtype` (F32, F16 or BF16), vectors stay F32.
    """
    target, architecture, own = QUANT_TYPES[dtype], ARCHITECTURES[config.architecture], config.recurrent

    def made(weight: Weight) -> ByteArray:
        on_tensor(weight.name)
        form = hf_form(weight.name, config, weight.shape[0])
        rows = requantize(taken(weight.data, inverse(form.rows)), weight.type, target, tensor=weight.name)
        release_pages(weight.stored)
        numbers = rows.view(f"u{target.block_bytes}")
        return np.ascontiguousarray(taken(numbers, None, inverse(form.columns))).view(np.uint8)

    def all_made(experts: Experts) -> ByteArray:
        return np.stack([made(weight) for weight in experts.weights])

    def vector(name: str) -> ByteArray:
        values = weights.vectors[name]
        form = hf_form(name, config, len(values))
        values = values if form.transform.store is None else form.transform.store(values)
        return np.ascontiguousarray(taken(values, inverse(form.rows))).view(np.uint8)

    tensors: Tensors = {
        name: (dtype, hf_form(name, config).transform.store_shape(weight.shape, own), partial(made, weight))
        for name, weight in weights.matrices.items()
    }
    if architecture.experts is not None and architecture.experts.is_interleaved:
        tensors |= _interleaved(weights, target, on_tensor)
    else:
        for name, experts in weights.stacks.items():
            if joined := joined_heads(name):
                if ".v_b_proj." in name:  # the keys' matrices come before it
                    keys = weights.stacks[parts_of_heads(joined)[0]]
                    tensors[joined] = (
                        dtype,
                        joined_shape(config),
                        partial(join_parts, keys, experts, target),
                    )
                continue
            if is_stacked(name, architecture):
                tensors[name] = (dtype, experts.shape, partial(all_made, experts))
                continue
            for i, weight in enumerate(experts.weights):
                tensors[expert_name(name, i)] = (dtype, weight.shape, partial(made, weight))
    for name, values in weights.vectors.items():
        tensors[name] = ("F32", values.shape, partial(vector, name))
    tensors = _joined(tensors, config)
    torch_name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    stated = {**hf_config(config, weights.parameters.keys()), "torch_dtype": torch_name}
    try:
        with unfinished(path, is_directory=True) as folder:
            for name, contents in {"config.json": stated, **text}.items():
                is_text = isinstance(contents, str)
                written = contents if is_text else json.dumps(contents, ensure_ascii=False, indent=2)
                write_text(folder / name, str(written))
            write_safetensors(folder / SINGLE_NAME, tensors)
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror}", path=path) from None
