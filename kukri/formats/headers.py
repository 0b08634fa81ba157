"""The headers of a model's files, without its weights: quick and small on files of any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from kukri.config import ModelConfig
from kukri.dataclass import dataclass
from kukri.errors import FormatError, KukriError, UnsupportedError, reading
from kukri.formats.gguf.config import model_config, unknown_keys
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.rope_keys import ROPE_TENSORS
from kukri.formats.huggingface.config import check_biases, text_config, unknown_config_keys
from kukri.formats.huggingface.directory import directory_config
from kukri.formats.huggingface.safetensors import DTYPE_BYTES, open_files
from kukri.formats.huggingface.ternary import PER_BYTE
from kukri.formats.huggingface.weights import follows_from_config, is_of_images
from kukri.formats.json_files import read_json
from kukri.kernels.cache import CacheLayout
from kukri.models import cache_layout


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file holds it, under the file's name; `offset` is in bytes from that file's start."""

    name: str
    type: str
    bits_per_weight: float
    shape: tuple[int, ...]
    n_bytes: int
    file: str
    offset: int

    @property
    def is_of_experts(self) -> bool:
        """True for a matrix, or bias, of a mixture's experts: a token reads the matrices of a few."""
        return "_exps." in self.name or ".experts." in self.name

    @property
    def n_parameters(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Headers:
    """A model without its weights.

    `tensors` are its parameters; `buffers` what files hold besides them: RoPE's factors and frequencies,
    masks, the copy of a tied head. `config` is None for a model that kukri cannot run, `problem` then says
    why. `stated` is a GGUF file's metadata, arrays as their lengths, or the contents of config.json;
    `unknown` are its keys for the model that kukri leaves out because it does not know them.
    """

    path: Path
    form: str
    files: tuple[Path, ...]
    tensors: tuple[StoredTensor, ...]
    buffers: tuple[StoredTensor, ...]
    config: ModelConfig | None
    problem: KukriError | None
    stated: dict[str, Any]
    unknown: tuple[str, ...] = ()

    @cached_property
    def cache_layout(self) -> CacheLayout:
        """What each layer keeps in the cache, of a model with a config. Raises as `models.cache_layout`."""
        assert self.config is not None
        return cache_layout(self.config, self.n_parameters)

    @property
    def n_parameters(self) -> int:
        """Numbers in the model; tied embeddings count once."""
        return sum(tensor.n_parameters for tensor in self.tensors)

    @property
    def n_active_parameters(self) -> int:
        """Parameters that a token is computed with: of a mixture's experts, the share that it uses."""
        return self.n_parameters - self.unused(lambda tensor: tensor.n_parameters)

    def unused(self, size: Callable[[StoredTensor], int]) -> int:
        """The sum of `size` over experts, but for the share that a token uses."""
        mixture = self.config.mixture if self.config else None
        if mixture is None:
            return 0
        of_experts = sum(size(tensor) for tensor in self.tensors if tensor.is_of_experts)
        return of_experts // mixture.n_experts * (mixture.n_experts - mixture.n_used)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files with weights."""
        return sum(file.stat().st_size for file in self.files)


def read_headers(path: Path) -> Headers:
    """The headers of a GGUF model or of a safetensors directory. Raises FormatError for a broken one."""
    with reading(path):
        return _of_directory(path) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> Headers:
    with GGUFFile(path) as gguf:
        tensors: list[StoredTensor] = []
        buffers: list[StoredTensor] = []
        for tensor in gguf.tensors.values():
            kind, file = tensor.type, gguf.file_of(tensor.name).name
            stored = StoredTensor(
                tensor.name,
                kind.name,
                kind.bits_per_weight,
                tensor.shape,
                tensor.n_bytes,
                file,
                tensor.offset,
            )
            (buffers if tensor.name in ROPE_TENSORS else tensors).append(stored)
        config, problem, unknown = None, None, list[str]()
        try:
            unknown = unknown_keys(gguf)
            config = model_config(gguf)
        except UnsupportedError as error:
            problem = error
        stated = {key: _value(gguf, key) for key in gguf.metadata}
        form = f"GGUF version {gguf.version}"
        parts = (tuple(tensors), tuple(buffers), config, problem, stated, tuple(unknown))
        return Headers(path, form, gguf.files, *parts)


def _value(gguf: GGUFFile, key: str) -> Any:
    """A metadata value; of an array just its length."""
    n_items = gguf.metadata.n_items(key)
    if n_items is not None:
        return f"array of {n_items}"
    try:
        return gguf.metadata[key]
    except FormatError:
        return "unreadable"


def _of_directory(path: Path) -> Headers:
    stated, config = text_config(read_json(path / "config.json")), None
    problem: KukriError | None = None
    unknown: list[str] = []
    try:
        unknown = unknown_config_keys(stated, path / "config.json")
        config = directory_config(path, stated)
    except UnsupportedError as error:
        problem = error
    tied = config is not None and config.tie_embeddings
    files = open_files(path)
    tensors: list[StoredTensor] = []
    buffers: list[StoredTensor] = []
    for name, file in files.items():
        tensor = file.tensors[name]
        bits, shape = 8.0 * DTYPE_BYTES[tensor.dtype], tensor.shape
        if tensor.dtype == "U8" and f"{name}_scale" in files:  # rows of ternary weights
            bits, shape = bits / PER_BYTE, (shape[0] * PER_BYTE, *shape[1:])
        stored = StoredTensor(name, tensor.dtype, bits, shape, tensor.n_bytes, file.path.name, tensor.offset)
        (buffers if follows_from_config(name, tied) or is_of_images(name) else tensors).append(stored)
    if config is not None:
        try:
            check_biases(stated, [stored.name for stored in tensors], path)
        except FormatError as error:
            problem = error
    used = tuple(sorted({file.path for file in files.values()}))
    parts = (tuple(tensors), tuple(buffers), config, problem, stated, tuple(unknown))
    return Headers(path, "safetensors", used, *parts)
