"""One request on its way through the engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Literal

import numpy as np

from kukri.engine.adapters import LoadedAdapter
from kukri.engine.drafts import Drafts
from kukri.engine.pages import ROOT, PageKey, page_key
from kukri.engine.request_images import RequestImages
from kukri.engine.saved_prefixes import SavedState
from kukri.engine.traces import Span
from kukri.errors import KukriError, RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.taps import SequenceTaps
from kukri.sampling import RequestSampler, SampledToken, SamplingParams

Output = Literal["tokens", "logits", "hidden", "pooled"]
ProgramKind = Literal["logits", "hidden"]


class RequestState(Enum):
    """The stages of a request."""

    NEW = "new"
    WAITING = "waiting"  # in the queue, holds no pages
    RUNNING = "running"  # may hold pages
    FINISHED = "finished"  # `finish_reason` says how


@dataclass(frozen=True)
class Timings:
    """Durations of a request, in seconds of wall time, and its rates; 0 if there was nothing to time."""

    n_prompt_tokens: int
    n_generated: int
    queue_s: float  # from arrival to the first step
    prompt_s: float  # from there to the first token
    first_token_s: float  # from arrival to the first token: the sum of the two
    decode_s: float  # from the first token to the last
    n_drafted: int = 0  # draft tokens computed
    n_accepted: int = 0  # how many of those were accepted

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prefilled prompt tokens per second."""
        return self.n_prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated per second, the first left out: it belongs to the prompt."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s else 0.0


