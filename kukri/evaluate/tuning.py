"""Recipes made by measuring: which tensor needs its bits, and which can do without.

Each matrix is quantized alone, to the type that the size affords on the average, and the KL divergence from
the model as it is says what that costs. What other types would cost follows from how much less they change
what the matrix computes: the squared error of its weights, each column's by the size of its inputs. Then the
bytes go where they save most.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.dataclass import dataclass, replace
from kukri.errors import ConfigError
from kukri.evaluate.importance import importance_matrix
from kukri.evaluate.text import STEP_TOKENS, bos_ids
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.tensor_names import gguf_name
from kukri.kernels import make_backend
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.llm import LLM
from kukri.models import Model, load_model
from kukri.models.weights import TakenWeights, WeightSource
from kukri.quant.blocks import dequantize
from kukri.quant.mixes import is_quantized
from kukri.quant.types import QuantType, fitting_type

_SAMPLE_ROWS = 256  # rows of a matrix that show how much a type changes it
_LEAST_KL = 1e-9  # measured differences below are rounding


@dataclass(frozen=True)
class Choice:
    """A type that a tensor could have: bytes, and the KL divergence expected of it alone, in nats."""

    type: QuantType
    n_bytes: int
    loss: float


@dataclass(frozen=True)
class Tuned:
    """A type for each tensor by GGUF name, the bytes of all weights, and the measurements.

    `measured` holds the KL of each tensor quantized alone to the type in `measured_types`.
    """

    types: dict[str, QuantType]
    n_bytes: int
    measured: dict[str, float]
    measured_types: dict[str, QuantType]


def tune(
    path: Path,
    text: str,
    n_bytes: int,
    types: Sequence[QuantType],
    *,
    max_tokens: int,
    n_threads: int | None,
    on_trial: Callable[[int, int], None] = lambda i, n: None,
) -> Tuned:
    """The Tuned whose weights take at most `n_bytes`, by the first `max_tokens` tokens of `text`.

    Writes no file. `on_trial` is told which trial of how many begins. Raises ConfigError for a size that no
    choice of these types keeps.
    """
    with LLM(path, max_context=max_tokens, max_step_tokens=STEP_TOKENS, n_threads=n_threads) as llm:
        bos = bos_ids(llm.tokenizer)
        ids = llm.tokenizer.encode(text)[: max_tokens - len(bos)]
        importance = importance_matrix(llm, ids, max_tokens, "")
        ids = [*bos, *ids]
    with open_checkpoint(path) as checkpoint:
        trials = _Trials(checkpoint.weights(checkpoint.config), checkpoint.config, ids, n_threads)
        architecture = checkpoint.config.architecture
        matrices = {
            gguf_name(name, architecture): weight
            for name, weight in trials.weights.items()
            if is_quantized(gguf_name(name, architecture), weight.shape)
        }
        fitting = {name: _fitting(types, weight) for name, weight in matrices.items()}
        matrices = {name: weight for name, weight in matrices.items() if fitting[name]}
        n_kept = trials.n_bytes - sum(weight.stored.nbytes for weight in matrices.values())
        n_weights = sum(weight.shape[0] * weight.shape[1] for weight in matrices.values())
        bits = 8 * (n_bytes - n_kept) / n_weights
        tried = {name: _nearest(options, bits) for name, options in fitting.items()}
        measured = {}
        for i, (name, kl) in enumerate(
            trials.losses({weight.name: tried[n] for n, weight in matrices.items()})
        ):
            measured[gguf_name(name, architecture)] = kl
            on_trial(i, len(matrices))
        choices = {
            name: _choices(
                weight,
                fitting[name],
                tried[name],
                measured[name],
                importance.importance(name, weight.shape[1]),
            )
            for name, weight in matrices.items()
        }
    chosen = allocate(choices, n_bytes - n_kept)
    used = n_kept + sum(choice.n_bytes for choice in chosen.values())
    return Tuned({name: choice.type for name, choice in chosen.items()}, used, measured, tried)


def _fitting(types: Sequence[QuantType], weight: Weight) -> list[QuantType]:
    """The types, or their stand-ins, that this weight can have and that make it no larger, by size."""
    found = {fitting_type(type, weight.shape[1]) for type in types} - {None}
    smaller = [t for t in found if t is not None and t.bits_per_weight <= weight.type.bits_per_weight]
    return sorted(smaller, key=lambda type: (type.bits_per_weight, type.name))


def _nearest(options: Sequence[QuantType], bits: float) -> QuantType:
    """The largest type within a number of bits, or the smallest there is."""
    return [*options[:1], *(type for type in options if type.bits_per_weight <= bits)][-1]


def _choices(
    weight: Weight, options: Sequence[QuantType], tried: QuantType, kl: float, columns: FloatArray | None
) -> list[Choice]:
    rows = weight.data[:: -(-len(weight.data) // _SAMPLE_ROWS)]
    exact = dequantize(rows, weight.type)

    def error(type: QuantType) -> float:
        changed = dequantize(requantize(rows, weight.type, type, tensor=weight.name), type) - exact
        squares = np.einsum("rc,rc->c", changed, changed, dtype=np.float64)
        return float(squares.sum() if columns is None else squares @ columns)

    of_tried = error(tried)
    scale = max(kl, _LEAST_KL) / of_tried if of_tried > 0 else 0.0
    n_rows, n_columns = weight.shape
    return [Choice(type, n_rows * type.row_bytes(n_columns), scale * error(type)) for type in options]


def allocate(choices: Mapping[str, Sequence[Choice]], n_bytes: int) -> dict[str, Choice]:
    """A Choice for each name, of `n_bytes` in all at most, with a small sum of losses.

    From the smallest choices on, the step that saves most for its bytes is taken as long as one fits; only
    steps along the lower convex hull of a name's choices are looked at. Raises ConfigError if even the
    smallest choices take more.
    """
    hulls = {name: _hull(options) for name, options in choices.items()}
    chosen = dict.fromkeys(hulls, 0)
    left = n_bytes - sum(hull[0].n_bytes for hull in hulls.values())
    if left < 0:
        raise ConfigError(f"the size must be at least {-left:,} bytes larger, even for the smallest types")

    def step(name: str) -> list[tuple[float, str]]:
        at, hull = chosen[name], hulls[name]
        return [] if at + 1 == len(hull) else [(-_slope(hull[at], hull[at + 1]), name)]

    queue = [entry for name in hulls for entry in step(name)]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        at, hull = chosen[name], hulls[name]
        extra = hull[at + 1].n_bytes - hull[at].n_bytes
        if extra <= left:
            left -= extra
            chosen[name] += 1
            for entry in step(name):
                heapq.heappush(queue, entry)
    return {name: hulls[name][at] for name, at in chosen.items()}


def _slope(a: Choice, b: Choice) -> float:
    """Loss saved by each byte from a to b."""
    return (a.loss - b.loss) / (b.n_bytes - a.n_bytes)


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """The choices that save more than any mix of a smaller and a larger one, by size."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda o: (o.n_bytes, o.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def recipe_of(types: Mapping[str, QuantType]) -> dict[str, str]:
    """A recipe's patterns for these types by GGUF name: one for each type of a kind of tensor."""
    layers: dict[tuple[str, str], list[str]] = {}
    recipe: dict[str, str] = {}
    for name, type in types.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            recipe[f"^{re.escape(name)}$"] = type.name
        else:
            layers.setdefault((match[2], type.name), []).append(match[1])
    for (rest, type_name), numbers in layers.items():
        recipe[rf"^blk\.({'|'.join(numbers)})\.{re.escape(rest)}$"] = type_name
    return recipe


