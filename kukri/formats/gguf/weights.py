"""The `WeightSource` of a GGUF file."""

from __future__ import annotations

import re
from math import prod

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import FormatError, UnsupportedError, UnusedTensorError, brief, brief_list
from kukri.formats.gguf.config import activations_per_token, architecture_of
from kukri.formats.gguf.reader import GGUFFile, GGUFTensor
from kukri.formats.gguf.rope_keys import ROPE_TENSORS
from kukri.formats.gguf.tensor_names import gguf_name, module_name
from kukri.formats.head_matrices import joined_heads, joined_shape, take_part
from kukri.formats.tensor_forms import gguf_form, row_of
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import Architecture
from kukri.models.keys import Keys
from kukri.models.next_token import is_after_last
from kukri.models.weights import WeightSource, expert_name

_BIAS = re.compile(r"blk\.\d+\.(?P<module>\w+)\.(?P<kind>weight|bias)")


class GGUFWeights(WeightSource):
    """The `WeightSource` of a GGUF file. Matrices are views of the mapped file, but for permuted ones.

    RoPE's factors (`rope_freqs.weight` and others) belong to the configuration: `model_config` takes them.
    """

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        self.path, self._gguf, self._config = gguf.path, gguf, config
        self._taken = set(ROPE_TENSORS) if config.rope.scaling is not None else set[str]()
        self._architecture = architecture_of(gguf)
        if self._architecture.n_dense:
            self._taken |= {name for name in gguf.tensors if re.fullmatch(r"dense_[23]\.weight", name)}
        self._per_token = activations_per_token(gguf)
        _check_biases(gguf, self._architecture)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        tensor = self._take(name, shape)
        data = self._gguf.data(tensor.name)
        order = gguf_form(name, self._config, shape[0]).rows
        return Weight(data, tensor.type, shape, name, self._per_token, order)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        n, n_out, n_in = shape
        if (joined := joined_heads(name)) and self.has(joined):
            tensor = self._take(joined, joined_shape(self._config))
            rows, kind = take_part(self._gguf.data(tensor.name), tensor.type, name, self._config)
            return Experts(tuple(Weight(each, kind, (n_out, n_in), name) for each in rows), name)
        part, fused = self._part_of_fused(name)
        if fused:  # gate's rows, then up's
            tensor = self._take(fused, (n, 2 * n_out, n_in))
            rows = self._gguf.data(tensor.name).reshape(n, 2 * n_out, -1)[:, part * n_out :][:, :n_out]
        else:
            tensor = self._take(name, shape)
            rows = self._gguf.data(tensor.name).reshape(n, n_out, -1)
        parts = (
            Weight(data, tensor.type, (n_out, n_in), expert_name(name, i), self._per_token)
            for i, data in enumerate(rows)
        )
        return Experts(tuple(parts), name)

    def _part_of_fused(self, name: str) -> tuple[int, str]:
        """Which part of a tensor with experts' gates and ups it is, and that tensor's name; "" if none is."""
        stem, _, module = name.rpartition(".experts.")
        parts = ("gate_proj.weight", "up_proj.weight")
        fused = f"{stem}.experts.gate_up_proj.weight"
        is_part = module in parts and not self.has(name)
        return (parts.index(module), fused) if is_part and self.has(fused) else (0, "")

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        return self._gguf.array(self._take(name, shape).name)

    def vector(self, name: str, size: int) -> FloatArray:
        if key := row_of(name, self._architecture.name).gguf_key:
            return self._listed(key, int(name.split(".")[2]))
        values = self._gguf.array(self._take(name, (size,)).name).reshape(size)
        order = gguf_form(name, self._config, size).rows
        return values if order is None else values[order]

    def _listed(self, key: str, layer: int) -> FloatArray:
        """The number of a layer in the list of a key [1]."""
        stated = Keys(self._gguf.metadata, self.path).first(key, float, self._config.n_layers)
        if not np.isfinite(stated).all():
            raise FormatError(f"key {key!r} must hold finite numbers", path=self.path)
        return np.array(stated[layer : layer + 1], np.float32)

    def has(self, name: str) -> bool:
        try:
            return gguf_name(name, self._architecture.name) in self._gguf.tensors
        except UnsupportedError:  # a tensor for which GGUF has no name
            return False

    def done(self) -> None:
        unused = [
            name
            for name in self._gguf.tensors
            if name not in self._taken
            and not (self._architecture.next_token and is_after_last(name, self._config.n_layers))
        ]
        if unused:
            message = f"holds tensors that no layer of {self._config.architecture} takes: "
            raise UnusedTensorError(message + brief_list([*map(brief, unused)]), path=self._gguf.path)

    def _take(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        stored_name = gguf_name(name, self._architecture.name)
        tensor = self._gguf.readable(stored_name)
        # a vector may be a column, or one row
        is_vector = len(shape) == 1 and prod(tensor.shape) == max(tensor.shape)
        stored = (prod(tensor.shape),) if is_vector else tensor.shape
        transform = gguf_form(name, self._config).transform
        if stored not in (shape, transform.store_shape(shape, self._config.recurrent)):
            message = f"has shape {tensor.shape} where the configuration asks for {shape}"
            path = self._gguf.file_of(stored_name)
            raise FormatError(message, path=path, offset=tensor.offset, tensor=stored_name)
        self._taken.add(stored_name)
        return tensor


def _check_biases(gguf: GGUFFile, architecture: Architecture) -> None:
    """Raises FormatError if a layer lacks a bias that its architecture, or another layer, has."""
    matches = {name: _BIAS.fullmatch(name) for name in gguf.tensors}
    some = {match["module"]: name for name, match in matches.items() if match and match["kind"] == "bias"}
    for name, match in matches.items():
        if match is None or match["kind"] == "bias":
            continue
        stored, bias = match["module"], name.removesuffix("weight") + "bias"
        always = architecture.bias_rule(module_name(stored, architecture.name) or "") is True
        if bias not in gguf.tensors and (always or stored in some):
            reason = "this architecture has it" if always else f"{brief(some[stored])} is there"
            raise FormatError(f"is missing, but {reason}", path=gguf.path, tensor=bias)
