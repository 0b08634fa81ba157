"""The pool of KV pages: reference counts, and the prefix cache.

A full page can be *cached*: found again by its tokens and all tokens before it. Its key is the SHA-256 of the
key of the page before it and its own tokens, with the digests of inputs whose rows are among them, so no two
contexts are confused, and a page has the same key in every process. A cached page without owners
keeps its contents until its space is needed, least recently used first; pages of a conversation that is about
to continue go last (`keep`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from kukri.errors import CapacityError
from kukri.kernels.arrays import IntArray

PageKey = bytes  # SHA-256 of the key of the page before, the page's tokens, and its rows
ROOT: PageKey = bytes(32)  # the key before the first page, unless requests have one of their own


def page_key(tokens: IntArray, before: PageKey, rows: bytes = b"") -> PageKey:
    """The key of a full page of `tokens` after another; `rows` says which take rows of which inputs."""
    return sha256(before + tokens.tobytes() + rows).digest()


def pages_for(n_tokens: int, page_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // page_tokens)


def most_pages(n_tokens: int, page_tokens: int, window: int | None, step_tokens: int) -> int:
    """Return the most pages that a sequence of `n_tokens` holds at a time. For layers with a window these are
    the pages that the window covers before a step of `step_tokens` tokens, and the pages that the step
    writes.
    """
    n_pages = pages_for(n_tokens, page_tokens)
    return n_pages if window is None else min(n_pages, pages_for(window + step_tokens - 1, page_tokens) + 1)


class PoolSize:
    """The size of a pool: `n_pages` pages of `page_tokens` tokens each.

    Layers with a `window` have a pool of their own, of whose pages a sequence holds the pages that the window
    covers, and the pages that a step of up to `step_tokens` tokens writes.
    """

    def __init__(
        self, n_pages: int, page_tokens: int, window: int | None = None, step_tokens: int = 0
    ) -> None:
        self.n_pages, self.page_tokens = n_pages, page_tokens
        self.window, self._step_tokens = window, step_tokens

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold `n_tokens` tokens."""
        return pages_for(n_tokens, self.page_tokens)

    def first_needed(self, n_tokens: int) -> int:
        """Return the first page that a sequence of `n_tokens` computed tokens needs: no later token attends
        to the pages before it.

        The last computed token counts as later, because a prompt's may be computed again, for its logits.
        """
        return 0 if self.window is None else max(n_tokens - self.window, 0) // self.page_tokens

    def most_held(self, n_tokens: int) -> int:
        """Return the most pages that a sequence of `n_tokens` tokens holds at a time."""
        return most_pages(n_tokens, self.page_tokens, self.window, self._step_tokens)


def check_fits(n_tokens: int, pools: Iterable[PoolSize]) -> None:
    """Raise CapacityError if a request of up to `n_tokens` tokens could outgrow a whole pool."""
    for pool in pools:
        n_needed = pool.most_held(n_tokens)
        if n_needed > pool.n_pages:
            raise CapacityError(
                f"a request of up to {n_tokens} tokens requires {n_needed} KV pages, but there are "
                f"{pool.n_pages}: shorten it or lower 'max_tokens'"
            )


