"""The backend of a model cut into stages: the last one runs here, on a backend of this process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kukri.errors import ConfigError, StageError, UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend, CompiledProgram, Logits, SamplingBackend
from kukri.kernels.cache import Cache, CacheLayout, KVLayer, KVType, StateLayer, pool_layouts, pool_windows
from kukri.kernels.host_step import check_sizes
from kukri.kernels.op_set import Program
from kukri.kernels.paged_kv import pages_of_pools
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots
from kukri.models import Model
from kukri.stages.cut import StageRoom, cut_layers, model_bytes
from kukri.stages.messages import Kind, numbers_to_bytes, step_from_bytes, step_to_bytes
from kukri.stages.pipeline import Opening, Pipeline
from kukri.stages.program import stage_layout
from kukri.stages.stage import Stage

logger = logging.getLogger("kukri.stages")

_ALONE = "cannot be combined with stages (--stages) or devices (--devices)"


class StagedBackend(Backend):
    """Runs the steps of one model through a pipeline, and its sampling here.

    A step is under way from the call of a program until its logits are read.
    """

    begins_at_taps = False

    def __init__(
        self,
        local: Backend,
        model: Model,
        pipeline: Pipeline,
        openings: Sequence[Mapping[str, Any]],
        cache_bytes: Sequence[int],
        rooms: Sequence[StageRoom],
    ) -> None:
        """`openings` are the options with which each stage of the pipeline opens the model, `cache_bytes` the
        bytes that the cache of each layer needs, `rooms` the resources of each stage. Raises ConfigError for
        a model that cannot be cut.
        """
        if model.config.d_per_layer or any(layer.kv_from is not None for layer in model.config.layers):
            raise ConfigError(
                "this model cannot be split into stages (--stages, --devices), because its layers share "
                "embeddings, keys or values"
            )
        self.local, self._model, self.pipeline, self._openings = local, model, pipeline, openings
        self._rooms = rooms
        self.name, self.exact_kv_type = local.name, local.exact_kv_type
        self.page_tokens, self.row_costs = local.page_tokens, local.row_costs
        self._weights = model_bytes(model)
        self.cut = cut_layers(self._weights, cache_bytes, rooms)
        self._cache: StagedCache | None = None

    @property
    def is_batch_invariant(self) -> bool:
        return self.local.is_batch_invariant

    @property
    def arithmetic(self) -> str:
        """See Backend.arithmetic: stages change no bit."""
        return self.local.arithmetic

    @property
    def sampling(self) -> SamplingBackend:
        return self.local.sampling

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        """See Backend.page_bytes: of all stages."""
        return self.local.page_bytes(layout, kv_type)

    def _pool_bytes(self, layout: CacheLayout) -> list[int]:
        """Bytes of a page of each pool."""
        return [self.page_bytes(layers, self.exact_kv_type) for layers in pool_layouts(layout)]

    def free_bytes(self) -> int:
        """The memory that one process would need for as many pages as the fullest memory has room for.

        That is of the pool of which the most is in one memory: its layers may be the most of the cache.
        """
        layout, weights, n_layers = self._model.cache_layout, self._weights, self._model.config.n_layers
        whole = self._pool_bytes(layout)
        free: dict[str, int] = {}
        own: dict[str, list[int]] = {}  # bytes of a page of each pool
        for layers, room in zip(self.cut, self._rooms, strict=True):
            free[room.memory] = free.get(room.memory, room.free_bytes) - weights.held(layers)
            part, before = self._pool_bytes(stage_layout(layout, layers, n_layers)), own.get(room.memory)
            own[room.memory] = part if before is None else [a + b for a, b in zip(before, part)]
        shares = ((n, zip(whole, own[name])) for name, n in free.items())
        left = min(n * total // held for n, pools in shares for total, held in pools if held)
        return weights.held(range(len(weights.layers))) + left

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> StagedCache:
        """See Backend.new_cache. Raises UnsupportedError on a second one."""
        if self._cache is not None:
            raise UnsupportedError(f"a cache of one's own {_ALONE}")
        n_pages = pages_of_pools(n_pages, len(pool_windows(layout)))
        stage = Stage(self._model, self.local, self.cut[-1], n_pages, n_states, kv_type)
        self._cache = StagedCache(layout, stage, self.pipeline)
        return self._cache

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """See Backend.compile. The first time the other stages load their layers meanwhile.

        Raises UnsupportedError on taps and adapters.
        """
        if cache is None:  # no layer of the model takes part
            return self.local.compile(program, cache, limits, taps, adapters)
        assert isinstance(cache, StagedCache), "a cache belongs to the backend that made it"
        if taps or adapters or limits.mask_heads:
            what = (
                "an adapter"
                if adapters
                else "a mask"
                if limits.mask_heads
                else "looking into a model's layers"
            )
            raise UnsupportedError(f"{what} {_ALONE}")
        if cache.is_open:
            return StagedProgram(cache, cache.stage.compile(program, limits), limits)
        self.pipeline.open(self._opening(cache, limits))
        try:
            compiled = cache.stage.compile(program, limits)
            self._check(self.pipeline.wait())
        except BaseException:
            self.pipeline.close()
            raise
        cache.is_open = True
        return StagedProgram(cache, compiled, limits)

    def close(self) -> None:
        """Ends the stages, and the threads of this one."""
        self.pipeline.close()
        self.pipeline.source.close()
        close = getattr(self.local, "close", None)
        if close is not None:
            close()

    def _opening(self, cache: StagedCache, limits: StepLimits) -> Opening:
        """The settings that open the pipeline's stages."""
        config, own = self._model.config, cache.stage.cache
        # rows of logits take no memory there, and programs for hidden states want one for each token
        rows = max(limits.max_logit_rows, limits.max_tokens)
        limits = StepLimits(limits.max_tokens, limits.max_sequences, rows, limits.max_pages)
        sizes = {"n_pages": own.n_pages, "n_states": own.n_states, "kv_type": own.kv_type}
        steps = [limits.max_tokens, limits.max_sequences, rows, limits.max_pages]
        parts = tuple(
            {**opening, **sizes, "layers": [layers.start, layers.stop], "limits": steps}
            for opening, layers in zip(self._openings, self.cut)
        )
        return Opening(parts, limits, config.d_model, len(own.n_pages))

    def _check(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """Compares the stages with this process. Raises ConfigError on other weights."""
        for i, (facts, opening) in enumerate(zip(stages, self._openings), 1):
            if facts["identity"] != opening["identity"]:
                raise ConfigError(f"stage {i} must have the same files under the name of this model")
            if facts["arithmetic"] != self.arithmetic:
                logger.warning(
                    "stage %d computes with %s and this process with %s, so results differ from the "
                    "results of one process",
                    *(i, facts["arithmetic"], self.arithmetic),
                )


class StagedCache(Cache):
    """See Cache. Changes reach the stages in order with the steps before and after."""

    def __init__(self, layout: CacheLayout, stage: Stage, pipeline: Pipeline) -> None:
        self.layout: tuple[KVLayer | StateLayer, ...] = tuple(layout)
        self.stage, self.pipeline = stage, pipeline
        own = stage.cache
        self.n_pages, self.n_states, self.kv_type = own.n_pages, own.n_states, own.kv_type
        self.page_tokens = own.page_tokens
        self.is_open = False  # the stages of the pipeline have their layers
        self.todo: deque[StagedLogits | Callable[[], None]] = deque()  # for this stage, in order

    @property
    def n_bytes(self) -> int:
        """Bytes reserved in this process."""
        return self.stage.cache.n_bytes

    def copy_page(self, source: int, target: int, pool: int = 0) -> None:
        self._change(Kind.COPY_PAGE, source, target, pool)

    def copy_state(self, source: int, target: int) -> None:
        self._change(Kind.COPY_STATE, source, target)

    def state_data(self, slot: int) -> bytes:
        """Raises UnsupportedError: its layers are in several processes."""
        raise UnsupportedError(f"saving a state {_ALONE}")

    def set_state_data(self, slot: int, data: bytes | memoryview) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"reading a state {_ALONE}")

    def page_data(self, pages: Sequence[int]) -> bytes:
        """Raises UnsupportedError: its layers are in several processes."""
        raise UnsupportedError(f"saving a page {_ALONE}")

    def set_page_data(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Raises UnsupportedError, as `page_data` does."""
        raise UnsupportedError(f"reading a saved page {_ALONE}")

    def collect(self, wanted: StagedLogits) -> None:
        """Computes this stage's part of the steps up to one that is wanted. Raises StageError."""
        while wanted.collected is None:
            if wanted not in self.todo:
                raise StageError("the step was lost with a stage")
            first = self.todo.popleft()
            if isinstance(first, StagedLogits):
                with self.losing():
                    activations, computed_s = self.pipeline.activations()
                    first.stage_s = perf_counter() - first.sent_s, computed_s
                    first.compute(activations)
            else:
                first()

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Within the block a StageError loses all steps under way."""
        try:
            yield
        except StageError:
            self.todo.clear()
            raise

    def _change(self, kind: Kind, *numbers: int) -> None:
        body = numbers_to_bytes(*numbers)
        if self.todo:
            self.todo.append(lambda: self.stage.change(kind, memoryview(body)))
        else:
            self.stage.change(kind, memoryview(body))
        self.pipeline.change(kind, body)


class StagedProgram:
    """A program whose last layers run here: see CompiledProgram. A call does not wait for its step."""

    def __init__(self, cache: StagedCache, last: CompiledProgram, limits: StepLimits) -> None:
        """`last` is the part of this process."""
        self.inputs = StepInputs.zeros(limits, len(cache.n_pages))
        self._cache, self._last, self._limits = cache, last, limits

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> StagedLogits:
        """See CompiledProgram. Raises StageError if a stage is lost."""
        check_sizes(batch, self._limits)
        step = step_to_bytes(batch, self._cache.page_tokens)
        logits = StagedLogits(self._cache, self._last, self._limits, step, batch.n_logit_rows)
        with self._cache.losing():
            self._cache.pipeline.broadcast(Kind.STEP, step)
        self._cache.todo.append(logits)
        return logits


class StagedLogits(Logits):
    """See Logits. The first read waits for the step; each of several steps under way has logits of its own.

    Attributes: stage_s, the seconds until the other stages had done the step, and the seconds they computed.
    """

    def __init__(
        self, cache: StagedCache, last: CompiledProgram, limits: StepLimits, step: bytes, n_rows: int
    ) -> None:
        self._cache, self._last, self._limits, self._step, self._n_rows = cache, last, limits, step, n_rows
        self.collected: Logits | None = None
        self.sent_s = perf_counter()
        self.stage_s = 0.0, 0.0

    def compute(self, activations: FloatArray) -> None:
        """Runs the last stage."""
        self.collected = self._last(step_from_bytes(self._step, self._limits, self._last.inputs, activations))

    def __len__(self) -> int:
        """Does not wait."""
        return self._n_rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self._wait().shape

    def take(self, rows: Sequence[int]) -> Logits:
        return self._wait().take(rows)

    def copy(self) -> StagedLogits:
        """Logits of a stage are valid until a later step has been looked at."""
        return self

    def numpy(self) -> FloatArray:
        return self._wait().numpy()

    def has_nan(self, row: int) -> bool:
        return self._wait().has_nan(row)

    def logit(self, row: int, token_id: int) -> float:
        return self._wait().logit(row, token_id)

    def argmax(self) -> list[int]:
        return self._wait().argmax()

    def _wait(self) -> Logits:
        if self.collected is None:
            self._cache.collect(self)
        assert self.collected is not None, "the step has been collected"
        return self.collected
