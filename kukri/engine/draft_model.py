"""A draft model: a small model that drafts for a larger one with the same tokens (Leviathan et al. 2023).

A draft is its likeliest token, accepted if it is the very token that the larger model's request draws.

It has a program, a KV cache and pages of its own. What it has read of a sequence stays in its cache; tokens
that replaced rejected drafts are prefilled before the next drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kukri.config import EngineConfig
from kukri.dataclass import dataclass
from kukri.engine.batch_builder import Chunk
from kukri.engine.drafts import AcceptanceRate, Drafts
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.engine.pages import PagePool, pages_for
from kukri.engine.row_costs import MakingCost
from kukri.engine.runner import Runner
from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.errors import ConfigError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend, Logits
from kukri.kernels.cache import has_states, without_windows
from kukri.kernels.step import StepLimits
from kukri.models import Model

if TYPE_CHECKING:
    from kukri.engine.scheduled_step import ScheduledChunk
    from kukri.models.next_token import RowReader

_PRIOR = (0.7,) * 6  # acceptance of its drafts, before an answer shows its own
_MIN_COST = 0.05  # a draft costs at least this part of a full step: some costs do not depend on weights
_ROW_COST = 0.2  # a further row of its step, as a part of the first
# the share of steps that a model serves next to look-ups, at first, and what a step changes it by; the
# remaining tokens of an answer, at most _MOST_AHEAD, count as steps by this part
_SHARE, _STEP, _MOST_AHEAD, _PART_AHEAD = 0.1, 0.02, 1024, 0.25
_PAUSE_TOKENS = 64  # without drafts, as they seemed worth nothing, until one is tried again


class CountedDrafts(Drafts):
    """A model's drafts for one request: its text, and how often they were accepted."""

    cost_factor = 1.0  # the cost of its drafts as a multiple of the model's

    def __init__(self, max_context: int, n_vocab: int, cost: MakingCost) -> None:
        self._cost = cost
        self._max_context, self._n_vocab = max_context, n_vocab  # ids that the draft model reads
        self._is_readable = True
        self.tokens: IntArray = np.empty(0, np.int32)  # the request's own array
        self.n_tokens = self.n_to_come = 0  # tokens it has, and tokens that the answer may yet have
        self.drafts: list[int] = []  # the last ones
        self._rate = AcceptanceRate(_PRIOR)
        self._n_without = 0  # tokens since the last draft

    @property
    def relative_cost(self) -> float:
        return self._cost.of_one * self.cost_factor

    @property
    def reading_cost(self) -> float:
        """What the tokens cost that the model has yet to read before the newest, in steps of one token."""
        return 0.0

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        self._read(tokens, n_tokens)

    def chances(self, n: int) -> Iterator[float]:
        for i in range(min(n, self._max_context - self.n_tokens) if self._is_readable else 0):
            yield 1.0 if i == 0 and self._n_without >= _PAUSE_TOKENS else self._rate.chance(i)

    def propose(self, n: int) -> list[int]:
        return self.drafts[:n]

    def release(self) -> None:
        self.drafts = []

    def _read(self, tokens: IntArray, n_tokens: int) -> int:
        """Does what `follow` says; how many drafts were accepted."""
        new: list[int] = tokens[self.n_tokens : n_tokens].tolist()
        if max(new, default=0) >= self._n_vocab:
            self._is_readable = False
        n_accepted = self._count(self.drafts, new)
        self.drafts, self.tokens, self.n_tokens = [], tokens, n_tokens
        self.n_to_come = len(tokens) - n_tokens
        return n_accepted

    def _count(self, drafts: Sequence[int], new: Sequence[int]) -> int:
        """Counts which drafts the tokens that came after them accept; how many in all."""
        self._n_without = 0 if drafts else self._n_without + len(new)
        n_accepted = 0
        for draft, token in zip(drafts, new, strict=False):
            self._rate.update(n_accepted, draft == token)
            if draft != token:
                break
            n_accepted += 1
        return n_accepted


class ModelDrafts(CountedDrafts):
    """Drafts of a model with a cache of its own: how much of the text is in there, and on which pages."""

    token_types: IntArray | None = None
    adapter_slot = -1  # drafts are the same for all adapters
    state_slot = 0
    spans = NO_SPANS  # it reads their placeholder tokens
    keeps_accepted = True  # the cache keeps drafts that are accepted

    def __init__(
        self, pool: PagePool, page_row: IntArray, max_context: int, n_vocab: int, cost: MakingCost
    ) -> None:
        super().__init__(max_context, n_vocab, cost)
        self.page_row, self.page_rows = page_row, [page_row]
        self.n_cached = self.n_pages = 0
        self._pool = pool

    @property
    def reading_cost(self) -> float:
        return _ROW_COST * self.relative_cost * max(self.n_tokens - self.n_cached - 1, 0)

    @property
    def pages(self) -> list[int]:
        """The pages it holds, in order."""
        pages: list[int] = self.page_row[: self.n_pages].tolist()
        return pages

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        n_before = self.n_tokens
        n_accepted = self._read(tokens, n_tokens)
        self.n_cached = min(self.n_cached, n_before + n_accepted * self.keeps_accepted)

    def release(self) -> None:
        """Frees its pages too."""
        super().release()
        self._pool.free(self.pages)
        self.page_row[: self.n_pages] = 0
        self.n_pages = self.n_cached = 0


