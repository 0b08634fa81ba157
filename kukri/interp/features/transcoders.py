"""Transcoders: sparse features that take the place of each layer's MLP, per layer or across layers.

The encoder's product with the MLP's input says where a feature is active. There it writes its decoder's
direction to the output of its own layer's MLP, or of the MLPs of its own and all later layers (a cross-layer
transcoder). Matrices stay on their mapped files, in their stored type: an encoder is read when its layer is
encoded, and of a decoder only the rows of active features are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, FormatError, UnsupportedError, brief, reading
from kukri.formats.huggingface.safetensors import SafetensorsFile
from kukri.formats.json_files import read_json
from kukri.interp.features.feature_products import Product
from kukri.interp.features.readers import Choose, FeatureReader, as_floats, keep_largest, sparse_product
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend

_READS, _WRITES = "mlp.hook_in", "hook_mlp_out"
_LAYER = re.compile(r"layers?[_.-]?(\d{1,4})(?:\D|$)")
_BLOCK = re.compile(r"blocks\.(\d{1,4})\.")
_WEIGHTS = ("sae_weights.safetensors", "params.safetensors")  # SAELens' name, and Gemma Scope 2's
# names of one part in the files of circuit-tracer, SAELens and Gemma Scope 2
_PARTS = {
    "encoder": ("W_enc", "w_enc"),
    "decoder": ("W_dec", "w_dec"),
    "bias": ("b_enc",),
    "output_bias": ("b_dec",),
    "threshold": ("activation_function.threshold", "threshold"),
    "skip": ("W_skip", "affine_skip_connection"),
}
_KINDS = {"transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"}
_ACTIVATIONS = ("relu", "jumprelu", "topk")
_FOLDED = ("none", "expected_average_only_in")  # normalizations that are part of saved weights


class Active(NamedTuple):
    """The active features of a layer, by position, then number."""

    positions: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor on a mapped file or in memory, which is converted to float32 when it is read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any  # its bytes
    path: Path

    def read(self, rows: npt.NDArray[np.int64] | None = None) -> FloatArray:
        """All of it, or some rows. Raises FormatError on numbers that are not finite."""
        stored = self.data if rows is None else self.data.reshape(self.shape[0], -1)[rows]
        found = as_floats(stored.reshape(-1), self.dtype, self.path, self.name)
        return found.reshape(self.shape if rows is None else (len(rows), *self.shape[1:]))

    def read_columns(self, columns: npt.NDArray[np.int64]) -> FloatArray:
        """Some columns of a matrix, [rows, n]. Raises FormatError as `read` does."""
        stored = self.data.reshape(*self.shape, -1)[:, columns]
        found = as_floats(stored.reshape(-1), self.dtype, self.path, self.name)
        return found.reshape(self.shape[0], len(columns))


class Layer:
    """A layer's transcoder. `encoder` is [F, D], or [D, F] if it is transposed, `decoder` [F, D], or [F,
    layers, D]: the first `n_before` entries are earlier layers, to which it does not write, the others this
    layer and all later ones. `skip` is [D out, D in], or transposed.
    """

    def __init__(
        self,
        parts: Mapping[str, Stored],
        path: Path,
        k: int = 0,
        is_transposed: bool = False,
        has_transposed_skip: bool = False,
        n_before: int = 0,
    ) -> None:
        if missing := {"encoder", "decoder", "bias", "output_bias"} - parts.keys():
            names = ", ".join(_PARTS[one][0] for one in sorted(missing))
            raise FormatError(f"must hold {names}, as transcoders do", path=path)
        self._parts, self._k, self._n_before = parts, k, n_before
        self._multiply: Callable[[FloatArray], FloatArray] | None = None
        self._is_transposed, self._has_transposed_skip = is_transposed, has_transposed_skip
        (self.n_features,), (self.width,) = parts["bias"].shape, parts["output_bias"].shape[-1:]
        encoder, decoder = parts["encoder"].shape, parts["decoder"].shape
        n, d = self.n_features, self.width
        wanted = {"threshold": (n,), "skip": (d, d), "output_bias": (d,), "bias": (n,)}
        if (
            encoder != ((d, n) if is_transposed else (n, d))
            or len(decoder) not in (2, 3)
            or (decoder[0], decoder[-1]) != (n, d)
            or (len(decoder) == 3 and decoder[1] <= n_before)
        ):
            raise FormatError(
                f"W_enc {list(encoder)} and W_dec {list(decoder)} must fit {n} biases", path=path
            )
        for name in wanted.keys() & parts.keys():
            shape = tuple(s for s in parts[name].shape if s != 1 or wanted[name] == (1,))
            if shape != wanted[name]:
                raise FormatError(f"{_PARTS[name][0]} {list(shape)} must fit {n} features", path=path)
        if not 0 <= k <= n:
            raise FormatError(f"k must be from 0 to {n} features, not {k}", path=path)

    @property
    def n_written(self) -> int:
        """The number of layers to whose outputs its features write, from its own layer on."""
        shape = self._parts["decoder"].shape
        return shape[1] - self._n_before if len(shape) == 3 else 1

    def keep_encoder(self, backend: Backend | None = None) -> None:
        """Keep the encoder in memory for many products: in float32, or as stored for a backend's kernels."""
        if backend is not None and not isinstance(self._multiply, Product):
            self._multiply = Product(backend, self._read_encoder().T, self._parts["encoder"].dtype)
        elif self._multiply is None:
            self._multiply = self._read_encoder().__rmatmul__

    def _read_encoder(self) -> FloatArray:
        """[D, F]."""
        matrix = self._parts["encoder"].read()
        return matrix if self._is_transposed else matrix.T

    @cached_property
    def bias(self) -> FloatArray:
        """The bias of its layer's output, [D]."""
        return self._parts["output_bias"].read().reshape(-1)

    @cached_property
    def skip(self) -> FloatArray | None:
        """The linear part that has no features, [D out, D in], or None."""
        if "skip" not in self._parts:
            return None
        found = self._parts["skip"].read()
        return found.T if self._has_transposed_skip else found

    def features(self, x: FloatArray) -> FloatArray:
        """All features [pos, F] of inputs x [pos, D], inactive ones 0."""
        product = x @ self._read_encoder() if self._multiply is None else self._multiply(x)
        return self._activated(product + self._bias, self._threshold)

    def chooser(self, features: Sequence[int]) -> Choose:
        """See FeatureReader."""
        chosen = np.asarray(features)
        if self._k:
            return lambda x: self.features(x)[:, chosen]
        encoders, bias = self.encoders(chosen), self._bias[chosen]
        threshold = None if self._threshold is None else self._threshold[chosen]
        return lambda x: self._activated(np.stack([encoders @ row for row in x]) + bias, threshold)

    def _activated(self, found: FloatArray, threshold: FloatArray | None) -> FloatArray:
        if threshold is not None:
            found[found <= threshold] = 0
        if self._k:
            keep_largest(found, self._k)
        return np.maximum(found, 0, out=found)

    @cached_property
    def _bias(self) -> FloatArray:
        return self._parts["bias"].read()

    @cached_property
    def _threshold(self) -> FloatArray | None:
        return self._parts["threshold"].read().reshape(-1) if "threshold" in self._parts else None

    def encode(self, x: FloatArray) -> Active:
        """The active features of inputs x [pos, D]."""
        found = self.features(x)
        positions, features = np.nonzero(found)
        return Active(positions, features, found[positions, features])

    def reconstruct(self, x: FloatArray) -> FloatArray:
        """Return what replaces the MLPs' outputs, [layers, pos, D]: features, bias and skip of its own layer,
        and only its features in later layers.
        """
        found = sparse_product(self.features(x), self.decoders)
        found[0] += self.bias
        if self.skip is not None:
            found[0] += x @ self.skip.T
        return found

    def encoders(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The directions that features read, [n, D]."""
        encoder = self._parts["encoder"]
        if self._is_transposed:
            return np.ascontiguousarray(encoder.read_columns(features).T)
        return encoder.read(features)

    def biases(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The encoder's biases of features, [n]."""
        return self._bias[features]

    def decoders(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The directions that features write to each layer from theirs on, [n, layers, D]."""
        found = self._parts["decoder"].read(features)
        return found.reshape(len(features), self._n_before + self.n_written, self.width)[:, self._n_before :]


class Transcoders:
    """Transcoders of the layers of a model, or of some of them.

    Attributes: layers, by number; reads and writes, the hooks' short names; scan, who made them, for viewers.
    """

    def __init__(
        self,
        layers: Mapping[int, Layer] | Sequence[Layer],
        reads: str = _READS,
        writes: str = _WRITES,
        scan: str = "",
    ) -> None:
        found = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
        if not found:
            raise ConfigError("a set of transcoders requires at least one layer")
        self.layers = dict(sorted(found.items()))
        self.reads, self.writes, self.scan = reads, writes, scan
        first, end = next(iter(self.layers.values())), max(self.layers) + 1
        for i, layer in self.layers.items():
            if layer.width != first.width or (layer.n_written > 1 and layer.n_written < end - i):
                raise ConfigError(f"the transcoder of layer {i} must fit the others")
        self.reader = cache(self._reader)

    def _reader(self, layer: int) -> TranscoderReader:
        """Return the reader of a layer's features."""
        return TranscoderReader(self, layer)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], reads: str | None = None, writes: str | None = None
    ) -> Transcoders:
        """Read a directory of one of these forms, with layers counted from 0:

        - circuit-tracer's, per layer: layer_0.safetensors ...; or across layers: W_enc_0.safetensors and
          W_dec_0.safetensors ...
        - folders with a layer's number in their names, each as SAELens saves a transcoder (cfg.json and
          sae_weights.safetensors) or as Gemma Scope 2 does (config.json and params.safetensors), per layer or
          across layers; or one such folder.

        The hooks are `reads` and `writes`, or the hooks that config.json, config.yaml or cfg.json name, or
        "mlp.hook_in" and "hook_mlp_out". Raises FormatError and ConfigError.
        """
        with reading(path):
            folder = Path(path)
            found, facts = _find_layers(folder)
            given = reads or facts.get("feature_input_hook"), writes or facts.get("feature_output_hook")
            names = [re.sub(r"^blocks\.(\d+|\{layer\})\.", "", str(name)) if name else None for name in given]
            scan = facts.get("scan")
            return cls(found, names[0] or _READS, names[1] or _WRITES, str(scan) if scan else folder.name)

    def check(self, n_layers: int, width: int, needs_all: bool = True) -> None:
        """Raises ConfigError if they are of another model, or if a layer lacks one that `needs_all`."""
        numbers, first = [*self.layers], next(iter(self.layers.values()))
        ends = {i + layer.n_written for i, layer in self.layers.items() if layer.n_written > 1}
        lacks = needs_all and len(numbers) < n_layers
        if first.width != width or numbers[-1] >= n_layers or ends - {n_layers} or lacks:
            said = str(len(numbers)) if numbers == [*range(len(numbers))] else f"some ({brief(numbers)})"
            raise ConfigError(
                f"the transcoders must have {n_layers} layers of width {width}, as the model, not {said} "
                f"of {first.width}"
            )


