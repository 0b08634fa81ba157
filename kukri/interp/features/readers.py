"""Linear probes and sparse autoencoders: what reads a token's activations out as a few numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from kukri.errors import ConfigError, FormatError, RequestError, UnsupportedError, brief, reading
from kukri.formats.huggingface.safetensors import SafetensorsFile
from kukri.formats.json_files import read_json
from kukri.interp.features.feature_products import Product
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_SAE_WEIGHTS, _SAE_CONFIG = "sae_weights.safetensors", "cfg.json"
_NORMALIZATIONS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")
_ACTIVATIONS = ("relu", "tanh-relu")
SAEKind = Literal["standard", "jumprelu", "topk", "gated"]
Choose = Callable[[FloatArray], FloatArray]  # [rows, width] -> the activations of some features [rows, n]


class FeatureReader(Protocol):
    """What has sparse features: it reads them at the hook `name`, and each writes a direction to the hooks
    `writes`, all of `width` numbers. An autoencoder writes where it reads.
    """

    name: str
    width: int
    n_features: int
    writes: tuple[str, ...]

    def prepare(self, backend: Backend | None) -> None:
        """Keeps what `features` multiplies by in memory, for a backend's kernels in the place of BLAS if one
        is given. Any thread may call it.
        """

    def features(self, x: FloatArray) -> FloatArray:
        """Return the activations of the features [rows, n_features] for x [rows, width]."""

    def chooser(self, features: Sequence[int]) -> Choose:
        """Return a function that computes only these features, each row by itself."""

    def decoders(self, features: Sequence[int]) -> FloatArray:
        """The directions of features, [n, writes, width]."""

    def output_scale(self, x: FloatArray) -> FloatArray:
        """Return the factor of each row's output, [rows, 1], which is 1 unless inputs are normalized."""

    def reconstruct(self, x: FloatArray) -> FloatArray:
        """Return the reader's output for the hooks that it writes, [writes, rows, width]. For hooks after the
        first it is only this reader's part.
        """


