"""Transcoders: sparse features that take the place of each layer's MLP, per layer or across layers.

A feature of layer l is active where the encoder's product with what the MLP reads says so, and writes its
decoder's direction to the MLP's output: of its own layer, or of each layer from its own on (a cross-layer
transcoder). Matrices stay on their mapped files, in the type that they are stored in: an encoder is read as
a layer is encoded, of a decoder the rows of active features alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.errors import ConfigError, FormatError, brief, reading
from kukri.formats.huggingface.safetensors import SafetensorsFile
from kukri.formats.json_files import read_json
from kukri.interp.readers import as_floats
from kukri.kernels.arrays import FloatArray

_READS, _WRITES = "mlp.hook_in", "hook_mlp_out"
_LAYER = re.compile(r"layers?[_.-]?(\d{1,4})(?:\D|$)")
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


class Active(NamedTuple):
    """The active features of a layer, by position, then number."""

    positions: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor on a mapped file, or in memory: float32 as it is read."""

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


class Layer:
    """A layer's transcoder. `encoder` is [F, D], or [D, F] if it is transposed, `decoder` [F, D], or
    [F, layers, D] of all layers from this one on; `skip` is [D out, D in], or transposed.
    """

    def __init__(
        self,
        parts: Mapping[str, Stored],
        path: Path,
        k: int = 0,
        is_transposed: bool = False,
        has_transposed_skip: bool = False,
    ) -> None:
        if missing := {"encoder", "decoder", "bias", "output_bias"} - parts.keys():
            names = ", ".join(_PARTS[one][0] for one in sorted(missing))
            raise FormatError(f"a transcoder needs {names}", path=path)
        self._parts, self._k = parts, k
        self._is_transposed, self._has_transposed_skip = is_transposed, has_transposed_skip
        (self.n_features,), (self.width,) = parts["bias"].shape, parts["output_bias"].shape[-1:]
        encoder, decoder = parts["encoder"].shape, parts["decoder"].shape
        n, d = self.n_features, self.width
        wanted = {"threshold": (n,), "skip": (d, d), "output_bias": (d,), "bias": (n,)}
        if (
            encoder != ((d, n) if is_transposed else (n, d))
            or len(decoder) not in (2, 3)
            or (decoder[0], decoder[-1]) != (n, d)
        ):
            raise FormatError(
                f"W_enc {list(encoder)} and W_dec {list(decoder)} do not fit {n} biases", path=path
            )
        for name in wanted.keys() & parts.keys():
            shape = tuple(s for s in parts[name].shape if s != 1 or wanted[name] == (1,))
            if shape != wanted[name]:
                raise FormatError(f"{_PARTS[name][0]} {list(shape)} does not fit {n} features", path=path)
        if not 0 <= k <= n:
            raise FormatError(f"k must be from 0 to {n} features, not {k}", path=path)

    @property
    def n_written(self) -> int:
        """How many layers' outputs its features write to, from its own on."""
        shape = self._parts["decoder"].shape
        return shape[1] if len(shape) == 3 else 1

    @cached_property
    def bias(self) -> FloatArray:
        """Of the output of its layer, [D]."""
        return self._parts["output_bias"].read().reshape(-1)

    @cached_property
    def skip(self) -> FloatArray | None:
        """The linear part that has no features, [D out, D in], or None."""
        if "skip" not in self._parts:
            return None
        found = self._parts["skip"].read()
        return found.T if self._has_transposed_skip else found

    def encode(self, x: FloatArray) -> Active:
        """The active features of inputs x [pos, D]."""
        matrix = self._parts["encoder"].read()
        found = x @ (matrix if self._is_transposed else matrix.T) + self._parts["bias"].read()
        if "threshold" in self._parts:
            found[found <= self._parts["threshold"].read().reshape(-1)] = 0
        if self._k:
            least = np.partition(found, -self._k, axis=1)[:, -self._k, None]
            found[found < least] = 0
        found = np.maximum(found, 0)
        positions, features = np.nonzero(found)
        return Active(positions, features, found[positions, features])

    def encoders(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The directions that features read, [n, D]."""
        if self._is_transposed:
            return np.ascontiguousarray(self._parts["encoder"].read()[:, features].T)
        return self._parts["encoder"].read(features)

    def biases(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The encoder's biases of features, [n]."""
        return self._parts["bias"].read()[features]

    def decoders(self, features: npt.NDArray[np.int64]) -> FloatArray:
        """The directions that features write to each layer from theirs on, [n, layers, D]."""
        return self._parts["decoder"].read(features).reshape(len(features), self.n_written, self.width)


class Transcoders:
    """A transcoder for each layer of a model.

    Attributes: layers; reads and writes, the hooks' short names; scan, who made them, for viewers.
    """

    def __init__(
        self, layers: Sequence[Layer], reads: str = _READS, writes: str = _WRITES, scan: str = ""
    ) -> None:
        if not layers:
            raise ConfigError("a set of transcoders needs one for each layer")
        self.layers, self.reads, self.writes, self.scan = tuple(layers), reads, writes, scan
        for i, layer in enumerate(layers):
            if layer.width != layers[0].width or layer.n_written not in (1, len(layers) - i):
                raise ConfigError(f"the transcoder of layer {i} does not fit the others")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], reads: str | None = None, writes: str | None = None
    ) -> Transcoders:
        """Reads a directory of one of these forms, whose layers are counted from 0:

        - circuit-tracer's, per layer: layer_0.safetensors ...; or across layers: W_enc_0.safetensors and
          W_dec_0.safetensors ...
        - folders with a layer's number in their names, each as SAELens saves a transcoder (cfg.json and
          sae_weights.safetensors) or as Gemma Scope 2 does (config.json and params.safetensors).

        The hooks are `reads` and `writes`, or those that config.json, config.yaml or cfg.json name, or
        "mlp.hook_in" and "hook_mlp_out". Raises FormatError and ConfigError.
        """
        with reading(path):
            folder = Path(path)
            found, facts = _find_layers(folder)
            given = reads or facts.get("feature_input_hook"), writes or facts.get("feature_output_hook")
            names = [re.sub(r"^blocks\.(\d+|\{layer\})\.", "", str(name)) if name else None for name in given]
            scan = facts.get("scan")
            return cls(found, names[0] or _READS, names[1] or _WRITES, str(scan) if scan else folder.name)

    def check(self, n_layers: int, width: int) -> None:
        """Raises ConfigError if they are of another model."""
        if (len(self.layers), self.layers[0].width) != (n_layers, width):
            raise ConfigError(
                f"the transcoders have {len(self.layers)} layers of width {self.layers[0].width}, "
                f"and the model {n_layers} of {width}"
            )


