"""The engine: requests of token ids in, tokens out, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from time import perf_counter

import numpy as np

from kukri.config import EngineConfig
from kukri.dataclass import dataclass, replace
from kukri.engine.adapters import LoadedAdapters
from kukri.engine.draft_model import Drafter, DraftSetup, DraftSource
from kukri.engine.drafting import Drafting
from kukri.engine.kv_allocator import KVAllocator
from kukri.engine.kv_size import KVCost
from kukri.engine.pages import PagePool, pages_for
from kukri.engine.request import Request
from kukri.engine.request_maker import MOST_ROWS, RequestMaker
from kukri.engine.runner import Runner
from kukri.engine.saved_prefixes import SavedPrefixes
from kukri.engine.scheduled_step import ScheduledChunk, ScheduledStep, StepOutput
from kukri.engine.scheduler import Scheduler
from kukri.engine.sequence import RequestState
from kukri.engine.spans.embedding_spans import NO_SPANS, EmbeddingSpans
from kukri.engine.spans.encoder import SpanEncoder
from kukri.engine.spans.encodings import Encodings
from kukri.engine.states import StatePool
from kukri.engine.step_cost import StepCost, even_depth
from kukri.engine.step_sampler import StepSampler
from kukri.engine.step_taps import StepSpans, StepTaps, attends_both_ways, has_spans
from kukri.errors import ConfigError, KukriError, StageError, UnsupportedError
from kukri.kernels.backend import Backend, Logits
from kukri.kernels.cache import Cache, CacheLayout, KVType, has_states, pool_windows, without_windows
from kukri.kernels.host_step import HostLogits
from kukri.kernels.paged_kv import pages_of_pools, state_bytes
from kukri.kernels.step import StepLimits
from kukri.kernels.taps import Hook, TapListener
from kukri.models import Model
from kukri.models.adapter import Adapter

_ENCODINGS_BYTES = 256 << 20  # the rows of inputs that are kept


@dataclass(eq=False)
class InFlight:
    """A step between `Engine.launch` and `Engine.collect`: its chunks, and the rows they get.

    `logits` are [N, V]; of a step that computes hidden states these, [N, D]. It `is_repeat` if each chunk is
    the next token of a request, whose row is at the same place.
    """

    chunks: list[ScheduledChunk]
    logits: Logits
    is_repeat: bool = False
    prompt_cost: float = 0.0  # cost of its prompts' tokens, in the units of StepCost
    launched_s: float = 0.0
    made_s: float = 0.0  # seconds in which a draft model made drafts for it


class Engine:
    """Runs requests on a model. Not for several threads at a time, but for its `maker` of requests.

    The KV pool has room for `max_requests` requests of `max_context` tokens, for `kv_bytes`, or for `n_pages`
    pages in each pool of pages; its memory is taken as it is used. A model that is to `draft` may have a pool
    of its own with as many pages. `encoders` make the rows of spans. `clock` times steps, in seconds.

    Attributes: maker; model, config, max_context.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        *,
        eos_ids: Iterable[int] = (),
        n_pages: int | Sequence[int] | None = None,
        draft: DraftSource | None = None,
        identity: bytes = b"",
        encoders: Sequence[SpanEncoder] = (),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock, self._collected_s = clock, 0.0
        if not (is_causal := model.config.is_causal):
            # the keys of a token depend on later tokens
            config = replace(config, caches_prefixes=False, prefix_dir=None)
        for encoder in encoders:
            if encoder.attends_both_ways:  # a step has room for a span and all tokens
                most, bounds = encoder.most_run_rows, pool_windows(model.cache_layout)
                if encoder.attends_both_ways == "all" and any(w is not None and w < most for w in bounds):
                    noun = encoder.input_type.noun
                    raise UnsupportedError(
                        f"one {noun} of {most} tokens is not supported: it is longer than a window of the "
                        "text"
                    )
                n_tokens = max(config.max_step_tokens, most + config.max_requests)
                config = replace(config, max_step_tokens=n_tokens)
        self.model, self.config = model, config
        self.max_context, page_tokens = _max_context(config, model), backend.page_tokens
        max_pages = pages_for(self.max_context, page_tokens)
        kv_type = cache_type(config, backend)
        layout = engine_layout(model, config)
        windows = pool_windows(layout)
        cost = KVCost.of(backend, layout, kv_type, config.max_step_tokens)
        if n_pages is None:
            pool_sizes = cost.pool_sizes(config.kv_bytes, config.max_requests, self.max_context)
        else:
            pool_sizes = pages_of_pools(n_pages, len(windows))
        self._has_states = has_states(model.cache_layout)
        n_states = state_slots(config, layout, max(pool_sizes))
        is_large = model.config.head.kind == "language_model"
        n_tokens = config.max_step_tokens if is_causal else max(config.max_step_tokens, self.max_context)
        n_rows = min(MOST_ROWS, n_tokens) if is_large else n_tokens
        max_rows = config.max_requests + n_rows
        sizes = n_tokens, config.max_requests, max_rows, max_pages
        limits = StepLimits(*sizes, free_contexts=not is_causal)
        try:
            self.runner = Runner(model, backend, layout, pool_sizes, limits, kv_type, n_states)
        except MemoryError:
            n_gib = cost.n_bytes(pool_sizes) / 2**30
            raise ConfigError(
                f"a KV cache of {n_gib:.1f} GiB cannot fit into memory: set its size (kv_bytes, "
                "--kv-memory) or lower max_requests (--max-requests) or max_context (--max-context)"
            ) from None
        self.saved_prefixes = _saved_prefixes(config, self.runner.cache)
        pools = [PagePool(n, page_tokens, w, config.max_step_tokens) for n, w in zip(pool_sizes, windows)]
        self.pool, self.adapters = pools[0], LoadedAdapters()
        self.allocator = KVAllocator(
            pools,
            caches_prefixes=config.caches_prefixes,
            saved=self.saved_prefixes,
            states=StatePool(n_states) if self._has_states else None,
        )
        self.scheduler = Scheduler(
            self.allocator,
            config.max_requests,
            config.max_step_tokens,
            config.max_prompt_tokens,
            max_rows,
            needs_one_step=not is_causal,
            cost=StepCost(even_depth(model.config, model.n_parameters), (config.max_step_ms or inf) / 1000),
            n_in_flight=config.max_in_flight,
            row_costs=backend.row_costs,
        )
        self.models = [model] if draft is None else [model, draft.model]
        drafter: Drafter | None = None
        if draft is not None:
            own_sizes = self.max_context, max_pages, max(pool_sizes)
            setup = DraftSetup(self.runner, draft.backend or backend, config, *own_sizes)
            drafter = draft.make(draft.model, setup)
        self.drafting = Drafting(config, model.config.n_vocab, self.max_context, drafter)
        self.maker = RequestMaker(
            model.config,
            backend.sampling,
            pools=pools,
            adapters=self.adapters,
            drafts=self.drafting.drafts_for,
            encoders=encoders,
            max_context=self.max_context,
            max_draft_tokens=config.max_draft_tokens,
            caches_prefixes=config.caches_prefixes,
            eos_ids=eos_ids,
            identity=identity,
        )
        self.encodings = Encodings(self.maker.encoders, _ENCODINGS_BYTES, clock)
        self._in_flight: deque[InFlight] = deque()  # in launch order
        self.sampler = StepSampler(backend.sampling)

    @property
    def arithmetic(self) -> str:
        """A text that is equal for engines that compute the same bits."""
        return f"{self.runner.backend.arithmetic}, {self.config.kv_type}"

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or a step is in flight."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._in_flight)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter of this model usable by a name, between steps.

        Raises ConfigError on a name that is taken or cannot be one, CapacityError if there are too many.
        """
        self.adapters.release()
        self.adapters.add(name, adapter)
        try:
            self.runner.set_adapters(self.adapters.slots)
        except BaseException:
            self.adapters.remove(name)
            self.adapters.release()
            self.runner.set_adapters(self.adapters.slots)
            raise

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter, between steps: no new request may use it; running ones keep it to their end.

        Raises RequestError if there is none of this name.
        """
        self.adapters.remove(name)
        self._release_adapters()

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises CapacityError if it could never get all its pages."""
        self.scheduler.add(request)

    def step(self) -> list[StepOutput]:
        """Collects a step, after launching as many as should be under way, and raises their errors."""
        while len(self._in_flight) < self.config.max_in_flight and self.launch() is not None:
            pass
        return self.collect(self._in_flight[0]) if self._in_flight else []

    def launch(self) -> InFlight | None:
        """Begins a step of the requests that are not in flight; None if there is nothing to compute.

        Any number of steps may be in flight, each of other requests. They run, and are to be collected, in
        the order of their launch. What the model run raises, an error in a hook for example, fails every
        request of this step and is raised.
        """
        if self.maker.encoders:
            self._encode(self.encodings)
        now_s = self._clock()
        scheduled = self.scheduler.schedule()
        chunks = scheduled.chunks
        if not chunks:
            self._copy(scheduled)  # for admitted requests that wait for rows
            return None
        try:
            made_s = self.drafting.add_to(scheduled, self.scheduler, self._clock)
            chunks = scheduled.chunks
            if self._in_flight:  # the next run overwrites the logits of the last
                self._in_flight[-1].logits = self._in_flight[-1].logits.copy()
            if scheduled.is_repeat:
                listeners = self._listeners(chunks) if scheduled.has_listeners else ()
                logits = self.runner.run(chunks, *listeners)
            else:
                logits = self._run(scheduled)
            step = InFlight(chunks, logits, scheduled.is_repeat, scheduled.prompt_cost, now_s, made_s)
        except StageError as error:
            self._begin_again(error)
            return None
        except BaseException as error:
            self._fail([chunk.request for chunk in chunks], error)
            raise
        for chunk in chunks:
            chunk.sequence.is_in_flight = True
        self._in_flight.append(step)
        return step

    def _run(self, scheduled: ScheduledStep) -> Logits:
        """Runs a step that repeats no other."""
        chunks, now_s = scheduled.chunks, perf_counter()
        if self.runner.adapters:
            chunks.sort(key=lambda chunk: chunk.sequence.adapter_slot)  # rows of one adapter side by side
        for chunk in chunks:
            chunk.request.times.started_s = chunk.request.times.started_s or now_s
        self._copy(scheduled)
        run = self.runner.run if scheduled.program == "logits" else self.runner.run_hidden
        if not has_spans(chunks):
            listeners = self._listeners(chunks)
            scheduled.has_listeners = bool(listeners)
            return run(chunks, *listeners)
        scheduled.has_listeners = True
        # spans whose rows see each other come first, in programs of their own
        chunks.sort(key=attends_both_ways, reverse=True)
        logits: list[Logits] = []
        for layers, group in groupby(chunks, attends_both_ways):
            part = list(group)
            logits.append(run(part, *self._listeners(part), attends_both_ways=layers))
        if not any(map(len, logits[:-1])):
            return logits[-1]
        return HostLogits(np.concatenate([each.numpy() for each in logits]))

    def _listeners(self, chunks: Sequence[ScheduledChunk]) -> list[TapListener]:
        """Return the listeners of a step, each of which sees what those before it left.

        What writes rows of spans comes before the hooks. The list is empty if only hooks listen.
        """
        before: list[TapListener] = [StepSpans(chunks)] if has_spans(chunks) else []
        after: list[TapListener] = []
        if any(chunk.request.listeners for chunk in chunks):
            after.append(StepTaps(chunks))
        after += self.drafting.taps(chunks)
        return [*before, self.runner.hooks, *after] if before or after else []

    def _copy(self, scheduled: ScheduledStep) -> None:
        """Writes the pages and states that requests are to begin with."""
        for source, target, pool in scheduled.copies:
            self.runner.cache.copy_page(source, target, pool)
        for source, target in scheduled.state_copies:
            self.runner.cache.copy_state(source, target)
        for slot, contents in scheduled.state_writes:
            self.runner.cache.set_state_data(slot, contents)

    def _encode(self, encodings: Encodings) -> None:
        """Encodes, for some milliseconds, the input that a running request needs next.

        What the encoder raises fails the request that needs the input, and is raised.
        """
        waiting: list[tuple[EmbeddingSpans, int]] = []
        for request in self.scheduler.running:
            sequence = request.sequence
            spans = NO_SPANS if sequence.may_restore else sequence.spans  # saved pages may hold its rows
            while (number := spans.wanted(sequence.n_cached)) is not None:
                rows = encodings.find(spans.inputs[number])
                if rows is None:
                    waiting.append((spans, number))
                    break
                spans.rows[number] = rows
        if not waiting:
            return
        begun = [each for each in waiting if encodings.is_under_way(each[0].inputs[each[1]])]
        spans, number = (begun or waiting)[0]
        try:
            rows = encodings.advance(spans.inputs[number], is_brief=self.scheduler.generates)
        except BaseException as error:
            self._fail([r for r in self.scheduler.running if r.sequence.spans is spans], error)
            raise
        if rows is not None:
            spans.rows[number] = rows

    def collect(self, step: InFlight) -> list[StepOutput]:
        """Waits for the oldest step in flight; returns its tokens, and the requests that failed.

        A request whose logits are unusable fails alone; one that ended while in flight gets nothing. What the
        backend raises fails every request of the step and is raised.
        """
        assert step is self._in_flight[0], "steps are collected in the order in which they were launched"
        self._in_flight.popleft()
        chunks, is_repeat = step.chunks, step.is_repeat
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.is_in_flight = False
            if sequence.state is RequestState.FINISHED:
                is_repeat = False
                self.scheduler.release_ended(chunk.request)
        try:
            if is_repeat:
                tokens = self.sampler.sample_each(chunks, step.logits)
                _note_stages(step)
                outputs = self.scheduler.postprocess_each(chunks, tokens, perf_counter())
            else:
                results = self.sampler.sample(chunks, step.logits)
                _note_stages(step)
                outputs = self.scheduler.postprocess(chunks, results, perf_counter())
        except StageError as error:
            self._begin_again(error)
            return []
        except BaseException as error:
            self._fail([chunk.request for chunk in chunks], error)
            raise
        if self.runner.adapters and self.adapters.has_leaving:
            self._release_adapters()
        self._rest()
        began_s, self._collected_s = max(step.launched_s, self._collected_s), self._clock()
        self.scheduler.cost.observe(step.prompt_cost, self._collected_s - began_s)
        if not step.prompt_cost:
            n_drafts = 0 if step.is_repeat else sum(chunk.n_drafts for chunk in chunks)
            spent_s = self._collected_s - began_s - step.made_s
            self.scheduler.row_costs.observe(len(chunks), n_drafts, spent_s)
        return outputs

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request between steps, for example at a stop string; one that ended stays so."""
        if not request.has_ended:
            self._end(request, reason, stop_reason)

    def abort(self, request: Request) -> None:
        """Aborts a request; its pages are free at once."""
        self.finish(request, "abort")

    def keep(self, request: Request) -> None:
        """Keeps the pages of a request that has ended longer than others: its conversation will continue."""
        self.allocator.keep(request.sequence)

    def close(self) -> None:
        """Waits until prefixes that are to be saved are on the disk. No step may follow."""
        if self.saved_prefixes is not None:
            self.saved_prefixes.close()

    def add_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Makes each hook listen on its full name. Tokens that a hook saw or edited are not cached as
        prefixes.
        """
        self.runner.hooks.add(hooks)
        self._forget_prefixes()

    def remove_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Undoes `add_hooks` with the same argument."""
        self.runner.hooks.remove(hooks)
        self._forget_prefixes()

    def check_integrity(self) -> None:
        """Asserts that requests and pages agree: nothing lost, nothing held twice."""
        self.scheduler.check_integrity()
        self.drafting.check_integrity((*self.scheduler.running, *self.scheduler.ending))

    def _release_adapters(self) -> None:
        """Gives back the slots of adapters that are unloaded and that no request uses any more."""
        if self.adapters.release():
            self.runner.set_adapters(self.adapters.slots)

    def _begin_again(self, error: StageError) -> None:
        """Sends running requests back to the queue after a stage was lost, with all keys and values.

        A request without a token since the last loss may be the cause, and ends with the error, which is then
        raised.
        """
        for step in self._in_flight:
            for chunk in step.chunks:
                chunk.sequence.is_in_flight = False
                if chunk.request.has_ended:
                    self.scheduler.release_ended(chunk.request)
        self._in_flight.clear()
        self._forget_prefixes()
        has_failed = False
        for request in reversed(self.scheduler.running.copy()):
            if request.sequence.n_generated_at_loss == request.n_generated:
                request.answer.error, has_failed = error, True
                self.scheduler.finish(request, "error")
            else:
                request.sequence.n_generated_at_loss = request.n_generated
                self.scheduler.preempt(request)
        if has_failed:
            raise error

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """Ends the requests of a step that raised."""
        for request in requests:
            if request.sequence.state is RequestState.RUNNING:
                text = str(error) or type(error).__name__
                request.answer.error = error if isinstance(error, KukriError) else KukriError(text)
                self._end(request, "error")

    def _end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        self.scheduler.finish(request, reason, stop_reason)
        self._rest()

    def _rest(self) -> None:
        """While nothing runs, keeps nothing of the last requests: their rows and grammars may be large."""
        if not self.scheduler.running and not self._in_flight:
            self.runner.forget()

    def _forget_prefixes(self) -> None:
        """Nothing computed so far is shared with requests to come, and nothing while hooks listen."""
        self.allocator.forget()
        self.scheduler.start_over()
        for request in (*self.scheduler.running, *self.scheduler.ending):
            request.sequence.n_cached_pages, request.sequence.is_cacheable = 0, False
        self.allocator.caches_prefixes = self.config.caches_prefixes and not self.runner.hooks
        # a hook sees each token of a sequence once, and none that is not in it
        self.scheduler.takes_drafts = not self.runner.hooks


