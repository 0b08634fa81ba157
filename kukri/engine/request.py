"""One request on its way through the engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from time import perf_counter
from typing import Any, Literal

import numpy as np

from kukri.dataclass import dataclass, field
from kukri.engine.adapters import LoadedAdapter
from kukri.engine.drafts import Drafts
from kukri.engine.pages import ROOT, PageKey
from kukri.engine.sequence import RequestState, TokenSequence
from kukri.engine.spans.embedding_spans import NO_SPANS, EmbeddingSpans
from kukri.engine.timings import Timestamps, Timings
from kukri.errors import KukriError, RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.taps import SequenceListener
from kukri.sampling import RequestSampler, SampledToken, SamplingParams

Output = Literal["tokens", "logits", "hidden", "pooled"]
ProgramKind = Literal["logits", "hidden"]


@dataclass(eq=False, repr=False, slots=True)
class RequestAnswer:
    """What a request is answered: written by the step sampler, and by whoever ends the request.

    The ids of the generated tokens are in the request's sequence, as the model reads them.
    """

    sampled: list[SampledToken] = field(default_factory=list)  # the tokens with log-probabilities
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # from the prompt's second token on
    rows: FloatArray | None = None  # see `Request`; "pooled" is a sum until its end
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop id or string that ended it
    error: KukriError | None = None


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Request:
    """What the engine is asked: a prompt, its sampling parameters and limits, fixed once it is queued.

    What becomes of it is in three parts, each with its own writer: the `sequence` in the cache, the `answer`
    and the `times`.

    With another `output` than "tokens" it generates nothing and ends when the answer's `rows` have that
    output, of the prompt's tokens from `first_row` to `stop_row` - 1: "logits" (or the outputs of a head for
    a task) and "hidden", the last norm's outputs, are float32 [tokens, width]; "pooled" is the mean of the
    latter, float32 [D].
    """

    id: int
    prompt: IntArray  # int32
    params: SamplingParams
    sequence: TokenSequence
    max_length: int  # tokens of prompt and answer
    first_row: int
    stop_row: int
    output: Output = "tokens"
    sampler: RequestSampler | None = None
    stop_ids: frozenset[int] = frozenset()
    n_unseen: int = 0  # its last tokens, which no token attends to; of encoders
    priority: int = 0
    client: str = ""
    drafts: Drafts | None = None  # the source of drafts
    max_drafts: int = 0  # in a step
    adapter: LoadedAdapter | None = None
    listeners: tuple[SequenceListener, ...] = ()
    answer: RequestAnswer = field(default_factory=RequestAnswer)
    times: Timestamps = field(default_factory=Timestamps)

    @classmethod
    def new(
        cls,
        id: int,
        prompt: IntArray,
        params: SamplingParams,
        *,
        max_context: int,
        max_pages: int,
        output: Output = "tokens",
        first_row: int = 0,
        stop_row: int | None = None,
        leader: TokenSequence | None = None,
        prefix_root: PageKey = ROOT,
        token_types: IntArray | None = None,
        spans: EmbeddingSpans = NO_SPANS,
        **asked: Any,
    ) -> Request:
        """A request of up to `max_context` tokens, with a sequence that has room for `max_pages` pages.

        `asked` are further fields of the request, the others fields of the request or its sequence.
        """
        n_prompt = max_length = len(prompt)
        if output == "tokens":
            n_new = max_context if params.max_tokens is None else params.max_tokens
            # a prompt that fills the context still gets one token
            max_length = max(min(n_prompt + n_new, max_context), n_prompt + 1)
            first_row = n_prompt - 1 if params.prompt_logprobs is None else 0
        tokens = np.empty(max_length, np.int32)
        tokens[:n_prompt] = prompt
        sequence = TokenSequence(
            id,
            tokens,
            n_prompt,
            first_row,
            [np.zeros(max_pages, np.int32)],
            prefix_root=prefix_root,
            leader=leader,
            token_types=token_types,
            spans=spans,
        )
        stop_row = max_length if stop_row is None else stop_row
        return cls(id, prompt, params, sequence, max_length, first_row, stop_row, output, **asked)

    def listen(self, listener: SequenceListener) -> None:
        """Show the rows of a new request to one more listener, each token once, so no token comes from a
        cached prefix or is drafted. What a listener edits is not cached as a prefix for others.
        """
        self.listeners, self.drafts = (*self.listeners, listener), None
        self.sequence.finds_prefixes = False
        self.sequence.is_cacheable = self.sequence.is_cacheable and not listener.edits

    def use_adapter(self, adapter: LoadedAdapter, digest: bytes) -> None:
        """Makes a new request one of an adapter, whose prefixes are kept apart by `digest`."""
        self.adapter, self.sequence.adapter_slot = adapter, adapter.slot
        self.sequence.prefix_root = sha256(self.sequence.prefix_root + digest).digest()

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return self.sequence.n_tokens - self.sequence.n_prompt

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, a stop token included."""
        ids: list[int] = self.sequence.tokens[self.n_prompt : self.sequence.n_tokens].tolist()
        return ids

    @property
    def has_ended(self) -> bool:
        """True once it is finished."""
        return self.sequence.state is RequestState.FINISHED

    @property
    def max_cached(self) -> int:
        """The most tokens it may have in the cache: the last one generated is never an input."""
        return self.max_length - (self.output == "tokens")

    @property
    def program(self) -> ProgramKind:
        """The program that computes its steps."""
        return "hidden" if self.output in ("hidden", "pooled") else "logits"

    def append(self, token: SampledToken, now_s: float) -> None:
        """Adds a generated token; the time in seconds is `perf_counter`'s."""
        times, sequence = self.times, self.sequence
        if not times.first_token_s:
            times.first_token_s = now_s
        times.last_token_s = now_s
        sequence.tokens[sequence.n_tokens] = token.id
        sequence.n_tokens += 1
        if token.logprob is not None:
            self.answer.sampled.append(token)
            self.answer.cumulative_logprob += token.logprob

    def resume(self, generated: Sequence[SampledToken], mirostat_mu: float | None = None) -> None:
        """Makes a new request continue after tokens that another engine generated for it.

        What follows is what that engine would have generated next, as no result depends on chunks and a
        sampler's state follows from its tokens, but for mirostat's, which is given. Raises RequestError if
        the tokens are more than the request may have.
        """
        if not generated:
            return
        if self.sampler is None or self.sequence.n_tokens + len(generated) >= self.max_length:
            raise RequestError(f"an ended request cannot be resumed: {len(generated)} tokens are too many")
        now_s = perf_counter()
        for token in generated:
            self.append(token, now_s)
        self.times.first_token_s = 0.0  # when the first token generated here was chosen
        self.first_row = self.sequence.next_row = self.sequence.n_tokens - 1
        self.sampler.resume([token.id for token in generated], mirostat_mu)

    def cut(self, n_generated: int) -> None:
        """Forgets the tokens after the first `n_generated`: a step gave them beyond the end of the text."""
        self.sequence.n_tokens = self.n_prompt + n_generated
        del self.answer.sampled[n_generated:]
        self.answer.cumulative_logprob = sum(token.logprob or 0.0 for token in self.answer.sampled)

    @property
    def timings(self) -> Timings:
        """Times up to the last token."""
        times = self.times
        first = times.first_token_s or times.started_s
        return Timings(
            n_prompt_tokens=self.n_prompt,
            n_generated=self.n_generated,
            queue_s=max(times.started_s - times.arrived_s, 0.0),
            prompt_s=first - times.started_s,
            first_token_s=max(first - times.arrived_s, 0.0),
            decode_s=max(times.last_token_s - first, 0.0),
            n_drafted=self.sequence.n_drafted,
            n_accepted=self.sequence.n_accepted,
        )
