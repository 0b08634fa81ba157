"""A stage: some layers of a model on a backend, and the cache of these layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kukri.errors import StageError
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.cache import KVType
from kukri.kernels.op_set import Program
from kukri.kernels.step import StepLimits
from kukri.models import Model
from kukri.stages.messages import Kind, numbers_from_bytes
from kukri.stages.program import StageProgram, stage_layout


class Stage:
    """Runs `layers` of a model. All stages number pages and slots of states alike."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        layers: range,
        n_pages: Sequence[int],
        n_states: int,
        kv_type: KVType,
    ) -> None:
        self._model, self._backend, self._layers = model, backend, layers
        layout = stage_layout(model.cache_layout, layers, model.config.n_layers)
        self.cache = backend.new_cache(layout, n_pages, n_states, kv_type)

    def compile(self, program: Program, limits: StepLimits) -> CompiledProgram:
        """The part of a program of this model that the stage runs."""
        config = self._model.config
        part = StageProgram(program, self._layers, config.n_layers, config.d_model)
        return self._backend.compile(part, self.cache, replace(limits, free_contexts=not config.is_causal))

    def change(self, kind: Kind, body: memoryview) -> None:
        """Change the cache. Raises StageError for pages and slots that do not exist."""
        numbers, cache = numbers_from_bytes(body).tolist(), self.cache
        match kind, len(numbers):
            case Kind.COPY_PAGE, 3:
                source, target, pool = numbers
                _check([pool], len(cache.n_pages))
                _check([source, target], cache.n_pages[pool])
                cache.copy_page(source, target, pool)
            case Kind.COPY_STATE, 2:
                _check(numbers, cache.n_states)
                cache.copy_state(*numbers)
            case _:
                raise StageError(f"{len(numbers)} numbers in a message {kind.name}")


def _check(numbers: Sequence[int], n: int) -> None:
    if not all(0 <= number < n for number in numbers):
        raise StageError("a change to the cache outside of it")