class Request:
    """A prompt, its sampling parameters, and its result so far. Tokens and pages belong to the scheduler.

    With another `output` than "tokens" it generates nothing and ends when `rows` has that output, of
    the prompt's tokens from `first_row` to `stop_row` - 1: "logits" (or the outputs of a head for a task) and
    "hidden", the last norm's outputs, are float32 [tokens, width]; "pooled" is the mean of the latter,
    float32 [D].
    """

    __slots__ = (
        "__weakref__", "adapter", "arrived_s", "client", "cumulative_logprob", "drafts", "error",
        "finish_reason", "first_pages",
        "first_row", "first_token_s", "id", "images", "is_cacheable", "is_in_flight", "last_token_s",
        "leader",
        "max_drafts", "max_length", "may_restore", "n_accepted", "n_cached", "n_cached_pages", "n_drafted",
        "n_found", "n_generated_at_loss", "n_pages", "n_preemptions", "n_prefix_hit", "n_prompt",
        "n_replayed", "n_tokens", "n_unseen", "next_draft", "next_row", "output",
        "page_keys", "page_rows", "params", "passed", "prefix_root", "priority", "prompt_logprobs",
        "rows",
        "sampled",
        "sampler", "saved_state",
        "snapshot", "snapshots", "stage_s", "started_s", "state", "state_before", "state_slot", "stop_ids",
        "stop_reason", "stop_row", "taps", "token_types", "tokens", "trace",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        prompt_ids: IntArray,
        params: SamplingParams,
        sampler: RequestSampler | None,
        stop_ids: frozenset[int],
        max_context: int,
        max_pages: int,
        *,
        priority: int = 0,
        client: str = "",
        leader: Request | None = None,
        drafts: Drafts | None = None,
        max_drafts: int = 0,
        output: Output = "tokens",
        first_row: int = 0,
        stop_row: int | None = None,
        token_types: IntArray | None = None,
        n_unseen: int = 0,
        prefix_root: PageKey = ROOT,
        images: RequestImages | None = None,
    ) -> None:
        self.id, self.params, self.sampler, self.stop_ids = id, params, sampler, stop_ids
        self.priority, self.client = priority, client
        self.drafts, self.max_drafts = drafts, max_drafts  # the source of drafts, and how many in a step
        self.next_draft = 0  # how many tokens it is to have before drafts are asked for
        self.leader = leader  # the first of several answers to one prompt, whose pages it may share
        self.n_prompt = self.n_tokens = len(prompt_ids)
        self.output = output
        if output == "tokens":
            n_new = max_context if params.max_tokens is None else params.max_tokens
            # prompt and answer; a prompt that fills the context still gets one token
            self.max_length = max(min(self.n_prompt + n_new, max_context), self.n_prompt + 1)
            first_row = self.n_prompt - 1 if params.prompt_logprobs is None else 0
        else:
            self.max_length = self.n_prompt
        self.first_row = self.next_row = first_row  # the next token whose row of output is wanted
        self.stop_row = self.max_length if stop_row is None else stop_row
        self.token_types = token_types  # [n_prompt]: of a pair of texts; None: all 0
        self.n_unseen = n_unseen  # its last tokens, which no token sees; of encoders
        self.images = images  # the prompt's images
        self.adapter: LoadedAdapter | None = None
        self.rows: FloatArray | None = None  # see the class; "pooled" is a sum until its end
        self.tokens = np.empty(self.max_length, np.int32)  # prompt, generated, and in a step drafts
        self.tokens[: self.n_prompt] = prompt_ids
        self.n_cached = 0  # tokens whose keys and values are in the cache
        self.page_rows = [np.zeros(max_pages, np.int32)]  # one row of the page table per pool
        self.first_pages = [0]  # per pool: the first page that it holds, as windows have passed those before
        self.n_pages = 0  # one past the last that it holds, of every pool
        self.passed: list[tuple[int, int, int]] = []  # (pool, place, page) that windows passed uncached
        self.n_cached_pages = 0  # how many of those, from the first, may be found by their tokens
        self.page_keys: list[PageKey] = []  # keys of its full pages, as far as they were computed
        self.prefix_root = prefix_root  # the key before its first page: prefixes of others are never found
        self.may_restore = False  # True while its next pages may be saved on disk
        self.saved_state: SavedState | None = None  # that was read for it from disk
        self.state_slot = -1  # slot of its recurrent state, while it runs
        self.state_before = -1  # slot of its state before the drafts of a step, while that runs
        self.n_replayed = 0  # its last cached tokens that its state has yet to read
        self.snapshots: list[tuple[int, int]] = []  # (tokens, slot) of states to keep once pages are cached
        self.snapshot: PageKey | None = None  # key of the last page whose state is kept
        self.is_cacheable = True  # False if hooks may have changed what its pages hold
        self.is_in_flight = False  # True from the launch of a step to its collection
        self.taps: SequenceTaps | None = None
        self.trace: Span | None = None  # that it belongs to
        self.stage_s: dict[str, tuple[float, float]] = {}  # by "prefill" and "decode": see `note_stages`
        self.n_found = 0  # tokens whose pages were cached when it was last to run
        self.n_prefix_hit = 0  # tokens of the prompt found in the cache when it first ran
        self.n_preemptions = 0
        self.n_generated_at_loss = -1  # when a stage was lost last
        self.n_drafted = 0  # drafts computed
        self.n_accepted = 0  # how many of those were accepted
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[SampledToken] = []  # from the prompt's second token on, if requested
        self.sampled: list[SampledToken] = []
        self.state = RequestState.NEW
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None  # the stop id or string that ended it
        self.error: KukriError | None = None
        self.arrived_s = perf_counter()
        self.started_s = self.first_token_s = self.last_token_s = 0.0

    def listen(self, taps: SequenceTaps) -> None:
        """Makes a new request show its rows to taps: each token once, so none comes from a cached prefix and
        none is drafted. What it edits is not cached as a prefix for others.
        """
        self.taps, self.drafts = taps, None
        self.is_cacheable = self.is_cacheable and not taps.edits

    def hash_pages(self, n_pages: int, page_tokens: int) -> list[PageKey]:
        """The keys of its first `n_pages` full pages, or of more: each is computed once in its life."""
        keys, size = self.page_keys, page_tokens
        for start in range(len(keys) * size, n_pages * size, size):
            before = keys[-1] if keys else self.prefix_root
            images = b"" if self.images is None else self.images.identity(start, start + size)
            keys.append(page_key(self.tokens[start : start + size], before, images))
        return keys

    @property
    def adapter_slot(self) -> int:
        """The slot of its adapter; -1 for none."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def has_ended(self) -> bool:
        """True once it is finished."""
        return self.state is RequestState.FINISHED

    def pages(self, pool: int = 0) -> list[int]:
        """The pages of a pool that it holds, in order."""
        pages: list[int] = self.page_rows[pool][self.first_pages[pool] : self.n_pages].tolist()
        return pages

    def n_held(self, pool: int) -> int:
        """How many those are."""
        return self.n_pages - self.first_pages[pool]

    @property
    def max_cached(self) -> int:
        """The most tokens it may have in the cache: the last one generated is never an input."""
        return self.max_length - (self.output == "tokens")

    @property
    def program(self) -> ProgramKind:
        """The program that computes its steps."""
        return "hidden" if self.output in ("hidden", "pooled") else "logits"

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return self.n_tokens - self.n_prompt

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, a stop token included."""
        ids: list[int] = self.tokens[self.n_prompt : self.n_tokens].tolist()
        return ids

    def append(self, token: SampledToken, now_s: float) -> None:
        """Adds a generated token; the time in seconds is `perf_counter`'s."""
        if not self.first_token_s:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.tokens[self.n_tokens] = token.id
        self.n_tokens += 1
        if token.logprob is not None:
            self.sampled.append(token)
            self.cumulative_logprob += token.logprob

    def note_stages(self, elapsed_s: float, computed_s: float) -> None:
        """Adds the time that one of its steps was in other stages, and that these computed."""
        if self.trace is not None:
            part = "decode" if self.first_token_s else "prefill"
            before = self.stage_s.get(part, (0.0, 0.0))
            self.stage_s[part] = before[0] + elapsed_s, before[1] + computed_s

    def resume(self, generated: Sequence[SampledToken], mirostat_mu: float | None = None) -> None:
        """Makes a new request continue after tokens that another engine generated for it.

        What follows is what that engine would have generated next, as no result depends on chunks and a
        sampler's state follows from its tokens, but for mirostat's, which is given. Raises RequestError if
        the tokens are more than the request may have.
        """
        if not generated:
            return
        if self.sampler is None or self.n_tokens + len(generated) >= self.max_length:
            raise RequestError(
                f"{len(generated)} tokens cannot be resumed: the request would already have ended"
            )
        now_s = perf_counter()
        for token in generated:
            self.append(token, now_s)
        self.first_token_s = 0.0  # when the first token generated here was chosen
        self.first_row = self.next_row = self.n_tokens - 1
        self.sampler.resume([token.id for token in generated], mirostat_mu)

    def cut(self, n_generated: int) -> None:
        """Forgets the tokens after the first `n_generated`: a step gave them beyond the end of the text."""
        self.n_tokens = self.n_prompt + n_generated
        del self.sampled[n_generated:]
        self.cumulative_logprob = sum(token.logprob or 0.0 for token in self.sampled)

    @property
    def timings(self) -> Timings:
        """Times up to the last token."""
        first = self.first_token_s or self.started_s
        return Timings(
            n_prompt_tokens=self.n_prompt,
            n_generated=self.n_generated,
            queue_s=max(self.started_s - self.arrived_s, 0.0),
            prompt_s=first - self.started_s,
            first_token_s=max(first - self.arrived_s, 0.0),
            decode_s=max(self.last_token_s - first, 0.0),
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
        )
