"""Makes requests: checks prompts and parameters against a model's facts, without running anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.engine.drafts import Drafts
from kukri.engine.pages import PageKey, check_fits, pages_for
from kukri.engine.request import Output, Request
from kukri.engine.request_images import RequestImages
from kukri.errors import ContextLengthError, RequestError
from kukri.kernels.arrays import IntArray
from kukri.kernels.backend import SamplingBackend
from kukri.sampling import RequestSampler, SamplingParams
from kukri.sampling.params import SEED_MAX
from kukri.vision.image import ImageInput, ImagePrompt

if TYPE_CHECKING:
    from kukri.vision.encoder import VisionModel

MOST_ROWS = 64  # rows of logits of a step beyond one for each request: a row is large
_GREEDY = SamplingParams(temperature=0)  # for requests that draw nothing


class RequestMaker(ABC):
    """Makes the requests of an engine. `make_requests` may be called from any thread.

    The engine's pool has `n_pages` pages of `page_tokens` tokens. `eos_ids` end a request unless it ignores
    them. `identity` names all that keys and values depend on besides the tokens, for prefixes that are saved
    on disk. `vision` encodes images. Attributes: max_context, eos_ids, n_pages, page_tokens, vision.
    """

    max_draft_tokens = 0  # per request and step, unless the request says
    caches_prefixes = True  # False if no request begins with another's pages

    def __init__(
        self,
        config: ModelConfig,
        sampling: SamplingBackend,
        *,
        vision: VisionModel | None = None,
        max_context: int,
        n_pages: int,
        page_tokens: int,
        eos_ids: Iterable[int] = (),
        identity: bytes = b"",
    ) -> None:
        self._model_config, self._sampling, self.vision = config, sampling, vision
        self.max_context, self.eos_ids = max_context, frozenset(eos_ids)
        self.n_pages, self.page_tokens = n_pages, page_tokens
        self._max_pages = pages_for(max_context, page_tokens)
        self._identity = identity
        self._ids = count(1)

    def make_request(self, prompt_ids: npt.ArrayLike, params: SamplingParams | None = None) -> Request:
        """The one request for one answer: see `make_requests`."""
        (request,) = self.make_requests(prompt_ids, replace(params or SamplingParams(), n=1, best_of=None))
        return request

    def make_requests(
        self,
        prompt_ids: npt.ArrayLike | ImagePrompt,
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
        RequestError on an empty prompt, ids outside the vocabulary, images that the model does not see or an
        adapter that is not loaded, ContextLengthError on a prompt longer than the context.
        """
        self.check_generates()
        prompt, seen = self._checked_prompt(prompt_ids)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        stop_ids = eos_ids.union(params.stop_token_ids)
        prefix_root = self._prefix_root(prefix_scope)
        n_answers = params.best_of or params.n
        if n_answers > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # what the best are chosen by
        make_drafts = self._drafts(params, prompt, client)
        requests: list[Request] = []
        for i in range(n_answers):
            own = params if i == 0 or params.seed is None else replace(params, seed=_seed(params.seed + i))
            requests.append(
                Request(
                    next(self._ids),
                    prompt,
                    own,
                    RequestSampler(own, prompt, self._model_config.n_vocab, self._sampling, eos_ids),
                    stop_ids,
                    self.max_context,
                    self._max_pages,
                    priority=priority,
                    client=client,
                    leader=requests[0] if requests else None,
                    drafts=make_drafts(),
                    max_drafts=params.max_draft_tokens or self.max_draft_tokens,
                    prefix_root=prefix_root,
                    images=self._images(seen),
                )
            )
            requests[-1].page_keys = requests[0].page_keys.copy()
            self._finish(requests[-1], adapter)
        return requests

    def make_output_request(
        self,
        token_ids: npt.ArrayLike | ImagePrompt,
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
        ids, seen = self._checked_prompt(token_ids)
        request = Request(
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
            n_unseen=n_unseen,
            prefix_root=self._prefix_root(prefix_scope),
            images=self._images(seen),
        )
        self._finish(request, adapter)
        return request

    def _finish(self, request: Request, adapter: str | None) -> None:
        """Checks a new request, gives it its adapter, and hashes its prompt: no step should wait for that."""
        self._check_rows(request)
        if adapter is not None:
            self._use_adapter(adapter, request)
        if self.caches_prefixes:
            request.hash_pages(request.n_prompt // self.page_tokens, self.page_tokens)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters that requests may use."""
        return ()

    def _use_adapter(self, name: str, request: Request) -> None:
        """Makes a new request one of an adapter. Raises RequestError if there is none of this name."""
        raise RequestError(f"there is no adapter {name!r}: none is loaded", param="adapter")

    def _prefix_root(self, scope: str) -> PageKey:
        return sha256(self._identity + b"\0" + scope.encode()).digest()

    def check_generates(self) -> None:
        """Raises RequestError if the model has no language model head."""
        kind = self._model_config.head.kind
        if kind != "language_model":
            use = "makes embeddings" if kind == "none" else f"has a head for {kind.replace('_', ' ')}"
            raise RequestError(f"the model {use} and generates no text: use a language model", param="model")

    @property
    def why_no_images(self) -> str:
        """The reason why `vision` is None, for an error."""
        return "the model reads text and sees no images: leave them out, or load a model that sees"

    def check_images(self, images: Sequence[ImageInput]) -> None:
        """Raises RequestError unless the model sees images of this form; no images are always well."""
        if not images:
            return
        if self.vision is None:
            raise RequestError(self.why_no_images, param="images")
        if self.vision.config.has_places and not self._model_config.rope.axes:
            raise RequestError(
                "the model's config.json has no mrope_section, by which tokens of images rotate: add the one "
                "of the original checkpoint",
                param="images",
            )
        for image in images:
            self.vision.check(image)

    def _images(self, seen: ImagePrompt | None) -> RequestImages | None:
        if seen is None or self.vision is None:
            return None
        config = self.vision.config
        merge = config.merge if config.has_places else 0
        n_deep = len(config.deep_layers)
        return RequestImages(
            seen,
            attends_both_ways=config.attends_both_ways,
            n_deep=n_deep,
            merge=merge,
            blank_id=config.blank_id,
        )

    def _check_rows(self, request: Request) -> None:
        """Raises RequestError if more rows of logits are wanted of an image than a step has room for."""
        if request.images is None or request.program == "hidden":
            return
        n_rows = request.images.most_rows(request.first_row, request.stop_row)
        if n_rows > MOST_ROWS:
            raise RequestError(
                f"{n_rows} rows of logits are wanted of one image, and a step has room for {MOST_ROWS}: ask "
                "for no log-probabilities of the prompt",
                param="prompt_logprobs",
            )

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if a request could outgrow the whole pool.

        Whoever queues requests asks this first, on the thread that made them.
        """
        check_fits(request.max_cached, pages_for(request.max_cached, self.page_tokens), self.n_pages)

    @abstractmethod
    def _drafts(self, params: SamplingParams, prompt: IntArray, client: str) -> Callable[[], Drafts | None]:
        """A function that makes the source of an answer's drafts. Raises RequestError if it is missing."""

    def _checked_prompt(self, prompt_ids: npt.ArrayLike | ImagePrompt) -> tuple[IntArray, ImagePrompt | None]:
        """The token ids of a prompt, and the prompt if images stand in it."""
        seen: ImagePrompt | None = None
        if isinstance(prompt_ids, ImagePrompt):
            seen = prompt_ids if prompt_ids.images else None
            self.check_images(prompt_ids.images)
            prompt_ids = list(prompt_ids.token_ids)
        try:
            ids = np.asarray(prompt_ids)
        except ValueError:  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.ndim == 1 and not len(ids):
            raise RequestError("the prompt is empty: give it at least one token", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("the prompt must be a text or a list of token ids (integers)", param="prompt")
        n_vocab = self._model_config.n_vocab
        wrong = ids[(ids < 0) | (ids >= n_vocab)]
        if len(wrong):
            raise RequestError(
                f"token id {wrong[0]} is outside the vocabulary: ids go from 0 to {n_vocab - 1}",
                param="prompt",
            )
        if len(ids) > self.max_context:
            raise ContextLengthError(len(ids), self.max_context)
        return ids.astype(np.int32), seen


def _seed(seed: int) -> int:
    """A seed within the range of 64 bits."""
    return seed if seed <= SEED_MAX else seed - 2**64