class PagePool(PoolSize):
    """Pages 0 to n_pages - 1: free, held by owners, who are counted, or idle.

    An idle page has no owner. It is cached, or set aside: its owner may still want to cache it.
    """

    def __init__(
        self, n_pages: int, page_tokens: int, window: int | None = None, step_tokens: int = 0
    ) -> None:
        super().__init__(n_pages, page_tokens, window, step_tokens)
        self._aside: dict[int, tuple[int, int]] = {}  # page -> (request, place in its sequence)
        # taken from the end: the page freed last is the warmest, and untouched pages cost no memory
        self._free = list(range(n_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._kept: OrderedDict[int, None] = OrderedDict()  # idle pages whose space is used last
        self._n_owners = [0] * n_pages
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

    @property
    def n_free(self) -> int:
        """Pages without owners: they can be allocated."""
        return len(self._free) + len(self._idle) + len(self._kept)

    @property
    def n_cached(self) -> int:
        """Pages that may be found by their tokens."""
        return len(self._key_of)

    def allocate(self, n: int) -> list[int]:
        """Allocates n pages to one owner. Raises CapacityError, allocating none, if fewer are free."""
        if n > self.n_free:
            raise CapacityError(
                f"not enough KV cache: {n} pages are needed, but {self.n_free} of {self.n_pages} are free, "
                "so try again later"
            )
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self._n_owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that are held or idle."""
        for page in pages:
            assert self._n_owners[page] > 0 or self.is_idle(page), f"page {page} is free and cannot be shared"
            self._idle.pop(page, None)
            self._kept.pop(page, None)
            self._n_owners[page] += 1

    def free(self, pages: Sequence[int], *, first_out: bool = False) -> None:
        """Removes an owner from each page, the last first, so that a prefix outlives the pages after it.

        Of pages that are cached and `first_out` the space is used before other pages' space.
        """
        for page in reversed(pages):
            assert self._n_owners[page] > 0, f"page {page} is freed twice"
            self._n_owners[page] -= 1
            if self._n_owners[page] == 0:
                if page in self._key_of:
                    self._make_idle(page, first_out)
                else:
                    self._free.append(page)

    def set_aside(self, page: int, owner: tuple[int, int], *, first_out: bool) -> None:
        """Frees a full page of one owner, who may still `claim` it for the cache unless its space is used."""
        assert self.is_writable(page), f"page {page} is shared"
        self._n_owners[page] = 0
        self._aside[page] = owner
        self._make_idle(page, first_out)

    def claim(self, page: int, owner: tuple[int, int], key: PageKey | None) -> None:
        """Caches a page that its owner set aside, if it is still there; without a key it is free."""
        if self._aside.get(page) != owner:
            return
        del self._aside[page]
        if key is None or key in self._page_of:
            del self._idle[page]
            self._free.append(page)
        else:
            self._page_of[key], self._key_of[page] = page, key

    def is_writable(self, page: int) -> bool:
        """True if a page has one owner and is not cached, so that no other will read it."""
        return self._n_owners[page] == 1 and page not in self._key_of

    def is_idle(self, page: int) -> bool:
        """True if a page that is cached has no owner."""
        return page in self._idle or page in self._kept

    def is_cached(self, key: PageKey) -> bool:
        """True if a page may be found by its key."""
        return key in self._page_of

    def is_held(self, key: PageKey) -> bool:
        """True if the page of a key is cached and has an owner."""
        page = self._page_of.get(key)
        return page is not None and self._n_owners[page] > 0

    def key(self, page: int) -> PageKey:
        """The key of a cached page."""
        return self._key_of[page]

    def only_held_by(self, owners: Iterable[Sequence[int]]) -> set[int]:
        """The pages that nobody but `owners`, some of all, holds."""
        held = Counter(page for pages in owners for page in pages)
        return {page for page, n in held.items() if n == self._n_owners[page]}

    def reach(self, keys: Sequence[PageKey], n_pages: int) -> int:
        """The most of the first `n_pages` pages of a text after which all that are needed are cached."""
        while n_pages:
            first = self.first_needed(n_pages * self.page_tokens)
            missing = (i for i in range(n_pages - 1, first - 1, -1) if keys[i] not in self._page_of)
            last = next(missing, None)
            if last is None:
                break
            n_pages = last
        return n_pages

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """The cached pages of these keys, of a text's pages in order, up to the first that is not known."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def cache(self, page: int, key: PageKey) -> int:
        """Caches a full page under its key; returns the page to hold from now on.

        That is `page`, or the one cached for the same tokens already: contents are bit-identical, so the
        caller's page is freed and the other takes its place.
        """
        known = self._page_of.get(key)
        if known is not None:
            if known != page:
                self.share([known])
                self.free([page])
            return known
        self._page_of[key], self._key_of[page] = page, key
        return page

    def keep(self, keys: Sequence[PageKey]) -> None:
        """Makes the idle pages of a text, by their keys in order, outlast others until they are used again.

        This holds for at most half of the pool, the newest.
        """
        for key in reversed(keys):  # a prefix outlives the pages after it
            page = self._page_of.get(key)
            if page is not None and self.is_idle(page):
                self._idle.pop(page, None)
                self._kept.pop(page, None)
                self._kept[page] = None
        while len(self._kept) > self.n_pages // 2:
            self._idle[self._kept.popitem(last=False)[0]] = None

    def forget(self) -> None:
        """Forgets every cached prefix, whose pages are then as any other."""
        self._free += reversed([*self._idle, *self._kept])
        self._idle.clear()
        self._kept.clear()
        self._aside.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts that `owners`, the pages of each, are all there are: nothing lost, nothing held twice."""
        held = Counter(page for pages in owners for page in pages)
        for page, n_owners in enumerate(self._n_owners):
            assert n_owners == held[page], f"page {page} counts {n_owners} owners and has {held[page]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        idle = self._idle | self._kept
        assert len(idle) == len(self._idle) + len(self._kept), "a page is kept, and not"
        assert free.isdisjoint(idle), "a page is free and idle"
        assert free.union(idle) == {p for p, n in enumerate(self._n_owners) if n == 0}, (
            "the free list is wrong"
        )
        assert idle.keys() <= self._key_of.keys() | self._aside.keys(), "an idle page cannot be found"
        assert self._aside.keys() <= self._idle.keys() - self._key_of.keys(), "a page set aside is held"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"

    def _evict(self) -> int:
        """Evicts the least recently used idle page, and a page that is kept only if there is no other."""
        page, _ = (self._idle or self._kept).popitem(last=False)
        if page in self._aside:
            del self._aside[page]
        else:
            del self._page_of[self._key_of.pop(page)]
        return page

    def _make_idle(self, page: int, first_out: bool) -> None:
        self._idle[page] = None
        if first_out:
            self._idle.move_to_end(page, last=False)