class _Trials:
    """A model with one weight changed at a time. Attributes: weights by name; n_bytes of all tensors."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, ids: Sequence[int], n_threads: int | None
    ) -> None:
        self._source = _Changeable(source)
        self._config = replace(config, max_context=len(ids))
        self._ids, self._n_threads = ids, n_threads
        parameters = load_model(self._source, self._config).parameters
        self.n_bytes = sum(parameter.n_bytes for parameter in parameters)
        self.weights = self._source.matrices

    def losses(self, types: Mapping[str, QuantType]) -> Iterator[tuple[str, float]]:
        """(name, mean KL) of each weight quantized to its type, the others as they are.

        Each layer has its own backend, because a backend keeps the weights that it packs.
        """
        judge: list[_Reference] = []
        layer_of = {name: name.rpartition(".layers.")[2].partition(".")[0] for name in types}
        for layer in dict.fromkeys(layer_of.values()):
            with _backend(self._n_threads) as backend:
                if not judge:
                    judge = [_Reference(logits) for logits in self._logits(backend)]
                for name in types:
                    if layer_of[name] != layer:
                        continue
                    weight = self.weights[name]
                    data = requantize(weight.data, weight.type, types[name], tensor=name)
                    self._source.changed = {name: Weight(data, types[name], weight.shape, name)}
                    kl = [r.kl(logits) for r, logits in zip(judge, self._logits(backend), strict=True)]
                    yield name, float(np.concatenate(kl).mean())
        self._source.changed = {}

    def _logits(self, backend: Backend) -> Iterator[FloatArray]:
        model: Model = load_model(self._source, self._config)
        model.bind(backend)
        cache = model.new_cache(1, len(self._ids))
        for start in range(0, len(self._ids), STEP_TOKENS):
            yield model.forward(list(self._ids[start : start + STEP_TOKENS]), cache=cache)[0]


@contextmanager
def _backend(n_threads: int | None) -> Iterator[Backend]:
    backend: Any = make_backend("cpu", n_threads)
    try:
        yield backend
    finally:
        backend.close()


class _Reference:
    """Logits [T, V] that others are judged by, in float32: means of trials are compared, not tokens."""

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits - logits.max(axis=1, keepdims=True)
        self._p = np.exp(self._logits)
        total = self._p.sum(axis=1, keepdims=True)
        self._log_total = np.log(total)[:, 0]
        self._p /= total

    def kl(self, logits: FloatArray) -> FloatArray:
        """KL(these || logits) of each row, in nats: float32 [T]."""
        other = logits - logits.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(other).sum(axis=1))
        np.subtract(self._logits, other, out=other)
        mean = np.einsum("tv,tv->t", self._p, other)
        kl: FloatArray = mean - self._log_total + log_total
        return kl


class _Changeable(TakenWeights):
    """A `WeightSource` that gives the same Weight for a name each time, or the one in `changed`."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self.changed: dict[str, Weight] = {}

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        stored = self.matrices.get(name) or super().matrix(name, shape)
        return self.changed.get(name, stored)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        return self.stacks.get(name) or super().experts(name, shape)
