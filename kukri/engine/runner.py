"""Runs the steps of a model: owns its KV cache, its compiled programs and its hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.request import ProgramKind
from kukri.kernels.taps import Hooks
from kukri.kernels.types import (
    Backend,
    CompiledProgram,
    FloatArray,
    Hook,
    KVType,
    Logits,
    Program,
    StepLimits,
)
from kukri.models import Model

_N_KEPT = 4  # programs beside the plain one that are kept, each with buffers of its own


class Runner:
    """A model compiled for a backend: for logits without taps at the start, else when it is first wanted.

    Programs for hidden states, and for each set of taps that has hooks, are kept as long as they are among
    those used last: so hooks which come and go compile nothing anew.
    """

    def __init__(
        self, model: Model, backend: Backend, n_pages: int, limits: StepLimits, kv_type: KVType = "f16"
    ) -> None:
        self.model, self.backend, self.limits = model, backend, limits
        self.cache = backend.new_cache(model.cache_layout, n_pages, kv_type=kv_type)
        self.hooks = Hooks()
        self.plain = self._compile("logits", frozenset())
        self._kept: OrderedDict[tuple[ProgramKind, frozenset[str]], Compiled] = OrderedDict()

    def run(self, chunks: Sequence[Chunk], own: OwnTaps | None = None) -> Logits:
        """Runs one step and gives its logits [N, V], valid until the next. Writes its tokens to the cache.

        `own` sees the taps of requests that listen, after the hooks.
        """
        if own is None and not self.hooks:
            program, builder = self.plain
        else:
            program, builder = self._compiled("logits", self._names(own))
        return program(builder.build(chunks), self._listener(own))

    def run_hidden(self, chunks: Sequence[Chunk], own: OwnTaps | None = None) -> Logits:
        """Runs one step and gives hidden states [N, D], the last norm's outputs, instead of logits."""
        program, builder = self._compiled("hidden", self._names(own))
        return program(builder.build(chunks), self._listener(own))

    def _names(self, own: OwnTaps | None) -> frozenset[str]:
        return self.hooks.names if own is None else self.hooks.names | own.names

    def _listener(self, own: OwnTaps | None) -> Hook:
        if own is None:
            return self.hooks

        def listen(name: str, x: FloatArray) -> FloatArray:
            x = self.hooks(name, x)
            own(name, x)
            return x

        return listen

    def _compiled(self, kind: ProgramKind, taps: frozenset[str]) -> Compiled:
        compiled = self._kept.pop((kind, taps), None) or self._compile(kind, taps)
        self._kept[kind, taps] = compiled  # the last used last
        if len(self._kept) > _N_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def _compile(self, kind: ProgramKind, taps: frozenset[str]) -> Compiled:
        model: Program = self.model
        limits = self.limits
        if kind == "hidden":  # its rows are small: there is room for all tokens of a step
            model, limits = self.model.hidden, replace(limits, max_logit_rows=limits.max_tokens)
        program = self.backend.compile(model, self.cache, limits, taps)
        has_types = self.model.config.n_token_types > 0
        builder = BatchBuilder(program.inputs, self.cache.page_tokens, has_types=has_types)
        return Compiled(program, builder)


class OwnTaps(Protocol):
    """The taps of a step's requests."""

    names: frozenset[str]

    def __call__(self, name: str, x: FloatArray) -> None:
        """Shows x [rows, width], to be edited in place."""


class Compiled(NamedTuple):
    """A program, and the arrays of its inputs."""

    program: CompiledProgram
    builder: BatchBuilder
