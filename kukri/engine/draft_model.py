"""A small model that guesses for a larger one with the same tokens (after Leviathan et al. 2023).

A guess is its likeliest token, kept where it is the very token that the larger model's request draws.

It has a program, a KV cache and pages of its own. What it has read of a text stays in its cache; tokens that
came in the place of its guesses are read before the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kukri.config import EngineConfig
from kukri.engine.batch import BatchBuilder, Chunk
from kukri.engine.drafts import Drafts, Odds
from kukri.engine.pages import PagePool, pages_for
from kukri.engine.runner import Runner
from kukri.kernels.types import Backend, IntArray, StepLimits
from kukri.models import Model

_EXPECTED = (0.7,) * 6  # how often its guesses come true, before an answer shows it
_LEAST_PRICE = 0.05  # of a guess, in steps of the larger model: a step has a cost beside its weights
_PAUSE_TOKENS = 64  # where guesses seem worth nothing, until one is tried again


class ModelDrafts:
    """What a draft model has of one request: tokens read, pages, and its last guesses."""

    def __init__(self, page_row: IntArray, max_context: int, price: float) -> None:
        self.price, self.page_row = price, page_row
        self.tokens: IntArray = np.empty(0, np.int32)  # the request's own array
        self.n_tokens = self.n_cached = self.n_pages = 0
        self.guesses: list[int] = []
        self._max_context = max_context
        self._odds = Odds(_EXPECTED)
        self._n_without = 0  # tokens since the last guess

    @property
    def pages(self) -> list[int]:
        """The pages it holds, in order."""
        pages: list[int] = self.page_row[: self.n_pages].tolist()
        return pages

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Takes in the request's tokens, and which guesses came true."""
        self._n_without = 0 if self.guesses else self._n_without + n_tokens - self.n_tokens
        new: list[int] = tokens[self.n_tokens : n_tokens].tolist()
        n_true = 0
        for guess, token in zip(self.guesses, new, strict=False):
            self._odds.learn(n_true, guess == token)
            if guess != token:
                break
            n_true += 1
        if self.guesses:
            self.n_cached = min(self.n_cached, self.n_tokens + n_true)
        self.guesses, self.tokens, self.n_tokens = [], tokens, n_tokens

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` guesses comes true, given that those before it do."""
        for i in range(min(n, self._max_context - self.n_tokens)):
            yield 1.0 if i == 0 and self._n_without >= _PAUSE_TOKENS else self._odds.chance(i)

    def guess(self, n: int) -> list[int]:
        """The guesses that `DraftModel.compute` made."""
        return self.guesses[:n]


class DraftModel:
    """Computes guesses for the requests of a step, all together. Not for several threads at a time."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        max_context: int,
        n_pages: int,
        price: float,
    ) -> None:
        """`price`: the time of a guess, in steps of the larger model of one token."""
        self._max_context = min(max_context, model.config.max_context)
        self._max_pages = pages_for(self._max_context)
        n_requests = config.max_requests
        self._max_tokens = max(config.max_step_tokens, n_requests)
        limits = StepLimits(self._max_tokens, n_requests, n_requests, self._max_pages)
        self._runner = Runner(model, backend, n_pages, limits, config.kv_type)
        self._builder = BatchBuilder(limits)
        self._price = max(price, _LEAST_PRICE)
        self.pool = PagePool(n_pages)

    def drafts(self) -> ModelDrafts:
        """What it knows of a new request: nothing."""
        return ModelDrafts(np.zeros(self._max_pages, np.int32), self._max_context, self._price)

    def compute(self, wanted: Sequence[tuple[Drafts, int]]) -> None:
        """Makes so many guesses for each request, or none where its pages or its text do not allow it.

        They are written behind the request's tokens, where it has room for them.
        """
        own = [(drafts, n) for drafts, n in wanted if isinstance(drafts, ModelDrafts)]
        ready = [(drafts, n) for drafts, n in self._read(own) if n > 1]
        depth = 1
        while ready:
            chunks = [
                _chunk(drafts, drafts.n_tokens + depth - 1, drafts.n_tokens + depth) for drafts, _ in ready
            ]
            self._run(chunks, [drafts for drafts, _ in ready])
            depth += 1
            ready = [(drafts, n) for drafts, n in ready if n > depth]

    def release(self, drafts: Drafts) -> None:
        """Forgets what was read of a request that lost its turn, or ended."""
        if not isinstance(drafts, ModelDrafts):
            return
        self.pool.free(drafts.pages)
        drafts.page_row[: drafts.n_pages] = 0
        drafts.n_pages = drafts.n_cached = 0
        drafts.guesses = []

    def check_integrity(self, running: Sequence[Drafts]) -> None:
        """Asserts that pages are held by the requests that run, and by each alone."""
        self.pool.check_integrity([drafts.pages for drafts in running if isinstance(drafts, ModelDrafts)])

    def _read(self, wanted: Sequence[tuple[ModelDrafts, int]]) -> list[tuple[ModelDrafts, int]]:
        """Reads what it has not of the texts, a step's tokens at most; those read whole have a guess then."""
        n_left = self._max_tokens
        chunks: list[Chunk] = []
        done: list[tuple[ModelDrafts, int]] = []
        for drafts, n in wanted:
            stop = min(drafts.n_tokens, drafts.n_cached + n_left)
            if stop == drafts.n_cached or not self._make_room(drafts, drafts.n_tokens + n - 1):
                continue
            n_left -= stop - drafts.n_cached
            chunks.append(_chunk(drafts, drafts.n_cached, stop))
            if stop == drafts.n_tokens:
                done.append((drafts, n))
            drafts.n_cached = stop
        if chunks:
            self._run(chunks, [drafts for drafts, _ in done])
        return done

    def _run(self, chunks: list[Chunk], guessing: list[ModelDrafts]) -> None:
        """Runs a step whose rows of logits are, in order, those of the requests that get a guess."""
        logits = self._runner.run(self._builder.build(chunks))
        for drafts, guess in zip(guessing, logits.argmax(axis=1).tolist() if guessing else (), strict=True):
            place = drafts.n_tokens + len(drafts.guesses)
            drafts.n_cached = place
            drafts.tokens[place] = guess
            drafts.guesses.append(guess)

    def _make_room(self, drafts: ModelDrafts, n_tokens: int) -> bool:
        n_pages = pages_for(n_tokens)
        n_new = n_pages - drafts.n_pages
        if n_new > self.pool.n_free:
            return False
        if n_new > 0:
            drafts.page_row[drafts.n_pages : n_pages] = self.pool.allocate(n_new)
            drafts.n_pages = n_pages
        return True


def _chunk(drafts: ModelDrafts, start: int, stop: int) -> Chunk:
    """Tokens `start` to `stop` - 1 of a text; logits are wanted after its last token and its guesses."""
    return drafts, start, stop - start, int(stop >= drafts.n_tokens), 0
