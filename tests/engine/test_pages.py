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
    with pytest.raises(CapacityError, match="3 KV pages wanted, 2 of 5 free"):
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
