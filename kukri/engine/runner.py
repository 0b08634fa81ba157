"""Runs the steps of a model: owns the KV cache, the compiled program and the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kukri.kernels.types import (
    Backend,
    CompiledProgram,
    FloatArray,
    ForwardBatch,
    Hook,
    KVType,
    PagedKV,
    StepLimits,
)
from kukri.models import Model


class Runner:
    """A model compiled for a backend. The program without hooks is made once, at the start, and kept."""

    def __init__(
        self, model: Model, backend: Backend, n_pages: int, limits: StepLimits, kv_type: KVType = "f16"
    ) -> None:
        config = model.config
        self.model, self.backend, self.limits = model, backend, limits
        self.cache = PagedKV(config.n_layers, n_pages, config.n_kv_heads, config.d_head, kv_type)
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

    def copy_page(self, source: int, target: int) -> None:
        """Copies what a page holds, for a request that is about to write where others read."""
        self.cache.keys[:, target] = self.cache.keys[:, source]
        self.cache.values[:, target] = self.cache.values[:, source]

    def clear_places(self, page: int, first: int) -> None:
        """Zeroes the places `first` and after of a page, which may hold NaN."""
        keys, values = self.cache.keys[:, page], self.cache.values[:, page]
        for name in keys.dtype.names or (None,):
            (keys if name is None else keys[name])[..., first:] = 0
            (values if name is None else values[name])[:, :, first:] = 0

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages that may hold NaN: whoever gets them next must not meet it."""
        self.cache.keys[:, pages] = 0
        self.cache.values[:, pages] = 0