class EitherDrafts(Drafts):
    """Drafts of texts and of a draft model, for one answer: each step has those promising more tokens.

    The model's have to be worth the reading of what it has not read, by the steps that it may yet serve.
    """

    def __init__(self, looked_up: LookupDrafts, model: CountedDrafts) -> None:
        self.model, self._looked_up = model, looked_up
        self.source: LookupDrafts | CountedDrafts = looked_up  # the source of the drafts
        self._share = _SHARE  # the share of steps for which the model promised more

    @property
    def relative_cost(self) -> float:
        return self.source.relative_cost

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        self._looked_up.follow(tokens, n_tokens)
        self.model.follow(tokens, n_tokens)

    def chances(self, n: int) -> Iterator[float]:
        """Chooses the source too."""
        looked_up, model = list(self._looked_up.chances(n)), list(self.model.chances(n))
        more = _gain(model, self.model.relative_cost) - _gain(looked_up, 0.0)
        self._share += _STEP * ((more > 0.0) - self._share)
        n_steps = min(self.model.n_to_come, _MOST_AHEAD) * _PART_AHEAD
        is_model = more > 0.0 and more * self._share * n_steps > self.model.reading_cost
        self.source = self.model if is_model else self._looked_up
        return iter(model if is_model else looked_up)

    def propose(self, n: int) -> list[int]:
        return self.source.propose(n)

    def learn(self, answer: IntArray) -> None:
        self._looked_up.learn(answer)

    def release(self) -> None:
        self.model.release()


def _gain(chances: Iterable[float], cost: float) -> float:
    """Tokens that drafts of these chances promise beyond what they cost, each in steps of one token."""
    return float(sum(max(chance - cost, 0.0) for chance in accumulate(chances, mul)))


def model_drafts(drafts: Drafts | None) -> CountedDrafts | None:
    """The part of a request's drafts that a draft model makes."""
    own = drafts.model if isinstance(drafts, EitherDrafts) else drafts
    return own if isinstance(own, CountedDrafts) else None


@dataclass(frozen=True)
class DraftSetup:
    """What a draft model is made for: the larger model's `runner`, and what it runs with itself.

    `max_pages` are the pages of a sequence of the larger model, `n_pages` the pages of a cache of its own.
    """

    runner: Runner
    backend: Backend
    config: EngineConfig
    max_context: int
    max_pages: int
    n_pages: int

    def cost_of(self, model: Model) -> float:
        """Return the time of a draft, in the larger model's steps of one token, until it is measured."""
        return model.n_parameters / self.runner.model.n_parameters


