"""Runs the steps of a model: owns the KV cache, the compiled program and the hooks."""

from __future__ import annotations

from collections.abc import Mapping

from kukri.kernels.types import (
    Backend,
    CompiledProgram,
    FloatArray,
    ForwardBatch,
    Hook,
    KVType,
    StepLimits,
)
from kukri.models import Model


class Runner:
    """A model compiled for a backend. The program without hooks is made once, at the start, and kept."""

    def __init__(
        self, model: Model, backend: Backend, n_pages: int, limits: StepLimits, kv_type: KVType = "f16"
    ) -> None:
        self.model, self.backend, self.limits = model, backend, limits
        self.cache = backend.new_cache(model.cache_layout, n_pages, kv_type=kv_type)
        self.hooks: dict[str, list[Hook]] = {}
        self._plain = backend.compile(model, self.cache, limits, {})
        self._program: CompiledProgram | None = self._plain  # None: to be compiled with the hooks of now

    def run(self, batch: ForwardBatch) -> FloatArray:
        """Runs one step -> logits [N, V], valid until the next. Writes the batch's tokens to the cache."""
        if self._program is None:
            self._program = self.backend.compile(self.model, self.cache, self.limits, dict(self.hooks))
        return self._program(batch)

    def add_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Makes each hook listen on its full name, after those that already do."""
        for name, hook in hooks.items():
            self.hooks[name] = [*self.hooks.get(name, []), hook]
        self._program = None if self.hooks else self._plain

    def remove_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Takes back what `add_hooks` did with the same argument."""
        for name, hook in hooks.items():
            listeners = list(self.hooks[name])
            listeners.remove(hook)
            if listeners:
                self.hooks[name] = listeners
            else:
                del self.hooks[name]
        self._program = None if self.hooks else self._plain
