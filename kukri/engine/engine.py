"""The engine: requests of token ids in, tokens out, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kukri.config import EngineConfig
from kukri.engine.draft_model import DraftModel
from kukri.engine.drafts import Drafts, LookupDrafts
from kukri.engine.pages import PagePool, pages_for
from kukri.engine.request import Output, Request, RequestState
from kukri.engine.runner import Runner
from kukri.engine.scheduler import ScheduledChunk, Scheduler, StepOutput
from kukri.engine.step_taps import StepTaps
from kukri.errors import ConfigError, ContextLengthError, KukriError, RequestError
from kukri.kernels.sampling_record import SamplingRecords
from kukri.kernels.types import Backend, FloatArray, Hook, IntArray, KVType, Logits, StepLimits
from kukri.models import Model
from kukri.sampling import RequestSampler, SampledToken, SamplingParams, sample_rows, token_logprobs
from kukri.sampling.params import SEED_MAX

_GREEDY = SamplingParams(temperature=0)  # of requests that draw nothing
_ROWS_PER_STEP = 64  # of logits beyond one for each request: a row is large, and all are made room for


@dataclass(eq=False)
class InFlight:
    """A step between `Engine.launch` and `Engine.collect`: its chunks, and the rows they get.

    `logits` are [N, V]; of a step that computes hidden states these, [N, D].
    """

    chunks: list[ScheduledChunk]
    logits: Logits


class Engine:
    """Runs requests on a model. Not for several threads at a time, but for `make_requests`.

    `eos_ids` end a request unless it ignores them. The KV pool has room for `max_requests` requests of
    `max_context` tokens, for `kv_bytes`, or for `n_pages` pages; its memory is taken as it is used. A
    `draft_model` has the same token ids, and a pool of its own with as many pages.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        *,
        eos_ids: Iterable[int] = (),
        n_pages: int | None = None,
        draft_model: Model | None = None,
    ) -> None:
        if not (is_causal := model.config.is_causal):
            # what a token keeps depends on those after it
            config = replace(config, caches_prefixes=False)
        self.model, self.config = model, config
        self.max_context = _max_context(config, model)
        self.eos_ids = frozenset(eos_ids)
        self._max_pages = max_pages = pages_for(self.max_context, backend.page_tokens)
        kv_type = cache_type(config, backend)
        page_bytes = backend.page_bytes(model.cache_layout, kv_type)
        n_pages = _n_pages(config, page_bytes, max_pages) if n_pages is None else n_pages
        is_large = model.config.head.kind == "language_model"
        n_tokens = config.max_step_tokens if is_causal else max(config.max_step_tokens, self.max_context)
        n_rows = min(_ROWS_PER_STEP, n_tokens) if is_large else n_tokens
        max_rows = config.max_requests + n_rows
        limits = StepLimits(n_tokens, config.max_requests, max_rows, max_pages)
        try:
            self.runner = Runner(model, backend, n_pages, limits, kv_type)
        except MemoryError:
            n_gib = n_pages * page_bytes / 2**30
            raise ConfigError(
                f"no memory for a KV cache of {n_gib:.1f} GiB: set its size (kv_bytes, --kv-memory) or "
                "lower max_requests (--max-requests) or max_context (--max-context)"
            ) from None
        self.pool = PagePool(n_pages, backend.page_tokens)
        self.scheduler = Scheduler(
            self.pool,
            config.max_requests,
            config.max_step_tokens,
            config.max_prompt_tokens,
            max_rows,
            caches_prefixes=config.caches_prefixes,
            takes_whole=not is_causal,
        )
        self._draft_model: DraftModel | None = None
        if draft_model is not None:
            price = draft_model.n_parameters / model.n_parameters
            self._draft_model = DraftModel(draft_model, backend, config, self.max_context, n_pages, price)
        elif config.speculation == "draft":
            raise ConfigError("speculation by a draft model needs one: give draft_model, --draft-model")
        self._in_flight: deque[InFlight] = deque()  # in the order of their launch
        self._sampling, self._records = backend.sampling, SamplingRecords()
        self._ids = count(1)

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or a step is in flight."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._in_flight)

    def make_request(self, prompt_ids: npt.ArrayLike, params: SamplingParams | None = None) -> Request:
        """The one request for one answer: see `make_requests`."""
        (request,) = self.make_requests(prompt_ids, replace(params or SamplingParams(), n=1, best_of=None))
        return request

    def make_requests(
        self, prompt_ids: npt.ArrayLike, params: SamplingParams, *, priority: int = 0, client: str = ""
    ) -> list[Request]:
        """The requests for `best_of` or `n` answers, checked and not yet queued: see `add_request`.

        They share the prompt's pages and differ by their seed, which counts up from the one given. Lower
        `priority` goes first; the queue is fair among clients. Safe to call from any thread. Raises
        RequestError on an empty prompt or ids outside the vocabulary, ContextLengthError on a prompt longer
        than the context.
        """
        kind = self.model.config.head.kind
        if kind != "language_model":
            head = "no head" if kind == "none" else f"a head for {kind.replace('_', ' ')}"
            raise RequestError(f"the model has {head} and generates no text", param="model")
        prompt = self._checked_prompt(prompt_ids)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        stop_ids = eos_ids.union(params.stop_token_ids)
        n_answers = params.best_of or params.n
        if n_answers > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # what the best are chosen by
        requests: list[Request] = []
        for i in range(n_answers):
            own = params if i == 0 or params.seed is None else replace(params, seed=_seed(params.seed + i))
            requests.append(
                Request(
                    next(self._ids),
                    prompt,
                    own,
                    RequestSampler(own, prompt, self.model.config.n_vocab, eos_ids, self._sampling),
                    stop_ids,
                    self.max_context,
                    self._max_pages,
                    priority=priority,
                    client=client,
                    leader=requests[0] if requests else None,
                    drafts=self._drafts(params),
                    max_drafts=params.max_draft_tokens or self.config.max_draft_tokens,
                )
            )
        return requests

    def make_output_request(
        self,
        token_ids: npt.ArrayLike,
        output: Output,
        *,
        first_row: int = 0,
        stop_row: int | None = None,
        token_types: IntArray | None = None,
        priority: int = 0,
        client: str = "",
    ) -> Request:
        """A request for the rows of `output` of the tokens from `first_row` to `stop_row` - 1: see `Request`.

        `token_types` tell the texts of a pair apart, int32 of as many. It is checked, and not yet queued.
        Raises what `make_requests` raises.
        """
        ids = self._checked_prompt(token_ids)
        return Request(
            next(self._ids),
            ids,
            _GREEDY,
            None,
            frozenset(),
            self.max_context,
            self._max_pages,
            priority=priority,
            client=client,
            output=output,
            first_row=first_row,
            stop_row=stop_row,
            token_types=token_types,
        )

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises CapacityError if it could never get all its pages."""
        self.scheduler.add(request)

    def step(self) -> list[StepOutput]:
        """Runs one step: `launch` and `collect`, and raises their errors."""
        step = self.launch()
        return [] if step is None else self.collect(step)

    def launch(self) -> InFlight | None:
        """Begins a step of the requests that are not in flight; None if there is nothing to compute.

        Any number of steps may be in flight, each of other requests. They run, and are to be collected, in
        the order of their launch. What the model run raises, an error in a hook for example, fails every
        request of this step and is raised.
        """
        scheduled = self.scheduler.schedule()
        chunks = scheduled.chunks
        if not chunks:
            return None
        now_s = perf_counter()
        for chunk in chunks:
            chunk.request.started_s = chunk.request.started_s or now_s
        try:
            self._add_drafts(chunks)
            if self._in_flight:  # the next run overwrites the logits of the last
                self._in_flight[-1].logits = self._in_flight[-1].logits.copy()
            for source, target in scheduled.copies:
                self.runner.cache.copy_page(source, target)
            run = self.runner.run if scheduled.program == "logits" else self.runner.run_hidden
            listens = any(chunk.request.taps is not None for chunk in chunks)
            step = InFlight(chunks, run(chunks, StepTaps(chunks)) if listens else run(chunks))
        except BaseException as error:
            self._fail(chunks, error)
            raise
        for chunk in chunks:
            chunk.request.is_in_flight = True
        self._in_flight.append(step)
        return step

    def collect(self, step: InFlight) -> list[StepOutput]:
        """Waits for the oldest step in flight; returns its tokens, and the requests that failed.

        A request whose logits are unusable fails alone; one that ended while in flight gets nothing. What the
        backend raises fails every request of the step and is raised.
        """
        assert step is self._in_flight[0], "steps are collected in the order of their launch"
        self._in_flight.popleft()
        for chunk in step.chunks:
            request = chunk.request
            request.is_in_flight = False
            if request.state is RequestState.FINISHED:
                self._clear_pages(request)
                self.scheduler.release_ended(request)
        try:
            results = self._sample(step.chunks, step.logits)
        except BaseException as error:
            self._fail(step.chunks, error)
            raise
        return self.scheduler.postprocess(step.chunks, results, perf_counter())

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request between steps, for example at a stop string; one that ended stays so."""
        if request.state is not RequestState.FINISHED:
            self._end(request, reason, stop_reason)

    def abort(self, request: Request) -> None:
        """Aborts a request; its pages are free at once."""
        self.finish(request, "abort")

    def add_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Makes each hook listen on its full name. What a hook saw or edited is no cached prefix."""
        self.runner.hooks.add(hooks)
        self._forget_prefixes()

    def remove_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Undoes `add_hooks` with the same argument."""
        self.runner.hooks.remove(hooks)
        self._forget_prefixes()

    def check_integrity(self) -> None:
        """Asserts that requests and pages agree: nothing lost, nothing held twice."""
        self.scheduler.check_integrity()
        if self._draft_model is not None:
            holding = (*self.scheduler.running, *self.scheduler.ending)
            drafts = (request.drafts for request in holding)
            self._draft_model.check_integrity(d for d in drafts if d is not None)

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Extends the chunks of decoding requests by draft tokens."""
        planned = self.scheduler.plan_drafts(chunks)
        if self._draft_model is not None:
            self._draft_model.compute([(drafts, n) for _, drafts, n in planned])
        for i, drafts, n in planned:
            chunks[i] = self.scheduler.with_drafts(chunks[i], drafts.propose(n))

    def _sample(self, chunks: list[ScheduledChunk], logits: Logits) -> list[list[SampledToken | KukriError]]:
        """Each chunk's new tokens, up to one that was not drafted; an error in place of one ends its request.

        Each is chosen as if it were alone in its step, after those before it are chosen.
        """
        results: list[list[SampledToken | KukriError]] = [[] for _ in chunks]
        rows: dict[int, list[int]] = {}  # of the chunks that give tokens, by index
        row, draft_row = 0, len(logits) - sum(chunk.n_drafts for chunk in chunks)
        for i, chunk in enumerate(chunks):
            n_own = chunk.n_logits - chunk.n_drafts
            row += n_own
            first_draft_row, draft_row = draft_row, draft_row + chunk.n_drafts
            if chunk.request.state is not RequestState.RUNNING:  # it ended while in flight
                continue
            if chunk.request.taps is not None and chunk.request.error is not None:
                results[i].append(chunk.request.error)
                self._clear_pages(chunk.request)
                continue
            if chunk.request.output != "tokens":
                self._keep_rows(chunk, logits.take(range(row - n_own, row)).numpy())
            elif chunk.request.params.prompt_logprobs is not None:
                self._score_prompt(chunk, logits.take(range(row - n_own, row)).numpy())
            if chunk.gives_token:
                rows[i] = [row - 1, *range(first_draft_row, draft_row)]
        going_on, depth = list(rows), 0
        while going_on:
            self._sample_next([(chunks[i], rows[i][depth], results[i]) for i in going_on], logits)
            going_on = [i for i in going_on if _goes_on(chunks[i], results[i])]
            depth += 1
        for i, own_rows in rows.items():
            if len(results[i]) < len(own_rows) and logits.has_nan(own_rows[-1]):
                self._clear_drafts(chunks[i], len(results[i]))
        return results

    def _sample_next(
        self, turns: list[tuple[ScheduledChunk, int, list[SampledToken | KukriError]]], logits: Logits
    ) -> None:
        """Adds a token to the results of each chunk, by a row of logits of its own; rows are in order."""
        wanted = logits.take([row for _, row, _ in turns]).numpy()
        samplers = [chunk.request.sampler for chunk, _, _ in turns if chunk.request.sampler is not None]
        tokens = sample_rows(samplers, wanted, self._sampling, self._records)
        for (chunk, _, results), token in zip(turns, tokens, strict=True):
            results.append(chunk.request.error or token)
            if isinstance(results[-1], KukriError):
                self._clear_pages(chunk.request)

    def _clear_drafts(self, chunk: ScheduledChunk, n_kept: int) -> None:
        """Zeroes the keys and values of rejected drafts, which are NaN if their logits were."""
        page, place = divmod(chunk.start + n_kept, self.pool.page_tokens)
        if place:
            self.runner.cache.clear_from(int(chunk.request.page_row[page]), place)
            page += 1
        self.runner.cache.clear_pages(chunk.request.pages[page:])

    def _drafts(self, params: SamplingParams) -> Drafts | None:
        """The source of a request's drafts. Raises RequestError if there is none of that kind here."""
        kind = params.speculation or ("ngram" if params.prediction else self.config.speculation)
        if kind == "off":
            return None
        if kind == "draft":
            if self._draft_model is None:
                raise RequestError("there is no draft model here: choose ngram or off", param="speculation")
            return self._draft_model.drafts()
        given = [i for i in params.prediction if isinstance(i, int) and 0 <= i < self.model.config.n_vocab]
        if len(given) < len(params.prediction):
            raise RequestError("prediction must be token ids of the vocabulary here", param="prediction")
        return LookupDrafts(given[: self.max_context])

    def _score_prompt(self, chunk: ScheduledChunk, logits: FloatArray) -> None:
        """Keeps the log-probabilities of the prompt's tokens that the rows of a chunk are about."""
        request = chunk.request
        n_top = request.params.prompt_logprobs
        assert n_top is not None
        first = chunk.start + chunk.n_tokens - chunk.n_drafts - len(logits)
        for i, row in enumerate(logits, first + 1):  # the row of token i - 1
            if i < request.n_prompt and i == len(request.prompt_logprobs) + 1:
                try:
                    token = token_logprobs(int(request.tokens[i]), row, n_top, self._sampling)
                except KukriError as error:  # the request fails when it would get its token
                    request.error = error
                    return
                request.prompt_logprobs.append(token)

    def _keep_rows(self, chunk: ScheduledChunk, rows: FloatArray) -> None:
        """Copies a chunk's rows to its request. NaN is a result too, which no other request may read."""
        request, stop = chunk.request, chunk.start + chunk.n_tokens
        if len(rows):
            n_wanted = request.stop_row - request.first_row
            last = min(stop, request.stop_row) - request.first_row
            if request.output == "pooled":
                before = rows[:0] if request.rows is None else request.rows[None]
                # row after row, so that the sum does not depend on chunks
                total: FloatArray = np.concatenate([before, rows]).sum(axis=0)
                request.rows = total / np.float32(n_wanted) if last == n_wanted else total
            else:
                if request.rows is None:
                    request.rows = np.empty((n_wanted, rows.shape[1]), np.float32)
                request.rows[last - len(rows) : last] = rows
            if np.isnan(rows[-1].max()):
                request.is_cacheable = False
        if stop == request.n_prompt and not request.is_cacheable:
            self._clear_pages(request)

    def _fail(self, chunks: list[ScheduledChunk], error: BaseException) -> None:
        """Ends the requests of a step that raised."""
        for chunk in chunks:
            request = chunk.request
            if request.state is RequestState.RUNNING:
                request.error = error if isinstance(error, KukriError) else KukriError(str(error))
                self._end(request, "error")

    def _end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        if reason in ("abort", "error") and not request.is_in_flight:
            self._clear_pages(request)
        self.scheduler.finish(request, reason, stop_reason)

    def _clear_pages(self, request: Request) -> None:
        """Zeroes the pages that only this request would have read: it may have stored NaN in them."""
        pages = request.pages
        self.runner.cache.clear_pages([page for page in pages if self.pool.is_writable(page)])

    def _forget_prefixes(self) -> None:
        """Nothing computed so far is shared with requests to come, and nothing while hooks listen."""
        self.pool.forget()
        for request in self.scheduler.running:
            request.n_cached_pages, request.is_cacheable = 0, False
        self.scheduler.caches_prefixes = self.config.caches_prefixes and not self.runner.hooks
        # a hook sees each token of a sequence once, and none that is not in it
        self.scheduler.takes_drafts = not self.runner.hooks

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