def keep_largest(x: FloatArray, k: int) -> None:
    """Set all but the k largest numbers of each row of x [rows, n] to 0. Numbers equal to the k-th stay."""
    n_columns = 4 * k  # the k-th largest of their maxima is no larger than the k-th of all
    for row in x:
        found = row
        if len(row) >= 4 * n_columns:
            columns = row[: len(row) // n_columns * n_columns].reshape(-1, n_columns).max(axis=0)
            found = row[~(row < np.partition(columns, -k)[-k])]
        np.copyto(row, 0, where=row < np.partition(found, -k)[-k])


class Probe:
    """Scores x W^T + b of activations at one hook. Attributes: name (of the hook), weight [n, width],
    bias [n], labels (of the n scores).
    """

    def __init__(self, name: str, weight: Any, bias: Any = None, labels: Sequence[str] | None = None) -> None:
        self.name, self.weight = name, np.atleast_2d(np.asarray(weight, np.float32))
        n = len(self.weight)
        self.bias = np.zeros(n, np.float32) if bias is None else np.asarray(bias, np.float32).reshape(-1)
        self.labels = tuple(labels or (["score"] if n == 1 else map(str, range(n))))
        if self.weight.ndim != 2 or len(self.bias) != n or len(self.labels) != n:
            raise ConfigError(
                "a probe must have a weight [n, width], n biases and n labels, not "
                f"{list(self.weight.shape)}, {len(self.bias)} and {len(self.labels)}"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Probe:
        """Reads a .safetensors file: `weight` [n, width] or [width], perhaps `bias` [n], and in its metadata
        `hook_name` and perhaps `labels`, a JSON list of texts. Raises FormatError.
        """
        with reading(path):
            arrays, metadata = _arrays(Path(path))
            if not {"weight"} <= arrays.keys() <= {"weight", "bias"}:
                raise FormatError(f"must have weight and bias, not {brief(sorted(arrays))}", path=path)
            name = metadata.get("hook_name")
            if not isinstance(name, str):
                raise FormatError("the metadata of a probe must have its 'hook_name'", path=path)
            try:
                labels = json.loads(metadata.get("labels", "null"))
            except ValueError:
                labels = ""
            if labels is not None and not (
                isinstance(labels, list) and all(isinstance(label, str) for label in labels)
            ):
                raise FormatError("the labels of a probe must be a JSON list of strings", path=path)
            return cls(name, arrays["weight"], arrays.get("bias"), labels)

    @property
    def width(self) -> int:
        """Numbers that it reads of a token."""
        return int(self.weight.shape[1])

    def scores(self, x: FloatArray) -> FloatArray:
        """The scores [rows, n] of x [rows, width]."""
        found: FloatArray = x @ self.weight.T + self.bias
        return found


class SparseAutoencoder(FeatureReader):
    """An autoencoder as SAELens saves it: a directory with cfg.json and sae_weights.safetensors.

    Attributes: name (of the hook), kind, width, n_features. The architectures are standard, gated, topk and
    jumprelu (batchtopk and Matryoshka's are saved as that). Formulas follow SAELens 6.
    """

    def __init__(
        self,
        name: str,
        kind: SAEKind,
        arrays: Mapping[str, FloatArray],
        *,
        k: int = 0,
        subtracts_bias: bool = True,
        normalization: str = "none",
        rescales: bool = False,
        activation: str = "relu",
    ) -> None:
        """`rescales` multiplies activations by the lengths of their decoder's directions. `activation` is
        "relu", or "tanh-relu", the tanh of it.
        """
        needed = {"W_enc", "b_dec", *_BIASES[kind]}
        if missing := sorted(needed - arrays.keys()):
            raise ConfigError(f"an autoencoder of kind {kind} requires {', '.join(missing)}")
        if arrays["W_enc"].ndim != 2:
            raise ConfigError(f"W_enc must be [width, features], not {list(arrays['W_enc'].shape)}")
        self.width, self.n_features = map(int, arrays["W_enc"].shape)
        shapes = {"b_dec": (self.width,), "W_dec": (self.n_features, self.width)}
        for part in (needed | {"W_dec"}) & arrays.keys() - {"W_enc"}:
            if arrays[part].shape != shapes.get(part, (self.n_features,)):
                raise ConfigError(f"{part} must fit W_enc: its shape is {list(arrays[part].shape)}")
        if kind == "topk" and not 1 <= k <= self.n_features:
            raise ConfigError(f"k must be from 1 to {self.n_features} features, not {k}")
        self.name, self.writes, self.kind, self._k = name, (name,), kind, k
        self._arrays = {part: arrays[part] for part in arrays if part in needed | {"W_dec"}}
        if rescales:
            lengths = np.linalg.norm(arrays["W_dec"], axis=1)
            for part in ("W_enc", "b_enc"):
                self._arrays[part] = arrays[part] * lengths
            self._arrays["W_dec"] = arrays["W_dec"] / np.maximum(lengths, 1e-30)[:, None]
        self._subtracts_bias, self._normalization, self._activation = (
            subtracts_bias,
            normalization,
            activation,
        )
        self._product: Product | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparseAutoencoder:
        """Reads a directory. Raises FormatError, and UnsupportedError for other architectures."""
        with reading(path):
            folder = Path(path)
            facts = read_json(folder / _SAE_CONFIG, max_bytes=1 << 20)
            more = facts.get("metadata", facts.get("meta"))
            facts |= {
                key: value
                for key, value in (more if isinstance(more, dict) else {}).items()
                if key not in facts
            }
            arrays, _ = _arrays(folder / _SAE_WEIGHTS)
            kind, name = facts.get("architecture", "standard"), facts.get("hook_name")
            options = facts.get("activation_fn_kwargs") or {}
            k = facts.get("k", options.get("k", 0) if isinstance(options, dict) else 0)
            activation = facts.get("activation_fn_str") or facts.get("activation_fn") or "relu"
            if activation in ("topk", kind):
                kind, activation = activation, "relu"
            rescales = bool(facts.get("rescale_acts_by_decoder_norm"))
            if kind not in _BIASES or (rescales and (kind != "topk" or "W_dec" not in arrays)):
                raise UnsupportedError(
                    f"{folder}: an autoencoder of architecture {brief(kind)} is not supported: use "
                    f"{', '.join(_BIASES)}, or 'rescale_acts_by_decoder_norm' of topk"
                )
            if activation not in _ACTIVATIONS:
                raise UnsupportedError(
                    f"{folder}: 'activation_fn' {brief(activation)} is not supported: use "
                    f"{', '.join(_ACTIVATIONS)} or topk"
                )
            if (arrays.pop("scaling_factor", np.ones(1)) != 1).any():
                raise UnsupportedError(
                    f"{folder}: 'scaling_factor' (finetuning_scaling_factor) is not supported"
                )
            if facts.get("hook_head_index") is not None:
                raise UnsupportedError(f"{folder}: autoencoders of a single head are not supported")
            normalization = facts.get("normalize_activations", "none")
            if normalization not in _NORMALIZATIONS:
                raise UnsupportedError(
                    f"{folder}: 'normalize_activations' {brief(normalization)} is not supported"
                )
            if not isinstance(name, str) or type(k) is not int:
                raise FormatError("must have a 'hook_name', and a whole number k", path=folder / _SAE_CONFIG)
            subtracts = bool(facts.get("apply_b_dec_to_input", True))
            return cls(
                name, kind, arrays, k=k, subtracts_bias=subtracts, normalization=normalization,
                rescales=rescales, activation=activation,
            )  # fmt: skip

    def prepare(self, backend: Backend | None) -> None:
        if backend is not None and self._product is None:
            self._product = Product(backend, self._arrays["W_enc"].T, "F32")

    def features(self, x: FloatArray) -> FloatArray:
        found = self._rectified(x)
        return np.tanh(found) if self._activation == "tanh-relu" else found

    def _rectified(self, x: FloatArray) -> FloatArray:
        arrays = self._arrays
        x = self._normalized(x)
        if self._subtracts_bias:
            x = x - arrays["b_dec"]
        product = x @ arrays["W_enc"] if self._product is None else self._product(x)
        if self.kind == "gated":
            size = np.maximum(product * np.exp(arrays["r_mag"]) + arrays["b_mag"], 0)
            return np.where(product + arrays["b_gate"] > 0, size, np.float32(0))
        found: FloatArray = product + arrays["b_enc"]
        if self.kind == "jumprelu":
            return np.where(found > np.maximum(arrays["threshold"], 0), found, np.float32(0))
        if self.kind == "topk":
            keep_largest(found, self._k)
        return np.maximum(found, 0)

    def chooser(self, features: Sequence[int]) -> Choose:
        """The bits of a row depend on no other row, unless the kind is topk, where the
        largest of all features are found by one product.
        """
        chosen = np.asarray(features)
        if self.kind == "topk":
            return lambda x: self.features(x)[:, chosen]
        arrays = {
            part: array if part == "b_dec" else array[..., chosen]
            for part, array in self._arrays.items()
            if part != "W_dec"
        }
        own = SparseAutoencoder(
            self.name, self.kind, arrays, subtracts_bias=self._subtracts_bias,
            normalization=self._normalization, activation=self._activation,
        )  # fmt: skip
        return lambda x: np.concatenate([own.features(row) for row in x[:, None]])

    def decoders(self, features: Sequence[int]) -> FloatArray:
        """Raises RequestError if its file has no decoder."""
        if "W_dec" not in self._arrays:
            raise RequestError("the features cannot be steered, only read: the autoencoder has no W_dec")
        return self._arrays["W_dec"][np.asarray(features), None]

    def output_scale(self, x: FloatArray) -> FloatArray:
        if self._normalization == "constant_norm_rescale":
            length: FloatArray = np.linalg.norm(x, axis=1, keepdims=True)
            return length / np.float32(self.width**0.5)
        if self._normalization == "layer_norm":
            deviation: FloatArray = x.std(axis=1, ddof=1, keepdims=True)
            return deviation
        return np.ones((len(x), 1), np.float32)

    def reconstruct(self, x: FloatArray) -> FloatArray:
        found = sparse_product(self.features(x), self.decoders) + self._arrays["b_dec"]
        found *= self.output_scale(x)
        if self._normalization == "layer_norm":
            found += x.mean(axis=1, keepdims=True)
        return found

    def _normalized(self, x: FloatArray) -> FloatArray:
        if self._normalization == "constant_norm_rescale":
            scaled: FloatArray = x * (np.float32(self.width**0.5) / np.linalg.norm(x, axis=1, keepdims=True))
            return scaled
        if self._normalization == "layer_norm":
            centred = x - x.mean(axis=1, keepdims=True)
            divided: FloatArray = centred / (x.std(axis=1, ddof=1, keepdims=True) + np.float32(1e-5))
            return divided
        return x  # the factor of expected_average_only_in is folded into the weights of a saved file


_BIASES: dict[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}


def sparse_product(features: FloatArray, decoders: Callable[[Any], FloatArray]) -> FloatArray:
    """Activations [rows, n_features] times decoders, [writes, rows, width], of active features alone."""
    active = [np.flatnonzero(row) for row in features]
    parts = [row[own] @ decoders(own).swapaxes(0, 1) for row, own in zip(features, active)]
    return np.stack(parts, axis=1)


def _arrays(path: Path) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    """The arrays of a .safetensors file in float32, and its metadata."""
    file = SafetensorsFile(path)
    found = {
        name: as_floats(file.data(tensor), tensor.dtype, path, name).reshape(tensor.shape)
        for name, tensor in file.tensors.items()
    }
    return found, file.metadata


def as_floats(stored: Any, dtype: str, path: Path, name: str) -> FloatArray:
    """The bytes of a tensor of a .safetensors file in float32. Raises FormatError on other types and on
    numbers that are not finite.
    """
    if dtype == "BF16":
        found: Any = (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _DTYPES:
        found = stored.view(_DTYPES[dtype]).astype(np.float32)
    else:
        raise FormatError(f"must be floating point, not {dtype}", path=path, tensor=name)
    if not np.isfinite(found).all():
        raise FormatError("must hold finite numbers", path=path, tensor=name)
    checked: FloatArray = found
    return checked