class Drafter(ABC):
    """Computes a model's drafts for the requests of a step, in one batch. Not for several threads at once."""

    layer: RowReader | None = None  # the model, if it reads rows that the larger model made
    cost: MakingCost

    @abstractmethod
    def drafts_for(self, prompt: IntArray) -> Callable[[], CountedDrafts]:
        """A function that makes fresh draft state for an answer to a prompt. For any thread."""

    @abstractmethod
    def compute(self, wanted: Sequence[tuple[Any, int]]) -> None:
        """Makes this many drafts for each draft state that `drafts_for` made, or fewer."""

    def read_ahead(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Reads what is known of a step's requests before their drafts are made, if that pays."""
        return

    def check_integrity(self, running: Iterable[Drafts | None]) -> None:
        """Asserts that what it holds belongs to the requests that run."""
        return


class DraftSource(NamedTuple):
    """A model that drafts, what makes its Drafter, and its backend if that is not the larger model's."""

    model: Any
    make: Callable[[Any, DraftSetup], Drafter]
    backend: Backend | None = None


class DraftModel(Drafter):
    """Computes drafts by a model that has a cache of its own."""

    kind: type[ModelDrafts] = ModelDrafts
    _activations: FloatArray | None = None  # [T, D] that a run reads besides its tokens

    def __init__(self, model: Model, setup: DraftSetup) -> None:
        """Raises ConfigError if the model has recurrent layers.

        The vocabularies may differ by rows at the end that stand for no token: those are neither read nor
        drafted.
        """
        if has_states(model.cache_layout):
            raise ConfigError(
                "a draft model (--draft-model) must have no recurrent layers, whose states cannot be "
                "rolled back after a rejected draft"
            )
        backend, config, n_pages = setup.backend, setup.config, setup.n_pages
        self._n_vocab = min(setup.runner.model.config.n_vocab, model.config.n_vocab)
        self._max_context = min(setup.max_context, model.config.max_context)
        self._max_pages = pages_for(self._max_context, backend.page_tokens)
        n_requests = config.max_requests
        self._max_tokens = max(config.max_step_tokens, n_requests)
        limits = StepLimits(self._max_tokens, n_requests, n_requests, self._max_pages)
        layout = without_windows(model.cache_layout)  # in one pool, whose pages stay
        self._runner = Runner(model, backend, layout, n_pages, limits, config.kv_type)
        self.cost = MakingCost(max(setup.cost_of(model), _MIN_COST))
        self.pool = PagePool(n_pages, backend.page_tokens)

    def drafts_for(self, prompt: IntArray) -> Callable[[], ModelDrafts]:
        return self.drafts

    def drafts(self, *more: Any) -> ModelDrafts:
        """Fresh draft state for a request, with what its kind takes besides."""
        page_row = np.zeros(self._max_pages, np.int32)
        sizes = self._max_context, self._n_vocab, self.cost
        return self.kind(self.pool, page_row, *sizes, *more)

    def compute(self, wanted: Sequence[tuple[Any, int]]) -> None:
        """Makes none if pages or context leave no room.

        Drafts are written after the request's tokens, if it has room for them.
        """
        ready = [(drafts, n) for drafts, n in self._prefill(wanted) if n > 1 == len(drafts.drafts)]
        depth = 1
        while ready:
            chunks = [
                chunk_of(drafts, drafts.n_tokens + depth - 1, drafts.n_tokens + depth) for drafts, _ in ready
            ]
            self._run(chunks, [drafts for drafts, _ in ready])
            depth += 1
            ready = [(drafts, n) for drafts, n in ready if n > depth == len(drafts.drafts)]

    def check_integrity(self, running: Iterable[Drafts | None]) -> None:
        """Asserts that pages are held by the requests that run, and by each alone."""
        every = map(model_drafts, running)
        self.pool.check_integrity([drafts.pages for drafts in every if isinstance(drafts, ModelDrafts)])

    def _prefill(self, wanted: Sequence[tuple[ModelDrafts, int]]) -> list[tuple[ModelDrafts, int]]:
        """Prefills the requests' uncached tokens within one step's budget.

        Returns the requests that are prefilled whole, and now have a first draft.
        """
        n_left = self._max_tokens
        chunks: list[Chunk] = []
        done: list[tuple[ModelDrafts, int]] = []
        for drafts, n in wanted:
            stop = min(drafts.n_tokens, drafts.n_cached + n_left)
            if stop == drafts.n_cached or not self.make_room(drafts, drafts.n_tokens + n - 1):
                continue
            n_left -= stop - drafts.n_cached
            chunks.append(chunk_of(drafts, drafts.n_cached, stop))
            if stop == drafts.n_tokens:
                done.append((drafts, n))
            drafts.n_cached = stop
        if chunks:
            self._run(chunks, [drafts for drafts, _ in done])
        return done

    def _run(self, chunks: list[Chunk], drafting: list[ModelDrafts]) -> None:
        """Runs a step whose rows of logits are, in order, of the requests that get a draft."""
        logits = self._runner.run(chunks, activations=self._activations)
        for drafts, draft in zip(drafting, self._chosen(logits, drafting), strict=True):
            position = drafts.n_tokens + len(drafts.drafts)
            drafts.n_cached = position
            if draft >= self._n_vocab:  # no token of the larger model: nothing follows it
                continue
            drafts.tokens[position] = draft
            drafts.drafts.append(draft)

    def _chosen(self, logits: Logits, drafting: Sequence[ModelDrafts]) -> Sequence[int]:
        """The likeliest token of each that drafts, by its row of logits."""
        return logits.argmax() if drafting else ()

    def make_room(self, drafts: ModelDrafts, n_tokens: int) -> bool:
        """Allocate pages for `n_tokens` tokens in all; return False if too few pages are free."""
        n_pages = self.pool.pages_for(n_tokens)
        n_new = n_pages - drafts.n_pages
        if n_new > self.pool.n_free:
            return False
        if n_new > 0:
            drafts.page_row[drafts.n_pages : n_pages] = self.pool.allocate(n_new)
            drafts.n_pages = n_pages
        return True


def chunk_of(drafts: ModelDrafts, start: int, stop: int) -> Chunk:
    """Tokens `start` to `stop` - 1 of a sequence; its last token and its drafts want logits."""
    return Chunk(drafts, start, stop - start, int(stop >= drafts.n_tokens))


def make_drafts(
    drafter: Drafter,
    wanted: Sequence[tuple[Drafts, int]],
    clock: Callable[[], float],
    unit_s: float | None,
) -> float:
    """Has a model compute its part of the drafts, and learn what they cost; returns the seconds that took.

    `unit_s`: seconds of the larger model's step of one token, if known.
    """
    sources = [(each.source if isinstance(each, EitherDrafts) else each, n) for each, n in wanted]
    own = [(drafts, n) for drafts, n in sources if isinstance(drafts, CountedDrafts)]
    expected, began_s = sum(drafts.relative_cost * n + drafts.reading_cost for drafts, n in own), clock()
    drafter.compute(own)
    made_s = clock() - began_s
    if unit_s is not None:
        drafter.cost.observe(expected, made_s / unit_s)
    return made_s
