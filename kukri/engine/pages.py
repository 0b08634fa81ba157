"""The pool of KV pages: who may write where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kukri.config import PAGE_TOKENS
from kukri.errors import CapacityError


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE_TOKENS)


class PagePool:
    """Pages 0 to n_pages - 1, each free or held by as many owners as its reference count says."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        # taken from the end: the page freed last is the warmest, and untouched pages cost no memory
        self._free = list(range(n_pages - 1, -1, -1))
        self._n_owners = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes n pages for one owner. Raises CapacityError, taking none, where fewer are free."""
        if n > len(self._free):
            raise CapacityError(
                f"{n} KV pages wanted, {len(self._free)} of {self.n_pages} free: try again later"
            )
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._n_owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that are held."""
        for page in pages:
            assert self._n_owners[page] > 0, f"page {page} is free and cannot be shared"
            self._n_owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Removes an owner from each page; a page without owners is free again."""
        for page in pages:
            assert self._n_owners[page] > 0, f"page {page} is freed twice"
            self._n_owners[page] -= 1
            if self._n_owners[page] == 0:
                self._free.append(page)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts that `owners`, the pages of each, are all there are: nothing lost, nothing held twice."""
        held = Counter(page for pages in owners for page in pages)
        for page, n_owners in enumerate(self._n_owners):
            assert n_owners == held[page], f"page {page} counts {n_owners} owners and has {held[page]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert free == {p for p, n in enumerate(self._n_owners) if n == 0}, "the free list is wrong"
