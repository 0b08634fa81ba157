"""Models with an adapter in their weights: W + scale * B A in place of W, one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.convert import Conversion, Step
from kukri.formats.gguf.tensor_names import gguf_name, hf_name
from kukri.formats.huggingface.safetensors import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsFile,
    open_files,
    write_safetensors,
)
from kukri.formats.huggingface.weights import canonical_name, model_prefix
from kukri.formats.tensor_forms import Form, gguf_form, hf_form, inverse, taken
from kukri.formats.unfinished import unfinished
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import LowRank
from kukri.models import ARCHITECTURES, Adapter
from kukri.models.weights import of_experts
from kukri.quant.blocks import ByteArray, FloatArray, dequantize
from kukri.quant.types import QUANT_TYPES

_F32 = QUANT_TYPES["F32"]


def with_adapter(conversion: Conversion, adapter: Adapter) -> Conversion:
    """The conversion of the merged model; tensors that the adapter changes keep their types."""
    config = conversion.config
    updates: dict[str, list[tuple[str, int, LowRank]]] = {}  # by GGUF's name: with the number of the expert
    for name, update in adapter.updates.items():
        whole, expert = of_experts(name)
        updates.setdefault(gguf_name(whole, config.architecture), []).append((name, expert, update))
    # a tied head that changes is a matrix of its own: the embedding stays
    embedding = gguf_name(f"{ARCHITECTURES[config.architecture].embedding}.weight", config.architecture)
    head = gguf_name("lm_head.weight", config.architecture)
    of_head = updates.pop(embedding, None)
    heads: list[Step] = []
    if of_head is not None:
        updates[head] = of_head
        if all(step.name != head for step in conversion.steps):
            heads = [replace(step, name=head) for step in conversion.steps if step.name == embedding]

    def merged(step: Step) -> Step:
        if step.name not in updates:
            return step

        def read() -> ByteArray:
            n_out = step.shape[-2]
            model_name = hf_name(step.name, config.architecture)
            rows = np.array(dequantize(step.read(), step.source))
            for _, expert, update in updates[step.name]:
                form = gguf_form(model_name, config, n_out)
                _add(rows[expert * n_out : (expert + 1) * n_out], update, form)
            return rows.view(np.uint8)

        return replace(step, source=_F32, read=read)

    steps = (*map(merged, conversion.steps), *map(merged, heads))
    assert updates.keys() <= {step.name for step in steps}, "the adapter was checked against the model"
    return replace(conversion, steps=steps)


def write_merged_directory(
    source: Path, target: Path, config: ModelConfig, adapter: Adapter, on_tensor: Callable[[str], None]
) -> None:
    """Writes a safetensors directory with the adapter merged, its other files copied; complete or not at all.

    Tensors keep their names and types. `on_tensor` is called before each that changes. Raises
    UnsupportedError if the adapter changes a part of a tensor.
    """
    files = open_files(source)
    architecture = ARCHITECTURES[config.architecture]
    prefix = model_prefix(files, architecture)

    def maker(name: str, file: SafetensorsFile) -> Callable[[], ByteArray]:
        tensor, canonical = file.tensors[name], canonical_name(name, prefix, architecture)
        update = adapter.updates.get(canonical)
        if update is None:
            return lambda: file.data(tensor)
        form = hf_form(canonical, config, tensor.shape[0])

        def make() -> ByteArray:
            on_tensor(name)
            kind = QUANT_TYPES[tensor.dtype]
            rows = np.array(dequantize(file.data(tensor).reshape(tensor.shape[0], -1), kind))
            _add(rows, update, form)
            return requantize(rows.view(np.uint8), _F32, kind, tensor=name)

        return make

    if f"{architecture.embedding}.weight" in adapter.updates:
        raise UnsupportedError(
            f"{source}: an update of the tied head is not supported in a directory, whose embedding it would "
            "change: merge into a .gguf file"
        )
    stored_names = {canonical_name(name, prefix, architecture) for name in files}
    lost = next((name for name in adapter.updates if name not in stored_names), None)
    if lost is not None:
        raise UnsupportedError(
            f"{source} cannot be merged into a directory, where {lost} is within another tensor: merge "
            "into a .gguf file"
        )
    tensors = {}
    for name, file in files.items():
        stored = file.tensors[name]
        tensors[name] = (stored.dtype, stored.shape, maker(name, file))
    try:
        with unfinished(target, is_directory=True) as folder:
            for other in source.iterdir():
                if other.is_file() and other.suffix != ".safetensors" and other.name != INDEX_NAME:
                    shutil.copy(other, folder / other.name)
            write_safetensors(folder / SINGLE_NAME, tensors)
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror}", path=target) from None


def _add(matrix: FloatArray, update: LowRank, form: Form) -> None:
    """Add scale * B A to W in place, a matrix in the form that a file has it in."""
    down, up = (dequantize(w.data, w.type).astype(np.float64) for w in (update.down, update.up))
    down = taken(down, None, inverse(form.columns))
    rows: slice | npt.NDArray[np.int64] = slice(None) if form.rows is None else form.rows
    added, store = update.scale * (up @ down), form.transform.store
    matrix[rows] += (added if store is None else store(added)).astype(np.float32)