def _note_stages(step: InFlight) -> None:
    """Tells a step's requests, if the model is cut into stages, how long these took."""
    stage_s = getattr(step.logits, "stage_s", None)
    if stage_s is not None:
        for chunk in step.chunks:
            chunk.request.times.note_stages(*stage_s)


def _saved_prefixes(config: EngineConfig, cache: Cache) -> SavedPrefixes | None:
    """The saved pages and states of a cache. Raises ConfigError if their directory cannot be used."""
    if config.prefix_dir is None:
        return None
    return SavedPrefixes(cache, Path(config.prefix_dir).expanduser(), config.prefix_bytes)


def cache_type(config: EngineConfig, backend: Backend) -> KVType:
    """The type of the KV cache: "f16" stands for the widest a backend has, float32 on the reference."""
    return backend.exact_kv_type if config.kv_type == "f16" else config.kv_type


def engine_layout(model: Model, config: EngineConfig) -> CacheLayout:
    """The layout of the engine's cache: saved prefixes need all pages of all layers, and so one pool."""
    return without_windows(model.cache_layout) if config.prefix_dir is not None else model.cache_layout


def state_slots(config: EngineConfig, layout: CacheLayout, n_pages: int) -> int:
    """Slots of recurrent states: one for each running request and each snapshot; 0 without states."""
    n_bytes = state_bytes(layout)
    if not n_bytes:
        return 0
    n_snapshots = min(config.snapshot_bytes // n_bytes, n_pages) if config.caches_prefixes else 0
    return config.max_requests + n_snapshots


def _max_context(config: EngineConfig, model: Model) -> int:
    limit = model.config.max_context
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(
            f"'max_context' must be at most the model's {limit} tokens, not {config.max_context}: use "
            "--rope-scaling with --rope-factor (rope_scaling, rope_factor)"
        )
    return config.max_context or limit
