"""The page pool: nothing lost, nothing held twice."""

from __future__ import annotations

import pytest

from kukri.engine.pages import PagePool, pages_for
from kukri.errors import CapacityError


def test_pages_for_rounds_up() -> None:
    """A page short for a context that ends on a page's edge."""
    assert [pages_for(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_allocate_is_all_or_nothing() -> None:
    """Pages kept by a request that did not get all it asked for."""
    pool = PagePool(5, 16)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    with pytest.raises(CapacityError, match="3 pages are needed, but 2 of 5 are free"):
        pool.allocate(3)
    assert pool.n_free == 2
    pool.check_integrity([first])
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_when_its_last_owner_leaves() -> None:
    """A page written by a newcomer while another request still reads it."""
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.check_integrity([pages, pages])
    pool.free(pages)
    assert pool.n_free == 1
    pool.free(pages)
    assert pool.n_free == 2
    pool.check_integrity([])


def test_wrong_use_is_caught() -> None:
    """Bookkeeping that goes wrong in silence."""
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="counts 1 owners and has 0"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="has 2"):
        pool.check_integrity([pages, pages])
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages)


def test_the_page_freed_last_is_used_first() -> None:
    """Memory that grows although pages are free: an untouched page costs memory, a warm one none."""
    pool = PagePool(100, 16)
    for _ in range(10):
        pages = pool.allocate(3)
        assert max(pages) < 3
        pool.free(pages)


def cached(pool: PagePool, text: str, n: int) -> list[bytes]:
    """The keys of n cached pages that nobody holds."""
    keys = [f"{text}{i}".encode() for i in range(n)]
    pages = pool.allocate(n)
    for page, key in zip(pages, keys):
        pool.cache(page, key)
    pool.free(pages)
    return keys


def test_kept_pages_are_used_last() -> None:
    """A conversation that waits for a tool forgotten before those that nobody continues, or kept forever."""
    pool = PagePool(12, 16)
    waits, old, new = (cached(pool, text, 4) for text in ("a", "b", "c"))
    pool.keep(waits)
    pool.check_integrity([])
    held = pool.allocate(6)
    assert [len(pool.find(keys)) for keys in (waits, old, new)] == [4, 0, 2], "ends are forgotten first"
    held += pool.allocate(3)
    assert [len(pool.find(keys)) for keys in (waits, new)] == [3, 0]
    pool.check_integrity([held])
    pool.free(held)
    again = pool.find(waits)
    pool.share(again)
    pool.free(again)  # it has continued, and is as others from now on
    newer = cached(pool, "d", 6)
    held = pool.allocate(pool.n_free - 6)
    assert [len(pool.find(keys)) for keys in (waits, newer)] == [0, 6]
    pool.check_integrity([held])


def test_no_more_than_half_of_the_pool_is_kept() -> None:
    """A pool full of conversations that never continue, in which nothing else is ever found."""
    pool = PagePool(12, 16)
    first, second, third = (cached(pool, text, 4) for text in ("a", "b", "c"))
    pool.keep(second)
    pool.keep(first)
    held = pool.allocate(6)
    assert [len(pool.find(keys)) for keys in (first, second, third)] == [4, 2, 0]
    pool.forget()
    pool.check_integrity([held])
