"""Models, written once against the op set of `kukri.kernels.op_set`.

Each file that defines an `Architecture` adds one to `ARCHITECTURES`: nothing else lists them, and
none is imported before it is asked for (`kukri.models.registry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError, reading
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend
from kukri.kernels.cache import CacheLayout
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.adapter import Adapter
from kukri.models.architecture import Architecture
from kukri.models.forward import Forward, KVCache
from kukri.models.registry import Architectures
from kukri.models.weights import NoWeights, Parameter, TakenWeights, WeightSource

__all__ = [
    "ARCHITECTURES",
    "Adapter",
    "Architecture",
    "Forward",
    "KVCache",
    "Model",
    "Parameter",
    "cache_layout",
    "load_model",
]


class Model(Protocol):
    """A program for the backends, its parameters, and `forward` for research."""

    config: ModelConfig
    parameters: Sequence[Parameter]  # every tensor, in order; tied embeddings once
    vectors: Sequence[FloatArray]  # every one, most of them views of the model's files

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """Runs one step -> logits [N, V]."""

    @property
    def cache_layout(self) -> CacheLayout:
        """The cache entry of each layer."""

    def hidden(self, ops: Ops, batch: Any) -> Tensor:
        """Runs one step -> the inputs of the head [N, D]."""

    def forward(
        self, token_ids: Any, attention_mask: Any = None, positions: Any = None, cache: KVCache | None = None
    ) -> FloatArray:
        """Logits float32 [B, T, V], as transformers' model gives them: see `Llama.forward`."""

    def new_cache(self, batch_size: int = 1, max_tokens: int | None = None) -> KVCache:
        """An empty cache for `forward`."""

    def bind(self, backend: Backend | None) -> None:
        """Makes `forward` run on a backend; None ends that."""

    @property
    def bound(self) -> Forward:
        """The runner of `forward`."""

    @property
    def n_parameters(self) -> int:
        """Numbers in the model; tied embeddings count once."""


ARCHITECTURES = Architectures()


def load_model(source: WeightSource, config: ModelConfig) -> Model:
    """The model of `config.architecture` with the weights of `source`.

    Raises UnsupportedError for an unknown architecture, and what the source raises on
    tensors that are missing, have another shape, or that no layer takes.
    """
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"architecture {config.architecture!r} is not supported: use {known}")
    taken = TakenWeights(source)
    with reading(getattr(source, "path", None)):
        model: Model = ARCHITECTURES[config.architecture].model(config, taken)
    source.done()
    model.parameters = tuple(taken.parameters.values())
    model.vectors = (*taken.vectors.values(), *taken.stacked_vectors.values())
    return model


def cache_layout(config: ModelConfig, n_parameters: int) -> CacheLayout:
    """What each layer of a model of `n_parameters` keeps in the cache, by its configuration.

    Raises UnsupportedError as `load_model`, FormatError on a layer larger than the model.
    """
    return load_model(NoWeights(n_parameters), config).cache_layout
