"""Models of one format or type as files of another, one tensor in memory at a time.

A conversion is planned first: every tensor's name, shape and types are known, and what cannot be is refused,
before anything is written. The file appears under its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.dataclass import dataclass, field, replace
from kukri.errors import ConfigError, FormatError, UnsupportedError
from kukri.formats.gguf.config import model_config, model_metadata
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.rope_keys import rope_tensors
from kukri.formats.gguf.tensor_names import gguf_name, hf_name
from kukri.formats.gguf.writer import TensorSource, write_gguf
from kukri.formats.head_matrices import joined_heads, joined_shape
from kukri.formats.imatrix import ImportanceMatrix
from kukri.formats.tensor_forms import gguf_form, inverse, row_factors, row_of, taken
from kukri.host.mapped_files import release_pages
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import ARCHITECTURES, load_model
from kukri.models.llama import Llama
from kukri.models.next_token import has_next_token_layer, take_next_token_layer
from kukri.models.weights import TakenWeights, WeightSource
from kukri.quant.blocks import ByteArray, FloatArray, dequantize
from kukri.quant.mixes import MIXES, file_type
from kukri.quant.per_token import ACTIVATIONS_KEY, PER_TOKEN
from kukri.quant.recipes import Recipe, apply_recipe
from kukri.quant.types import QUANT_TYPES, QuantType

_F32 = QUANT_TYPES["F32"]


@dataclass(frozen=True)
class Step:
    """The conversion of one tensor. `read` gives its rows in the source's type, uint8 [rows, row_bytes]."""

    name: str  # GGUF's
    shape: tuple[int, ...]
    source: QuantType
    target: QuantType
    read: Callable[[], ByteArray]
    hf_name: str = ""  # Hugging Face's, "" without one
    importance: FloatArray | None = field(default=None, compare=False)  # one per column

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * self.target.row_bytes(self.shape[-1])

    @property
    def source_bytes(self) -> int:
        """Size in the source file."""
        return prod(self.shape[:-1]) * self.source.row_bytes(self.shape[-1])

    def make(self) -> ByteArray:
        """Requantizes the tensor, then evicts its source pages."""
        rows = self.read()
        made = requantize(rows, self.source, self.target, self.importance, tensor=self.name)
        if made is not rows:
            release_pages(rows)
        return made


@dataclass(frozen=True)
class Conversion:
    """A plan: the keys and tensors of the file to be, and the configuration of its model."""

    config: ModelConfig
    metadata: Mapping[str, Any]
    steps: tuple[Step, ...]


@contextmanager
def open_gguf(path: Path) -> Iterator[Conversion]:
    """The tensors of a GGUF file as they are, open within the `with` block.

    Raises UnsupportedError for a tensor of a type that kukri does not read, and what opening the file raises.
    """
    with GGUFFile(path) as file:
        for name in file.tensors:
            file.readable(name)
        config = model_config(file)
        steps = (
            Step(
                name,
                tensor.shape,
                tensor.type,
                tensor.type,
                _reader(file, name),
                _hf_name(name, config.architecture),
            )
            for name, tensor in file.tensors.items()
        )
        metadata = {key: file.metadata[key] for key in file.metadata if not key.startswith("split.")}
        yield Conversion(config, metadata, tuple(steps))


def _reader(file: GGUFFile, name: str) -> Callable[[], ByteArray]:
    return lambda: file.data(name)


def _hf_name(name: str, architecture: str) -> str:
    try:
        return hf_name(name, architecture)
    except UnsupportedError:
        return ""


