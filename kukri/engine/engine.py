"""The engine: requests of token ids in, tokens out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kukri.config import PAGE_TOKENS, EngineConfig
from kukri.engine.batch import BatchBuilder
from kukri.engine.pages import PagePool, pages_for
from kukri.engine.request import Request, RequestState
from kukri.engine.runner import Runner
from kukri.engine.scheduler import ScheduledChunk, Scheduler, StepOutput
from kukri.errors import ConfigError, ContextLengthError, KukriError, RequestError
from kukri.kernels.types import Backend, FloatArray, IntArray, StepLimits
from kukri.models import Model
from kukri.sampling import RequestSampler, SampledToken, SamplingParams

_ROWS_PER_STEP = 64  # of `Engine.logits`; a row of logits is large, and all of them are made room for


class Engine:
    """Runs requests on a model. Not for several threads at a time.

    `eos_ids` end a request unless it ignores them. The KV pool has room for `max_requests` requests of
    `max_context` tokens, or `n_pages` pages; its memory is taken as it is used.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        *,
        eos_ids: Iterable[int] = (),
        n_pages: int | None = None,
    ) -> None:
        self.model, self.config = model, config
        self.max_context = _max_context(config, model)
        self.eos_ids = frozenset(eos_ids)
        max_pages = pages_for(self.max_context)
        n_pages = config.max_requests * max_pages if n_pages is None else n_pages
        self._rows_per_step = min(_ROWS_PER_STEP, config.max_step_tokens)
        max_rows = max(config.max_requests, self._rows_per_step)
        limits = StepLimits(config.max_step_tokens, config.max_requests, max_rows, max_pages)
        try:
            self.runner = Runner(model, backend, n_pages, limits)
        except MemoryError:
            n_gib = n_pages * PAGE_TOKENS * model.config.kv_bytes_per_token / 2**30
            raise ConfigError(f"no memory for a KV cache of {n_gib:.1f} GiB: lower max_context") from None
        self.pool = PagePool(n_pages)
        self.scheduler = Scheduler(self.pool, config.max_requests, config.max_step_tokens)
        self._builder = BatchBuilder(limits)
        self._row_ops = backend.row_ops
        self._n_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def make_request(self, prompt_ids: npt.ArrayLike, params: SamplingParams | None = None) -> Request:
        """A request, checked and not yet queued: see `add_request`.

        Raises RequestError on an empty prompt or ids outside the vocabulary, ContextLengthError on a prompt
        longer than the context.
        """
        params = params or SamplingParams()
        prompt = self._checked_prompt(prompt_ids)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        sampler = RequestSampler(params, prompt, self.model.config.n_vocab, eos_ids, self._row_ops)
        self._n_requests += 1
        stop_ids = eos_ids.union(params.stop_token_ids)
        return Request(self._n_requests, prompt, params, sampler, stop_ids, self.max_context)

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises CapacityError where it could never get all its pages."""
        self.scheduler.add(request)

    def step(self) -> list[StepOutput]:
        """Runs one step and gives the requests that got a token or failed.

        A request whose logits are unusable fails alone. What the model run itself raises, a hook's error for
        one, fails every request of the step and is raised.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        started_s = perf_counter()
        for chunk in chunks:
            chunk.request.started_s = chunk.request.started_s or started_s
        try:
            logits = self.runner.run(self._builder.build(chunks))
            results = self._sample(chunks, logits)
        except BaseException as error:
            for chunk in chunks:
                chunk.request.error = error if isinstance(error, KukriError) else KukriError(str(error))
                self._end(chunk.request, "error")
            raise
        return self.scheduler.postprocess(chunks, results, perf_counter())

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request between steps, as where its text met a stop string; one that ended stays so."""
        if request.state is not RequestState.FINISHED:
            self._end(request, reason, stop_reason)

    def abort(self, request: Request) -> None:
        """Ends a request nobody waits for; its pages are free at once."""
        self.finish(request, "abort")

    def logits(self, token_ids: npt.ArrayLike) -> FloatArray:
        """Logits float32 [T, V] of every token of one text, computed at once, beside the requests.

        Raises what `make_request` does, and CapacityError where the running requests leave too few pages.
        """
        request = self.make_request(token_ids)
        n_tokens = request.n_tokens
        result = np.empty((n_tokens, self.model.config.n_vocab), np.float32)
        pages = self.pool.allocate(pages_for(n_tokens))
        try:
            request.page_row[: len(pages)] = pages
            for start in range(0, n_tokens, self._rows_per_step):
                n = min(self._rows_per_step, n_tokens - start)
                chunk = ScheduledChunk(request, start, n, n)
                result[start : start + n] = self.runner.run(self._builder.build([chunk]))
        finally:
            self.runner.clear_pages(pages)
            self.pool.free(pages)
        return result

    def check_integrity(self) -> None:
        """Asserts that requests and pages agree: nothing lost, nothing held twice."""
        self.scheduler.check_integrity()

    def _sample(self, chunks: list[ScheduledChunk], logits: FloatArray) -> list[SampledToken | KukriError]:
        """A token for each row of logits, or the error that ends its request."""
        results: list[SampledToken | KukriError] = []
        for request, _, _, n_logits in chunks:
            if n_logits:
                try:
                    results.append(request.sampler(logits[len(results)]))
                except KukriError as error:
                    self.runner.clear_pages(request.pages)
                    results.append(error)
        return results

    def _end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        if reason in ("abort", "error"):  # it may have stored NaN and not got to the logits that show it
            self.runner.clear_pages(request.pages)
        self.scheduler.finish(request, reason, stop_reason)

    def _checked_prompt(self, prompt_ids: npt.ArrayLike) -> IntArray:
        try:
            ids = np.asarray(prompt_ids)
        except ValueError:  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.ndim == 1 and not len(ids):
            raise RequestError("the prompt is empty: give it at least one token", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("the prompt must be a text or a list of token ids (integers)", param="prompt")
        n_vocab = self.model.config.n_vocab
        wrong = ids[(ids < 0) | (ids >= n_vocab)]
        if len(wrong):
            raise RequestError(
                f"token id {wrong[0]} is outside the vocabulary: ids go from 0 to {n_vocab - 1}",
                param="prompt",
            )
        if len(ids) > self.max_context:
            raise ContextLengthError(len(ids), self.max_context)
        return ids.astype(np.int32)


def _max_context(config: EngineConfig, model: Model) -> int:
    limit = model.config.max_context
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is more than the model's {limit} tokens")
    return config.max_context or limit
