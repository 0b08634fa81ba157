"""The files that requests use by name: control vectors, probes, autoencoders and transcoders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from kukri.config import ModelConfig
from kukri.errors import ConfigError, HookError, RequestError, brief
from kukri.interp.features.control_vectors import ControlVector
from kukri.interp.features.feature_products import product_backend
from kukri.interp.features.readers import FeatureReader, Probe, SparseAutoencoder
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.hooks.hook_names import find, full_name
from kukri.interp.hooks.hook_values import Model
from kukri.kernels.backend import Backend

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Catalog:
    """The control vectors, probes, autoencoders and transcoders of a model, by name."""

    def __init__(
        self,
        config: ModelConfig,
        control_vectors: Mapping[str, Any] | None = None,
        probes: Mapping[str, Any] | None = None,
        saes: Mapping[str, Any] | None = None,
        transcoders: Mapping[str, Any] | None = None,
    ) -> None:
        """Values are paths, or the objects themselves. Raises KukriError on what does not fit the model."""
        self.vectors: dict[str, ControlVector] = {}
        self.probes: dict[str, Probe] = {}
        self.saes: dict[str, SparseAutoencoder] = {}
        self.transcoders: dict[str, Transcoders] = {}
        self.backend: Backend | None = None  # the model's
        for name, given in (control_vectors or {}).items():
            vector = ControlVector.load(given) if _is_path(given) else ControlVector(given)
            vector.check(_checked(name), config.n_layers, config.d_model)
            self.vectors[name] = vector
        for name, given in (probes or {}).items():
            self.probes[_checked(name)] = Probe.load(given) if _is_path(given) else given
        for name, given in (saes or {}).items():
            self.saes[_checked(name)] = SparseAutoencoder.load(given) if _is_path(given) else given
        for name, given in (transcoders or {}).items():
            found = Transcoders.load(given) if _is_path(given) else given
            found.check(config.n_layers, config.d_model, needs_all=False)
            self.transcoders[_checked(name)] = found

    def check(self, model: Model) -> None:
        """Raises ConfigError if a file reads or writes a hook that the model does not have."""
        for kind, name, reader in self._readers():
            for hook in {reader.name, *([] if kind != "transcoder" else reader.writes)}:  # type: ignore[union-attr]
                try:
                    point = find(full_name(hook, model.config.n_layers), model.points)
                except HookError as error:
                    raise ConfigError(f"{kind} {name!r} cannot be used: {error}") from None
                is_tapped = len(point.needs) == 1 and not (point.matrix or point.steps)
                width = model.trace.widths[point.tap] if is_tapped else 0
                if width != reader.width:
                    raise ConfigError(
                        f"{kind} {name!r} must have {hook}'s width, {width}, not {reader.width}"
                    )

    @cached_property
    def product_backend(self) -> Backend | None:
        """The backend for products with encoders: see `product_backend`."""
        return None if self.backend is None else product_backend(self.backend)

    def _readers(self) -> Iterator[tuple[str, str, Probe | FeatureReader]]:
        yield from (("probe", *one) for one in self.probes.items())
        yield from (("sae", *one) for one in self.saes.items())
        for name, found in self.transcoders.items():
            yield from (("transcoder", name, found.reader(layer)) for layer in found.layers)

    def known(self, kind: str, name: Any) -> Any:
        """Return the object of a name and a kind: "control vector", "probe", "sae" or "transcoder".

        Raises RequestError.
        """
        kinds: dict[str, Mapping[str, Any]] = {
            "control vector": self.vectors, "probe": self.probes, "sae": self.saes,
            "transcoder": self.transcoders,
        }  # fmt: skip
        there = kinds[kind]
        if not isinstance(name, str) or name not in there:
            known = f"there are {', '.join(there)}" if there else "none is loaded"
            raise RequestError(f"the {kind} {brief(name)} was not found: {known}")
        return there[name]

    def feature_reader(self, sae: Any, transcoder: Any, layer: Any) -> FeatureReader:
        """The features of an autoencoder, or of a transcoder's layer, which may be None if it has only one.
        Raises RequestError.
        """
        if transcoder is None:
            if layer is not None:
                raise RequestError("'layer' is not supported with an sae, which has its own")
            reader: FeatureReader = self.known("sae", sae)
            return reader
        found: Transcoders = self.known("transcoder", transcoder)
        if layer is None and len(found.layers) == 1:
            (layer,) = found.layers
        if type(layer) is not int or layer not in found.layers:
            numbers = ", ".join(map(str, found.layers))
            raise RequestError(
                f"'layer' must be one of transcoder {transcoder!r} ({numbers}), not {brief(layer)}"
            )
        return found.reader(layer)


def _is_path(given: Any) -> bool:
    return isinstance(given, str) or hasattr(given, "__fspath__")


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a name must have only letters, digits and ._-, at most 64, not be {brief(name)}")
    return name
