"""A token sequence in the cache: its tokens so far, and the pages and states that it holds."""

from __future__ import annotations

from enum import Enum

from kukri.dataclass import dataclass, field
from kukri.engine.pages import ROOT, PageKey, page_key
from kukri.engine.saved_prefixes import SavedState
from kukri.engine.spans.embedding_spans import NO_SPANS, EmbeddingSpans
from kukri.kernels.arrays import IntArray


class RequestState(Enum):
    """The stages of a request."""

    NEW = "new"
    WAITING = "waiting"  # in the queue, holds no pages
    RUNNING = "running"  # may hold pages
    FINISHED = "finished"  # the answer's `finish_reason` says how


@dataclass(eq=False, repr=False, slots=True)
class TokenSequence:
    """The tokens of one request, and their pages and states, written by scheduler and allocator alone.

    `tokens` has room for the longest answer: the prompt, the tokens generated so far, and during a step the
    drafts after them. It has a row of the page table for each pool of pages.
    """

    id: int  # the request's
    tokens: IntArray
    n_prompt: int
    next_row: int  # the next token whose row of output is wanted
    page_rows: list[IntArray]
    prefix_root: PageKey = ROOT  # the key before its first page, so that it finds no prefixes of others
    leader: TokenSequence | None = (
        None  # the first of several answers to one prompt, whose pages it may share
    )
    token_types: IntArray | None = None  # [n_prompt]: of a pair of texts; None: all 0
    spans: EmbeddingSpans = NO_SPANS  # runs of the prompt that take rows
    page_keys: list[PageKey] = field(default_factory=list)  # the keys of full pages computed so far
    adapter_slot: int = -1  # -1 for no adapter
    finds_prefixes: bool = True  # False if a listener must see each of its tokens
    is_cacheable: bool = True  # False if hooks may have changed what its pages hold

    state: RequestState = RequestState.NEW
    is_in_flight: bool = False  # True from the launch of a step to its collection
    next_draft: int = 0  # the number of tokens from which on drafts are asked for
    n_preemptions: int = 0
    n_generated_at_loss: int = -1  # tokens generated when a stage was lost last
    n_drafted: int = 0  # drafts computed
    n_accepted: int = 0  # how many of those were accepted
    n_prefix_hit: int = 0  # tokens of the prompt found in the cache when it first ran
    n_found: int = 0  # tokens whose pages were cached when it was last to run

    n_tokens: int = field(init=False)  # tokens of the prompt and generated so far
    n_cached: int = 0  # tokens whose keys and values are in the cache
    first_pages: list[int] = field(default_factory=lambda: [0])  # per pool: windows have passed those before
    n_pages: int = 0  # one past the last page that it holds, of every pool
    passed: list[tuple[int, int, int]] = field(default_factory=list)  # (pool, place, page) passed uncached
    n_cached_pages: int = 0  # pages, from the first, that may be found by their tokens
    may_restore: bool = False  # True while its next pages may be saved on disk
    saved_state: SavedState | None = None  # the state that was read for it from disk
    state_slot: int = -1  # slot of its recurrent state, while it runs
    state_before: int = -1  # slot of its state before the drafts of a step, while that step runs
    n_replayed: int = 0  # its last cached tokens that its state has yet to read
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # (tokens, slot) to keep with their pages
    snapshot: PageKey | None = None  # key of the last page whose state is kept

    def __post_init__(self) -> None:
        """Counts the prompt's tokens."""
        self.n_tokens = self.n_prompt

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return self.n_tokens - self.n_prompt

    @property
    def generates(self) -> bool:
        """True if it is decoding: only its newest token is left to compute."""
        return self.n_cached == self.n_tokens - 1 and self.n_tokens > self.n_prompt

    def hash_pages(self, n_pages: int, page_tokens: int) -> list[PageKey]:
        """The keys of its first `n_pages` full pages, or of more: each is computed once in its life."""
        keys, size = self.page_keys, page_tokens
        for start in range(len(keys) * size, n_pages * size, size):
            before = keys[-1] if keys else self.prefix_root
            rows = self.spans.identity(start, start + size)
            keys.append(page_key(self.tokens[start : start + size], before, rows))
        return keys

    def pages(self, pool: int = 0) -> list[int]:
        """The pages of a pool that it holds, in order."""
        pages: list[int] = self.page_rows[pool][self.first_pages[pool] : self.n_pages].tolist()
        return pages

    def n_held(self, pool: int) -> int:
        """The number of pages of a pool that it holds."""
        return self.n_pages - self.first_pages[pool]