class TranscoderReader(FeatureReader):
    """A layer's features, to read and to steer by.

    Its encoder is kept in memory once all features were asked for.
    """

    def __init__(self, transcoders: Transcoders, layer: int) -> None:
        self.layer = transcoders.layers[layer]
        self.name = f"blocks.{layer}.{transcoders.reads}"
        self.writes = tuple(f"blocks.{layer + j}.{transcoders.writes}" for j in range(self.layer.n_written))
        self.width, self.n_features = self.layer.width, self.layer.n_features

    def prepare(self, backend: Backend | None) -> None:
        self.layer.keep_encoder(backend)

    def features(self, x: FloatArray) -> FloatArray:
        self.layer.keep_encoder()
        return self.layer.features(x)

    def chooser(self, features: Sequence[int]) -> Choose:
        return self.layer.chooser(features)

    def decoders(self, features: Sequence[int]) -> FloatArray:
        return self.layer.decoders(np.asarray(features))

    def output_scale(self, x: FloatArray) -> FloatArray:
        return np.ones((len(x), 1), np.float32)

    def reconstruct(self, x: FloatArray) -> FloatArray:
        self.layer.keep_encoder()
        return self.layer.reconstruct(x)


def _find_layers(folder: Path) -> tuple[dict[int, Layer], dict[str, Any]]:
    """Return the layers by number, and the facts of the configuration."""
    across = {int(p.stem[6:]): p for p in folder.glob("W_enc_*.safetensors") if p.stem[6:].isdecimal()}
    facts = _facts(folder)
    if across:
        return {i: _across_layers(folder, path, i) for i, path in across.items()}, facts
    if any((folder / name).exists() for name in _WEIGHTS):
        match = _BLOCK.match(str(facts.get("feature_input_hook"))) or _LAYER.search(folder.resolve().name)
        if match is None:
            raise FormatError("must have a 'hook_name', which says of which layer it is", path=folder)
        return {int(match[1]): _folder_layer(folder, facts, int(match[1]))}, facts
    parts = sorted([*folder.glob("*.safetensors"), *(one for one in folder.iterdir() if one.is_dir())])
    numbered = {int(match[1]): one for one in parts if (match := _LAYER.search(one.name))}
    if not numbered:
        raise FormatError("must have layer_0.safetensors, W_enc_0.safetensors or folders", path=folder)
    layers: dict[int, Layer] = {}
    for i, one in numbered.items():
        if one.is_dir():
            own = _facts(one)
            layers[i] = _folder_layer(one, own, i)
            facts = own | facts
        else:
            layers[i] = _single_layer(one, {}, i)
    return layers, facts


