"""Runs the steps of a model: owns its KV cache, its compiled programs and its hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.request import ProgramKind
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend, CompiledProgram, Logits
from kukri.kernels.cache import CacheLayout, KVType, has_states
from kukri.kernels.op_set import Program
from kukri.kernels.step import StepLimits
from kukri.kernels.taps import Hooks, TapListener, in_turn
from kukri.kernels.weight_handles import AdapterSlots
from kukri.models import Model
from kukri.models.both_ways import BothWays, BothWaysLayers, RowKeeper

_N_KEPT = 4  # programs with taps that are kept besides the plain one, each with its own buffers
_N_SPARE_TAPS = 32  # extra taps that a compiled step may stop at, which costs about 20 us each


class _Variant(NamedTuple):
    """What programs differ in besides their taps."""

    kind: ProgramKind
    has_adapters: bool = False
    attends_both_ways: BothWaysLayers = ""


class Runner:
    """A model compiled for a backend: for logits without taps at the start, else when it is first wanted.

    Programs for hidden states, for adapters, and for sets of taps that have hooks, are kept as long as they
    are among those used last, and serve steps that need somewhat fewer taps too: so adding and removing
    hooks does not recompile. A step whose sequences have no adapter runs a program without any.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        limits: StepLimits,
        kv_type: KVType = "f16",
        n_states: int = 0,
    ) -> None:
        self.model, self.backend, self.limits = model, backend, limits
        self.cache = backend.new_cache(layout, n_pages, n_states, kv_type)
        self.hooks = Hooks()
        self.plain = self._compile(_Variant("logits"), frozenset())
        self.adapters: AdapterSlots = ()
        self._kept: OrderedDict[tuple[_Variant, frozenset[str]], Compiled] = OrderedDict()

    def set_adapters(self, adapters: AdapterSlots) -> None:
        """Replaces the adapters, and compiles a program with them for logits."""
        for key in [key for key in self._kept if key[0].has_adapters]:
            del self._kept[key]
        self.adapters = adapters
        if adapters:
            self._compiled("logits", frozenset(), True)

    def run(
        self,
        chunks: Sequence[Chunk],
        *listeners: TapListener,
        attends_both_ways: BothWaysLayers = "",
        activations: FloatArray | None = None,
    ) -> Logits:
        """Runs one step and gives its logits [N, V], valid until the next. Writes its tokens to the cache.

        `listeners` see the step's taps one after another; without any the hooks alone do. With
        `attends_both_ways` a token attends to the later tokens of its chunk too, in those layers.
        `activations` [T, D] are for a program that reads them.
        """
        has_adapters = self._has_adapters(chunks)
        if not listeners and not self.hooks and not has_adapters:
            program, builder = self.plain
        else:
            taps = _names(listeners or [self.hooks])
            program, builder = self._compiled("logits", taps, has_adapters, attends_both_ways)
        return program(builder.build(chunks, activations), in_turn(listeners) if listeners else self.hooks)

    def run_hidden(
        self, chunks: Sequence[Chunk], *listeners: TapListener, attends_both_ways: BothWaysLayers = ""
    ) -> Logits:
        """Runs one step and gives hidden states [N, D], the last norm's outputs, instead of logits."""
        has_adapters = self._has_adapters(chunks)
        listeners = listeners or (self.hooks,)
        program, builder = self._compiled("hidden", _names(listeners), has_adapters, attends_both_ways)
        return program(builder.build(chunks), in_turn(listeners))

    def forget(self) -> None:
        """Keeps nothing of the last step's requests."""
        for compiled in (self.plain, *self._kept.values()):
            compiled.builder.forget()

    def _has_adapters(self, chunks: Sequence[Chunk]) -> bool:
        return bool(self.adapters) and any(chunk.sequence.adapter_slot >= 0 for chunk in chunks)

    def _compiled(
        self,
        kind: ProgramKind,
        taps: frozenset[str],
        has_adapters: bool,
        attends_both_ways: BothWaysLayers = "",
    ) -> Compiled:
        variant = _Variant(kind, has_adapters, attends_both_ways)
        if (variant, taps) not in self._kept and taps:
            # one with more taps only stops more often: adding and removing requests does not recompile
            most = len(taps) + _N_SPARE_TAPS
            alike = [more for a_variant, more in self._kept if a_variant == variant]
            taps = min((more for more in alike if taps < more and len(more) <= most), key=len, default=taps)
        compiled = self._kept.pop((variant, taps), None) or self._compile(variant, taps)
        self._kept[variant, taps] = compiled  # the last used last
        if len(self._kept) > _N_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def _compile(self, variant: _Variant, taps: frozenset[str]) -> Compiled:
        model: Program = self.model
        limits, has_adapters = self.limits, variant.has_adapters
        if variant.kind == "hidden":  # its rows are small: there is room for all tokens of a step
            model, limits = self.model.hidden, replace(limits, max_logit_rows=limits.max_tokens)
        if variant.attends_both_ways == "cross":
            assert isinstance(self.model, RowKeeper), "no other model has such spans"
            model = self.model.keep_rows
        elif variant.attends_both_ways:
            model = BothWays(model, variant.attends_both_ways)
        adapters = self.adapters if has_adapters else ()
        program = self.backend.compile(model, self.cache, limits, taps, adapters)
        has_types = self.model.config.n_token_types > 0
        builder = BatchBuilder(
            program.inputs,
            self.cache.page_tokens,
            has_types=has_types,
            has_states=has_states(self.cache.layout),
            has_adapters=has_adapters,
            has_axes=bool(self.model.config.rope.axes),
        )
        return Compiled(program, builder)


class Compiled(NamedTuple):
    """A program, and the arrays of its inputs."""

    program: CompiledProgram
    builder: BatchBuilder


def _names(listeners: Iterable[TapListener]) -> frozenset[str]:
    """Return the taps that any of the listeners needs."""
    return frozenset().union(*(listener.names for listener in listeners))
