"""Runs the steps of a model: owns its KV cache, its compiled programs and its hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kukri.engine.batch import BatchBuilder, Chunk
from kukri.kernels.taps import Hooks
from kukri.kernels.types import Backend, CompiledProgram, KVType, Logits, StepLimits
from kukri.models import Model

_N_TAPPED = 4  # programs with taps that are kept, each with buffers of its own


class Runner:
    """A model compiled for a backend: once without taps, and once for each set of taps that has hooks.

    The programs with taps used last are kept, so that hooks which come and go compile nothing anew.
    """

    def __init__(
        self, model: Model, backend: Backend, n_pages: int, limits: StepLimits, kv_type: KVType = "f16"
    ) -> None:
        self.model, self.backend, self.limits = model, backend, limits
        self.cache = backend.new_cache(model.cache_layout, n_pages, kv_type=kv_type)
        self.hooks = Hooks()
        self.plain = self._compile(frozenset())
        self._tapped: OrderedDict[frozenset[str], Compiled] = OrderedDict()  # the last used last

    def run(self, chunks: Sequence[Chunk]) -> Logits:
        """Runs one step and gives its logits, valid until the next. Writes its tokens to the cache."""
        program, builder = self._compiled(self.hooks.names) if self.hooks else self.plain
        return program(builder.build(chunks), self.hooks)

    def _compiled(self, taps: frozenset[str]) -> Compiled:
        compiled = self._tapped.pop(taps, None) or self._compile(taps)
        self._tapped[taps] = compiled
        if len(self._tapped) > _N_TAPPED:
            self._tapped.popitem(last=False)
        return compiled

    def _compile(self, taps: frozenset[str]) -> Compiled:
        program = self.backend.compile(self.model, self.cache, self.limits, taps)
        return Compiled(program, BatchBuilder(program.inputs, self.cache.page_tokens))


class Compiled(NamedTuple):
    """A program, and what fills its inputs."""

    program: CompiledProgram
    builder: BatchBuilder
