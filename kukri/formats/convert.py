"""Models of one format or type as files of another, one tensor in memory at a time.

A conversion is planned first: every tensor's name, shape and types are known, and what cannot be is refused,
before anything is written. The file appears under its name when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import ConfigError, FormatError, UnsupportedError
from kukri.formats.gguf.config import model_config, model_metadata
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.rope_keys import rope_tensors
from kukri.formats.gguf.tensor_names import gguf_name, hf_name
from kukri.formats.gguf.writer import TensorSource, write_gguf
from kukri.formats.head_matrices import head_shape, joined_heads, parts_of_heads
from kukri.formats.huggingface.safetensors import SafetensorsFile, open_files
from kukri.formats.huggingface.weights import (
    SafetensorsWeights,
    canonical_name,
    expert_tensors,
    first_row,
    follows_from_config,
    is_of_images,
    model_prefix,
    of_next_token,
    parts_of,
)
from kukri.formats.imatrix import ImportanceMatrix
from kukri.formats.tensor_forms import gguf_form, hf_form, inverse, row_factors, row_of, table, taken
from kukri.host.mapped_files import release_pages
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts
from kukri.models import ARCHITECTURES
from kukri.models.next_token import is_after_last
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
    path: Path, config: ModelConfig, text: Mapping[str, Any], others: Mapping[str, FloatArray]
) -> Conversion:
    """The tensors of a safetensors directory as they are, named as in GGUF; `text` are its tokenizer's keys.

    `others` are tensors from elsewhere, by GGUF's names.

    Raises UnsupportedError for tensors and configurations that GGUF has no name for.
    """
    architecture = ARCHITECTURES[config.architecture]
    if not architecture.in_gguf:
        raise UnsupportedError(
            f"{path}: {architecture.name} is not supported in GGUF, where no other program would read it: "
            "pack weights while loading, with --quantize"
        )
    steps = [_of_array(name, values) for name, values in {**rope_tensors(config), **others}.items()]
    files = open_files(path)
    prefix = model_prefix(files, architecture)
    stacks: dict[str, None] = {}
    has_next_token = False
    for name, file in files.items():
        canonical = of_next_token(canonical_name(name, prefix, architecture), config.n_layers)
        has_next_token |= architecture.next_token != "" and is_after_last(canonical, config.n_layers)
        is_unused = config.head.kind == "none" and re.fullmatch(architecture.unused, canonical)
        if follows_from_config(name, config.tie_embeddings) or is_unused or is_of_images(name):
            continue
        if row_of(canonical, architecture.name).gguf_key:
            continue
        if "self_attn.k_b_proj" in architecture.tensor_names and (heads := parts_of_heads(canonical)):
            stacks |= dict.fromkeys(heads)
            continue
        parts = parts_of(canonical, architecture)
        if experts := [stack for part in parts for stack in expert_tensors(part)]:
            stacks |= dict.fromkeys(experts)
            continue
        for i, part in enumerate(parts):
            stored_name = gguf_name(part, config.architecture)
            steps.append(_of_safetensors(config, file, name, stored_name, i, len(parts)))
        if canonical == f"{architecture.embedding}.weight" and _is_head_multiplied(config):
            head = gguf_name("lm_head.weight", config.architecture)
            steps.append(_of_safetensors(config, file, name, head, 0, 1))
    steps += _of_experts(path, config, stacks)
    steps.sort(key=_place)
    metadata = {**model_metadata(config, has_next_token=has_next_token), **text, **_lists(path, config)}
    return Conversion(config, metadata, tuple(steps))


def _lists(path: Path, config: ModelConfig) -> dict[str, FloatArray]:
    """The keys that list a number of each layer which is a tensor in the directory."""
    source = SafetensorsWeights(path, config)
    return {
        row.gguf_key: np.concatenate(
            [source.vector(f"model.layers.{i}.{module}.weight", 1) for i in range(config.n_layers)]
        )
        for module, row in table(config.architecture).items()
        if row.gguf_key
    }


def _of_safetensors(
    config: ModelConfig, file: SafetensorsFile, name: str, stored_name: str, part: int, n_parts: int
) -> Step:
    """Return the step of part `part` of the `n_parts` equal parts of a tensor."""
    tensor = file.tensors[name]
    if tensor.dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedError(
            f"{file.path}: tensor {name!r} must be of type F32, F16 or BF16, not {tensor.dtype}"
        )
    type, first = QUANT_TYPES[tensor.dtype], first_row(name, ARCHITECTURES[config.architecture])
    n_rows = (tensor.shape[0] - first) // n_parts
    model_name = hf_name(stored_name, config.architecture)
    hf, gguf = (form(model_name, config, n_rows) for form in (hf_form, gguf_form))
    shape = hf.transform.load_shape((n_rows, *tensor.shape[1:]))
    load, store = hf.transform.load, gguf.transform.store

    def read() -> ByteArray:
        rows: ByteArray = file.data(tensor).reshape(first + n_parts * n_rows, -1)
        rows = taken(taken(rows[first + part * n_rows :][:n_rows], hf.rows), inverse(gguf.rows))
        numbers = taken(rows.view(f"u{type.block_bytes}"), None, inverse(gguf.columns))
        return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(rows) if len(shape) > 1 else 1, -1)

    def read_changed() -> ByteArray:
        values = dequantize(read(), type)
        values = values if load is None else load(values)
        return (values if store is None else store(values)).view(np.uint8)

    is_small = len(shape) == 1 or row_of(model_name, config.architecture).is_small
    target, stored_shape = _F32 if is_small else type, gguf.transform.store_shape(shape, config.recurrent)
    if load is not None or store is not None:
        return Step(stored_name, stored_shape, _F32, target, read_changed, name)
    return Step(stored_name, stored_shape, type, target, read, name)


def _is_head_multiplied(config: ModelConfig) -> bool:
    """True if GGUF files need a head of their own: the embedding, multiplied by another factor."""
    architecture = ARCHITECTURES[config.architecture]
    names = (f"{architecture.embedding}.weight", "lm_head.weight")
    return config.tie_embeddings and len({row_factors(config, name) for name in names}) > 1


def _of_array(name: str, values: FloatArray) -> Step:
    """The step of float32 numbers that stay so."""
    rows = values.reshape(-1, values.shape[-1]).view(np.uint8)
    return Step(name, values.shape, _F32, _F32, lambda: rows)


def _of_experts(path: Path, config: ModelConfig, names: Iterable[str]) -> Iterator[Step]:
    """The steps of experts, each the matrices of all of a layer."""
    source, keys = SafetensorsWeights(path, config), ARCHITECTURES[config.architecture].experts
    for name in names:
        if joined_heads(name):
            yield _of_stack(name, config, source.experts(name, head_shape(name, config)))
            continue
        assert config.mixture is not None, "its tensors were taken"
        assert keys is not None, "a mixture has keys"
        shape = (config.mixture.d_ffn, config.d_model)
        if ".down_proj." in name:
            shape = (config.d_model, config.mixture.d_ffn)
        if name.endswith(".bias"):
            biases = source.expert_vectors(name, (config.mixture.n_experts, shape[0]))
            yield _of_array(gguf_name(name, config.architecture), biases)
            continue
        parts = [name]
        if keys.gguf_fused and ".down_proj." not in name:
            if ".up_proj." in name:
                continue  # gate's tensor has it
            parts.append(name.replace(".gate_proj.", ".up_proj."))
            name = name.replace(".gate_proj.", ".gate_up_proj.")
        n = config.mixture.n_experts
        stacks = [source.experts(part, (n, *shape)) for part in parts]

        def read(stacks: list[Experts] = stacks) -> ByteArray:
            return np.concatenate(
                [w.data for of_one in zip(*(each.weights for each in stacks)) for w in of_one]
            )

        stored_name, type = gguf_name(name, config.architecture), stacks[0].type
        yield Step(stored_name, (n, len(stacks) * shape[0], shape[1]), type, type, read, name)


def _of_stack(name: str, config: ModelConfig, stack: Experts) -> Step:
    """The step of matrices that are one tensor."""
    stored_name, type = gguf_name(name, config.architecture), stack.type
    return Step(
        stored_name, stack.shape, type, type, lambda: np.concatenate([w.data for w in stack.weights]), name
    )


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