def _folder_layer(folder: Path, facts: Mapping[str, Any], layer: int) -> Layer:
    """A layer as SAELens or Gemma Scope 2 save it."""
    kind, normalization = facts.get("architecture", "transcoder"), facts.get("normalize_activations", "none")
    if kind not in _KINDS:
        raise FormatError(f"must be a transcoder, not of architecture {brief(kind)}", path=folder)
    if normalization not in _FOLDED:
        raise UnsupportedError(f"{folder}: 'normalize_activations' {brief(normalization)} is not supported")
    activation = facts.get("activation_fn_str") or facts.get("activation_fn") or "relu"
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{folder}: 'activation_fn' {brief(activation)} is not supported")
    file = next((folder / name for name in _WEIGHTS if (folder / name).exists()), folder / _WEIGHTS[0])
    return _single_layer(file, facts, layer)


def _single_layer(path: Path, facts: Mapping[str, Any], layer: int) -> Layer:
    file = SafetensorsFile(path)
    parts = {
        part: _stored(file, name, path)
        for part, names in _PARTS.items()
        for name in names
        if name in file.tensors
    }
    options = facts.get("activation_fn_kwargs") or {}
    k = options.get("k", facts.get("k", 0)) if isinstance(options, Mapping) else 0
    is_transposed = path.name in _WEIGHTS
    has_transposed_skip = "affine_skip_connection" in file.tensors
    is_across = "decoder" in parts and len(parts["decoder"].shape) == 3  # one decoder for all layers
    n_before = layer if is_across else 0
    return Layer(parts, path, k if type(k) is int else 0, is_transposed, has_transposed_skip, n_before)