def of_directory(
    path: Path,
    config: ModelConfig,
    source: WeightSource,
    text: Mapping[str, Any],
    others: Mapping[str, FloatArray],
) -> Conversion:
    """The tensors of a safetensors directory as they are, named as in GGUF: those that its model takes.

    `source` has the directory's weights, and `text` its tokenizer's keys. `others` are tensors from
    elsewhere, by GGUF's names. Raises UnsupportedError for tensors and configurations that GGUF has no name
    for, and what `load_model` raises.
    """
    architecture = ARCHITECTURES[config.architecture]
    if not architecture.in_gguf:
        raise UnsupportedError(
            f"{path}: {architecture.name} is not supported in GGUF, where no other program would read it: "
            "pack weights while loading, with --quantize"
        )
    weights = TakenWeights(source)
    model = load_model(weights, config)
    has_next_token = bool(architecture.next_token) and has_next_token_layer(weights, config)
    if has_next_token:
        assert isinstance(model, Llama), "the architecture has such layers"
        take_next_token_layer(weights, model)
    for name in [*weights.stacks]:
        joined = joined_heads(name)
        if joined and "self_attn.k_b_proj" not in architecture.tensor_names:  # GGUF has both in one tensor
            weights.matrix(joined, joined_shape(config))
            del weights.stacks[name]
    steps = [_of_array(name, values) for name, values in {**rope_tensors(config), **others}.items()]
    lists: dict[str, list[FloatArray]] = {}  # numbers of each layer that are a key in GGUF
    for name, values in weights.vectors.items():
        if key := row_of(name, architecture.name).gguf_key:
            lists.setdefault(key, []).append(values)
        else:
            numbers = values.view(np.uint8).reshape(len(values), -1)
            steps.append(_of_tensor(config, name, values.shape, _F32, partial(taken, numbers, None)))
    for name, weight in weights.matrices.items():
        steps.append(_of_matrix(config, name, weight))
        if name == f"{architecture.embedding}.weight" and _is_head_multiplied(config):
            steps.append(_of_matrix(config, "lm_head.weight", weight))
    for name, biases in weights.stacked_vectors.items():
        steps.append(_of_array(gguf_name(name, config.architecture), biases))
    steps += _of_stacks(config, weights.stacks)
    steps.sort(key=_place)
    listed = {key: np.concatenate(numbers) for key, numbers in lists.items()}
    metadata = {**model_metadata(config, has_next_token=has_next_token), **text, **listed}
    return Conversion(config, metadata, tuple(steps))


def _of_matrix(config: ModelConfig, name: str, weight: Weight) -> Step:
    return _of_tensor(config, name, weight.shape, weight.type, lambda: weight.data)


def _of_tensor(
    config: ModelConfig, name: str, shape: tuple[int, ...], type: QuantType, read: Callable[[], ByteArray]
) -> Step:
    """Return the step of a matrix or vector, whose rows `read` gives: uint8 [rows, bytes of a row]."""
    form, row = gguf_form(name, config, shape[0]), row_of(name, config.architecture)
    stored_name, store = gguf_name(name, config.architecture), form.transform.store
    stored_shape = form.transform.store_shape(shape, config.recurrent)
    target = _F32 if len(shape) == 1 or row.is_small else type

    def stored() -> ByteArray:
        rows: ByteArray = taken(read(), inverse(form.rows))
        numbers = taken(rows.view(f"u{type.block_bytes}"), None, inverse(form.columns))
        rows = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(rows) if len(shape) > 1 else 1, -1)
        return rows if store is None else store(dequantize(rows, type)).view(np.uint8)

    return Step(stored_name, stored_shape, type if store is None else _F32, target, stored, name)


def _is_head_multiplied(config: ModelConfig) -> bool:
    """True if GGUF files need a head of their own: the embedding, multiplied by another factor."""
    architecture = ARCHITECTURES[config.architecture]
    names = (f"{architecture.embedding}.weight", "lm_head.weight")
    return config.tie_embeddings and len({row_factors(config, name) for name in names}) > 1


def _of_array(name: str, values: FloatArray) -> Step:
    """The step of float32 numbers that stay so."""
    rows = values.reshape(-1, values.shape[-1]).view(np.uint8)
    return Step(name, values.shape, _F32, _F32, lambda: rows)


def _of_stacks(config: ModelConfig, stacks: Mapping[str, Experts]) -> Iterator[Step]:
    """The steps of experts and of heads' matrices, each the matrices of all of a layer."""
    keys = ARCHITECTURES[config.architecture].experts
    for name, stack in stacks.items():
        parts, stored = [stack], name
        if keys is not None and keys.gguf_fused and ".gate_proj." in name:
            parts.append(stacks[name.replace(".gate_proj.", ".up_proj.")])
            stored = name.replace(".gate_proj.", ".gate_up_proj.")
        elif keys is not None and keys.gguf_fused and ".up_proj." in name:
            continue  # gate's tensor has it
        shape, type = (len(stack.weights), sum(p.shape[1] for p in parts), stack.shape[2]), stack.type

        def read(parts: list[Experts] = parts) -> ByteArray:
            return np.concatenate([w.data for of_one in zip(*(p.weights for p in parts)) for w in of_one])

        yield Step(gguf_name(stored, config.architecture), shape, type, type, read, stored)