def _goes_on(chunk: ScheduledChunk, tokens: list[SampledToken | KukriError]) -> bool:
    """True if the last token chosen was drafted, so that the row after it predicts the next token."""
    request, token, n = chunk.request, tokens[-1], len(tokens)
    if n > chunk.n_drafts or isinstance(token, KukriError) or token.id in request.stop_ids:
        return False
    return token.id == int(request.tokens[request.n_tokens + n - 1])


def cache_type(config: EngineConfig, backend: Backend) -> KVType:
    """The type of the KV cache: "f16" stands for the widest a backend has, float32 on the reference."""
    return backend.exact_kv_type if config.kv_type == "f16" else config.kv_type


def _n_pages(config: EngineConfig, page_bytes: int, max_pages: int) -> int:
    if config.kv_bytes is None:
        return config.max_requests * max_pages
    if config.kv_bytes < page_bytes:
        raise ConfigError(f"a KV pool of {config.kv_bytes} bytes holds no page of {page_bytes}: give it more")
    return config.kv_bytes // page_bytes


def _seed(seed: int) -> int:
    """A seed within the range of 64 bits."""
    return seed if seed <= SEED_MAX else seed - 2**64


def _max_context(config: EngineConfig, model: Model) -> int:
    limit = model.config.max_context
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is more than the model's {limit} tokens")
    return config.max_context or limit