def _across_layers(folder: Path, path: Path, layer: int) -> Layer:
    decoder = folder / f"W_dec_{layer}.safetensors"
    parts = {}
    for file, one in ((SafetensorsFile(path), path), (SafetensorsFile(decoder), decoder)):
        for part, name in (("encoder", "W_enc"), ("bias", "b_enc"), ("output_bias", "b_dec"),
                           ("threshold", "threshold"), ("decoder", "W_dec"), ("skip", "W_skip")):  # fmt: skip
            if f"{name}_{layer}" in file.tensors:
                parts[part] = _stored(file, f"{name}_{layer}", one)
    return Layer(parts, path)


def _stored(file: SafetensorsFile, name: str, path: Path) -> Stored:
    tensor = file.tensors[name]
    return Stored(name, tensor.dtype, tensor.shape, file.data(tensor), path)


def _facts(folder: Path) -> dict[str, Any]:
    """What config.json, cfg.json or config.yaml says of hooks and the maker."""
    for name in ("config.json", "cfg.json"):
        if (folder / name).exists():
            facts: dict[str, Any] = read_json(folder / name, max_bytes=1 << 20)
            inner = facts.get("metadata")
            facts = (inner if isinstance(inner, dict) else {}) | facts
            for key, other in (("feature_input_hook", "hook_name"), ("feature_output_hook", "hook_name_out")):
                if isinstance(facts.get(other), str):
                    facts.setdefault(key, facts[other])
            return facts
    found: dict[str, Any] = {}
    if (folder / "config.yaml").exists():
        text = (folder / "config.yaml").read_bytes()[: 1 << 20].decode(errors="replace")
        for match in re.finditer(
            r"^(feature_input_hook|feature_output_hook|scan): *[\"']?([\w./@-]+)", text, re.M
        ):
            found[match[1]] = match[2]
    return found
