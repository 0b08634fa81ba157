"""Makes requests: checks prompts and parameters against a model's facts, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.engine.drafts import Drafts
from kukri.engine.pages import PoolSize, check_fits, pages_for
from kukri.engine.request import Output, Request
from kukri.engine.sequence import TokenSequence
from kukri.engine.spans.embedding_spans import NO_SPANS, EmbeddingSpans
from kukri.engine.spans.encoder import SpanEncoder
from kukri.errors import ContextLengthError, RequestError
from kukri.kernels.arrays import IntArray
from kukri.kernels.backend import SamplingBackend
from kukri.models.spans import SpanInput, SpanPrompt
from kukri.sampling import RequestSampler, SamplingParams
from kukri.sampling.params import SEED_MAX

MOST_ROWS = 64  # rows of logits of a step beyond one for each request: a row is large
_GREEDY = SamplingParams(temperature=0)  # for requests that draw nothing


class Adapters(Protocol):
    """The adapters that requests may use, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give."""

    def use(self, name: str, request: Request) -> None:
        """Makes a new request one of an adapter. Raises RequestError if no adapter has this name."""


DraftsOf = Callable[[SamplingParams, IntArray, str], Callable[[], Drafts | None]]


class RequestMaker:
    """Makes the requests of an engine. Its methods may be called from any thread.

    `pools` are the sizes of the engine's pools of pages. `drafts`, given parameters, a prompt and a client,
    returns a function that makes the source of an answer's drafts, and raises RequestError if it is missing;
    a step has up to `max_draft_tokens` for each request unless the request says. Without `caches_prefixes` no
    request begins with another's pages. `eos_ids` end a request unless it ignores them. `identity` names all
    that keys and values depend on besides the tokens, for prefixes that are saved on disk. `encoders` make
    rows of inputs.

    Attributes: max_context, eos_ids, page_tokens; encoders, by the class of their inputs.
    """

    def __init__(
        self,
        config: ModelConfig,
        sampling: SamplingBackend,
        *,
        pools: Sequence[PoolSize],
        adapters: Adapters,
        drafts: DraftsOf,
        encoders: Iterable[SpanEncoder] = (),
        max_context: int,
        max_draft_tokens: int = 0,
        caches_prefixes: bool = True,
        eos_ids: Iterable[int] = (),
        identity: bytes = b"",
    ) -> None:
        self._model_config, self._sampling = config, sampling
        self.encoders = {encoder.input_type: encoder for encoder in encoders}
        self._pools, self._adapters, self._drafts = pools, adapters, drafts
        self.max_context, self.page_tokens = max_context, pools[0].page_tokens
        self._max_draft_tokens, self._caches_prefixes = max_draft_tokens, caches_prefixes
        self.eos_ids, self._identity = frozenset(eos_ids), identity
        self._ids = count(1)

    def make_request(self, prompt_ids: npt.ArrayLike, params: SamplingParams | None = None) -> Request:
        """The one request for one answer: see `make_requests`."""
        (request,) = self.make_requests(prompt_ids, replace(params or SamplingParams(), n=1, best_of=None))
        return request

    def make_requests(
        self,
        prompt_ids: npt.ArrayLike | SpanPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        client: str = "",
        prefix_scope: str = "",
        adapter: str | None = None,
    ) -> list[Request]:
        """The requests for `best_of` or `n` answers, checked and not yet queued: see `Engine.add_request`.

        They share the prompt's pages and differ by their seed, which counts up from the one given. Lower
        `priority` goes first; the queue is fair among clients. Prefixes are shared among requests of equal
        `prefix_scope`. `adapter` is the name of a loaded one. Safe to call from any thread. Raises
        RequestError on an empty prompt, ids outside the vocabulary, inputs that the model does not read or an
        adapter that is not loaded, ContextLengthError on a prompt longer than the context.
        """
        self.check_generates()
        prompt, spanned = self._checked_prompt(prompt_ids)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        stop_ids = eos_ids.union(params.stop_token_ids)
        n_answers = params.n_generated_answers
        if n_answers > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # the best answers are chosen by them
        make_drafts = self._drafts(params, prompt, client)
        requests: list[Request] = []
        for i in range(n_answers):
            own = params if i == 0 or params.seed is None else replace(params, seed=_seed(params.seed + i))
            sampler = RequestSampler(own, prompt, self._model_config.n_vocab, self._sampling, eos_ids)
            request = self._new(
                prompt,
                own,
                adapter,
                sampler=sampler,
                stop_ids=stop_ids,
                priority=priority,
                client=client,
                leader=requests[0].sequence if requests else None,
                drafts=make_drafts(),
                max_drafts=params.max_draft_tokens or self._max_draft_tokens,
                prefix_scope=prefix_scope,
                spans=self._spans(spanned),
            )
            requests.append(request)
        return requests

    def make_output_request(
        self,
        token_ids: npt.ArrayLike | SpanPrompt,
        output: Output,
        *,
        first_row: int = 0,
        stop_row: int | None = None,
        token_types: IntArray | None = None,
        n_unseen: int = 0,
        priority: int = 0,
        client: str = "",
        prefix_scope: str = "",
        adapter: str | None = None,
    ) -> Request:
        """A request for the rows of `output` of the tokens from `first_row` to `stop_row` - 1: see `Request`.

        `token_types` tell the texts of a pair apart, int32 of as many. No token sees the last `n_unseen`, of
        an encoder. It is checked, and not yet queued. Raises what `make_requests` raises.
        """
        ids, spanned = self._checked_prompt(token_ids)
        return self._new(
            ids,
            _GREEDY,
            adapter,
            priority=priority,
            client=client,
            output=output,
            first_row=first_row,
            stop_row=stop_row,
            token_types=token_types,
            n_unseen=n_unseen,
            prefix_scope=prefix_scope,
            spans=self._spans(spanned),
        )

    def _new(
        self,
        prompt: IntArray,
        params: SamplingParams,
        adapter: str | None,
        *,
        prefix_scope: str,
        leader: TokenSequence | None = None,
        **asked: Any,
    ) -> Request:
        """A checked request. Its prompt is hashed here, because no step should wait for that."""
        request = Request.new(
            next(self._ids),
            prompt,
            params,
            max_context=self.max_context,
            max_pages=pages_for(self.max_context, self.page_tokens),
            leader=leader,
            prefix_root=sha256(self._identity + b"\0" + prefix_scope.encode()).digest(),
            **asked,
        )
        self._check_rows(request)
        if adapter is not None:
            self._adapters.use(adapter, request)
        if leader is not None:
            request.sequence.page_keys = leader.page_keys.copy()
        if self._caches_prefixes:
            request.sequence.hash_pages(request.n_prompt // self.page_tokens, self.page_tokens)
        return request

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters that requests may use."""
        return self._adapters.names

    def check_generates(self) -> None:
        """Raises RequestError if the model has no language model head."""
        kind = self._model_config.head.kind
        if kind != "language_model":
            use = "makes embeddings" if kind == "none" else f"has a head for {kind.replace('_', ' ')}"
            raise RequestError(f"the model {use} and cannot generate: use a language model", param="model")

    def why_unread(self, noun: str) -> str:
        """The reason why there is no encoder of such inputs, for an error."""
        return f"{noun}s are not supported by this model: leave them out, or load a model that reads them"

    def check_inputs(self, inputs: Sequence[SpanInput]) -> None:
        """Raises RequestError unless the model reads inputs of these kinds and forms."""
        for given in inputs:
            encoder = self.encoders.get(type(given))
            if encoder is None:
                raise RequestError(self.why_unread(given.noun), param=f"{given.noun}s")
            encoder.check(given, self._model_config)

    def _spans(self, prompt: SpanPrompt | None) -> EmbeddingSpans:
        if prompt is None:
            return NO_SPANS
        encoders = [self.encoders[type(given)] for given in prompt.inputs]
        return EmbeddingSpans(prompt.inputs, prompt.spans, encoders)

    def _check_rows(self, request: Request) -> None:
        """Raises RequestError if more rows of logits are wanted of a span than a step has room for."""
        spans = request.sequence.spans
        n_rows = spans.most_rows(request.first_row, request.stop_row)
        if n_rows > MOST_ROWS and request.program != "hidden":
            raise RequestError.of(
                "prompt_logprobs",
                f"must want at most {MOST_ROWS} rows of logits of one {spans.inputs[0].noun}, not {n_rows}",
            )

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if a request could outgrow a whole pool.

        Whoever queues requests asks this first, on the thread that made them.
        """
        check_fits(request.max_cached, self._pools)

    def _checked_prompt(self, prompt_ids: npt.ArrayLike | SpanPrompt) -> tuple[IntArray, SpanPrompt | None]:
        """The token ids of a prompt, and the prompt if it has spans."""
        spanned: SpanPrompt | None = None
        if isinstance(prompt_ids, SpanPrompt):
            spanned = prompt_ids if prompt_ids.inputs else None
            self.check_inputs(prompt_ids.inputs)
            prompt_ids = list(prompt_ids.token_ids)
        try:
            ids = np.asarray(prompt_ids)
        except ValueError:  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.ndim == 1 and not len(ids):
            raise RequestError.of("prompt", "must have at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError.of("prompt", "must be a text or a list of token ids (integers)")
        n_vocab = self._model_config.n_vocab
        wrong = ids[(ids < 0) | (ids >= n_vocab)]
        if len(wrong):
            raise RequestError(
                f"the token id {wrong[0]} must be from 0 to {n_vocab - 1}",
                param="prompt",
            )
        if len(ids) > self.max_context:
            raise ContextLengthError(len(ids), self.max_context)
        n_sound = self._model_config.n_sound
        if n_sound and (spanned is None or tuple(spanned.spans[0]) != (0, n_sound, 0) or len(ids) == n_sound):
            raise RequestError(
                "a sound is required before the text of this model: use transcribe()", param="prompt"
            )
        return ids.astype(np.int32), spanned


def _seed(seed: int) -> int:
    """A seed within the range of 64 bits."""
    return seed if seed <= SEED_MAX else seed - 2**64