def _place(step: Step) -> tuple[int, str]:
    """Layers in order, after the tensors outside them."""
    first, _, rest = step.name.partition(".")
    return (int(rest.partition(".")[0]) if first == "blk" else -1, step.name)


def with_recipe(conversion: Conversion, recipe: Recipe) -> Conversion:
    """The conversion with the recipe's types and names. Raises ConfigError for a recipe that does not fit."""
    config, steps = conversion.config, conversion.steps
    types, renames = apply_recipe(
        recipe,
        {step.name: step.shape for step in steps},
        config.n_heads // config.n_kv_heads,
        {step.name: step.hf_name for step in steps},
    )
    changed = tuple(
        replace(step, name=renames.get(step.name, step.name), target=types.get(step.name, step.target))
        for step in steps
    )
    stated: dict[str, Any] = {
        **conversion.metadata,
        "general.quantization_version": 2,
        "general.file_type": MIXES[recipe.base][1] if recipe.base else _file_type(changed),
    }
    if recipe.base or recipe.per_token:
        stated[ACTIVATIONS_KEY] = PER_TOKEN if recipe.per_token else None
    metadata = {key: value for key, value in stated.items() if value is not None}
    return replace(conversion, metadata=metadata, steps=changed)


def _file_type(steps: Iterable[Step]) -> int | None:
    return file_type({s.name: s.target for s in steps}, {s.name: s.shape for s in steps})


def with_importance(conversion: Conversion, matrix: ImportanceMatrix, path: Path) -> Conversion:
    """The conversion with the columns' importances, as the file says, which is `matrix` in the file `path`.

    Raises ConfigError for the matrix of another model.
    """
    steps = tuple(
        replace(step, importance=matrix.importance(step.name, step.shape[-1])) for step in conversion.steps
    )
    n_entries = sum(step.importance is not None for step in steps)
    if not n_entries:
        raise ConfigError(f"{path} must have importances for this model: it was made with another")
    metadata = {
        **conversion.metadata,
        "quantize.imatrix.file": path.name,
        "quantize.imatrix.dataset": ", ".join(matrix.datasets),
        "quantize.imatrix.entries_count": np.int32(n_entries),
        "quantize.imatrix.chunks_count": np.int32(min(matrix.n_chunks, 2**31 - 1)),
    }
    return replace(conversion, metadata=metadata, steps=steps)


def weighed(steps: Iterable[Step]) -> list[Step]:
    """The steps whose errors an importance matrix is to weigh: layers' matrices that are quantized."""
    quantized = [
        s for s in steps if s.target.block_size > 1 and s.target not in (s.source, QUANT_TYPES["Q8_0"])
    ]
    return [s for s in quantized if s.name.startswith("blk.")]  # Q8_0 rounds alike without


def write(conversion: Conversion, path: Path, on_tensor: Callable[[Step], None]) -> None:
    """Writes the file; it appears under `path` complete or not at all.

    `on_tensor` is called before each tensor. Raises FormatError for weights that cannot be converted and
    when the file cannot be written.
    """

    def maker(step: Step) -> Callable[[], ByteArray]:
        def make() -> ByteArray:
            on_tensor(step)
            return step.make()

        return make

    tensors: dict[str, TensorSource] = {}
    for step in conversion.steps:
        if step.name in tensors:
            raise FormatError("appears twice", path=path, tensor=step.name)
        tensors[step.name] = (step.target, maker(step), step.shape)
    write_gguf(path, conversion.metadata, tensors)


def requantized(steps: Iterable[Step]) -> list[Step]:
    """The steps whose tensors lose a second time: from one quantized type to another."""
    return [s for s in steps if min(s.source.block_size, s.target.block_size) > 1 and s.target != s.source]