def _find_layers(folder: Path) -> tuple[list[Layer], dict[str, Any]]:
    """The layers in order, and what the configuration says."""
    across = {int(p.stem[6:]): p for p in folder.glob("W_enc_*.safetensors") if p.stem[6:].isdecimal()}
    if across:
        layers = {i: _across_layers(folder, path, i) for i, path in across.items()}
        return _in_order(layers, folder), _facts(folder)
    parts = sorted([*folder.glob("*.safetensors"), *(one for one in folder.iterdir() if one.is_dir())])
    numbered = {int(match[1]): one for one in parts if (match := _LAYER.search(one.name))}
    if not numbered:
        raise FormatError(
            "has no transcoders: no layer_0.safetensors, W_enc_0.safetensors or folders", path=folder
        )
    layers, facts = {}, _facts(folder)
    for i, one in numbered.items():
        file, own = one, {}
        if one.is_dir():
            file = next(
                (one / n for n in ("sae_weights.safetensors", "params.safetensors") if (one / n).exists()),
                one,
            )
            own = _facts(one)
            facts = own | facts
        if own.get("architecture", "transcoder") not in _KINDS:
            raise FormatError(f"architecture {brief(own['architecture'])} is no transcoder's", path=one)
        layers[i] = _single_layer(file, own)
    return _in_order(layers, folder), facts


def _single_layer(path: Path, facts: Mapping[str, Any]) -> Layer:
    file = SafetensorsFile(path)
    parts = {
        part: _stored(file, name, path)
        for part, names in _PARTS.items()
        for name in names
        if name in file.tensors
    }
    options = facts.get("activation_fn_kwargs") or {}
    k = options.get("k", facts.get("k", 0)) if isinstance(options, Mapping) else 0
    is_transposed = not _LAYER.search(path.name)  # of SAELens and Gemma Scope
    has_transposed_skip = "affine_skip_connection" in file.tensors
    return Layer(parts, path, k if type(k) is int else 0, is_transposed, has_transposed_skip)


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


def _in_order(layers: Mapping[int, Layer], folder: Path) -> list[Layer]:
    if sorted(layers) != list(range(len(layers))):
        raise FormatError(f"has transcoders of layers {brief(sorted(layers))}: one is missing", path=folder)
    return [layers[i] for i in range(len(layers))]


def _facts(folder: Path) -> dict[str, Any]:
    """What config.json, cfg.json or config.yaml says of hooks and the maker."""
    for name in ("config.json", "cfg.json"):
        if (folder / name).exists():
            facts: dict[str, Any] = read_json(folder / name, max_bytes=1 << 20)
            inner = facts.get("metadata")
            facts = (inner if isinstance(inner, dict) else {}) | facts
            hooks = {
                "feature_input_hook": ("hook_name", "hf_hook_point_in"),
                "feature_output_hook": ("hook_name_out",),
            }
            for key, others in hooks.items():
                facts.setdefault(
                    key, next((facts[o] for o in others[:1] if isinstance(facts.get(o), str)), None)
                )
            return facts
    found: dict[str, Any] = {}
    if (folder / "config.yaml").exists():
        text = (folder / "config.yaml").read_bytes()[: 1 << 20].decode(errors="replace")
        for match in re.finditer(
            r"^(feature_input_hook|feature_output_hook|scan): *[\"']?([\w./@-]+)", text, re.M
        ):
            found[match[1]] = match[2]
    return found
