"""Which layers each stage gets: the slowest stage is as fast as it can be, and all find room."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from kukri.dataclass import dataclass
from kukri.errors import ConfigError
from kukri.models import ARCHITECTURES, Model


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of a model's weights: of each layer, of the weights before the layers, and of those after
    them.

    Tied embeddings count before and after. Rows of an embedding are looked up, which takes memory and no
    time.
    """

    layers: tuple[int, ...]
    first: int
    last: int

    def held(self, layers: range) -> int:
        """Return the bytes of weights that a stage with these layers holds."""
        return self.read(layers) + (self.first if layers.start == 0 else 0)

    def read(self, layers: range) -> int:
        """Return the bytes of weights that a stage with these layers reads in a step."""
        n_bytes = sum(self.layers[layers.start : layers.stop])
        return n_bytes + (self.last if layers.stop == len(self.layers) else 0)


def model_bytes(model: Model) -> ModelBytes:
    """The bytes of a model's weights, by the names of its tensors."""
    config = model.config
    architecture = ARCHITECTURES[config.architecture]
    of_layer = re.compile(re.escape(architecture.layers) + r"\.(\d+)\.")
    layers, first, last = [0] * config.n_layers, 0, 0
    for parameter in model.parameters:
        found = of_layer.match(parameter.name)
        if found:
            layers[int(found[1])] += parameter.n_bytes
        elif parameter.name.startswith(architecture.embedding):
            first += parameter.n_bytes
            last += parameter.n_bytes if config.tie_embeddings else 0
        else:
            last += parameter.n_bytes
    return ModelBytes(tuple(layers), first, last)


@dataclass(frozen=True)
class StageRoom:
    """Resources of a stage's machine: bytes of memory, and weights read in a second (any unit).

    Stages with the same `memory` share it.
    """

    free_bytes: int
    speed: float = 1.0
    memory: str = ""


def cut_layers(weights: ModelBytes, cache_bytes: Sequence[int], rooms: Sequence[StageRoom]) -> list[range]:
    """Return the layers of each stage, in order, at least one for each.

    `cache_bytes` are the bytes of each layer's cache. Of all cuts that fit into memory, the cut whose slowest
    stage takes the least time is chosen. Raises ConfigError if
    none fits.
    """
    n_layers, n_stages = len(weights.layers), len(rooms)

    def time_of(stage: int, layers: range) -> float:
        """Time of a step; infinite if the stage has no room for these layers."""
        needed = weights.held(layers) + sum(cache_bytes[layers.start : layers.stop])
        fits = needed <= rooms[stage].free_bytes
        return weights.read(layers) / rooms[stage].speed if fits else float("inf")

    @cache
    def best(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        """The time of the slowest stage from here on, and where each of these stages ends."""
        if stage == n_stages - 1:
            return time_of(stage, range(start, n_layers)), (n_layers,)
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for stop in range(start + 1, n_layers - (n_stages - stage) + 2):
            others_s, stops = best(stage + 1, stop)
            slowest_s = max(time_of(stage, range(start, stop)), others_s)
            if not found[1] or slowest_s < found[0]:
                found = slowest_s, (stop, *stops)
        return found

    slowest_s, stops = best(0, 0)
    if slowest_s == float("inf"):
        total = weights.held(range(n_layers)) + sum(cache_bytes)
        free = ", ".join(f"{room.free_bytes / 2**30:.2f}" for room in rooms)
        raise ConfigError(
            f"weights and the KV cache of one request ({total / 2**30:.2f} GiB) must fit into the free "
            f"memory of the stages ({free} GiB): add a stage, lower --max-context (max_context) or choose "
            "a smaller weight type"
        )
    return [range(start, stop) for start, stop in zip((0, *stops), stops)]
