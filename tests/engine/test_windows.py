"""Layers with a window keep the pages that it covers: what is freed, what others find, sizes of pools."""

from __future__ import annotations

import pytest

from kukri.engine import Engine
from kukri.engine.kv_size import KVCost
from kukri.engine.pages import PagePool, most_pages
from kukri.errors import CapacityError
from tests.engine.driving import add, finish, greedy, prompt_of
from tests.engine.fake_model import expected_output, make_engine

PAGE = 16


def engine_of(n_windowed: int = 100, **options: object) -> Engine:
    given = {"max_context": 1000, "max_step_tokens": 64, "windows": (64,), **options}
    return make_engine(n_pages=(200, n_windowed), **given)[0]  # type: ignore[arg-type]


def test_a_long_text_holds_the_pages_of_its_window() -> None:
    """Pages kept after the window has passed, or more of them than the pool is sized by."""
    engine = engine_of(caches_prefixes=False)
    _, windowed = engine.allocator.pools
    request = add(engine, prompt_of(600), greedy(100))
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, windowed.n_pages - windowed.n_free)
        if request.n_generated == 50:
            assert len(request.sequence.pages(0)) == -(-request.sequence.n_cached // PAGE)
            assert len(request.sequence.pages(1)) <= 64 // PAGE + 2
    assert most <= most_pages(700, PAGE, 64, 64) == 9
    assert request.output_ids == expected_output(prompt_of(600), 100)


def test_a_prefix_is_found_if_its_last_window_is_there() -> None:
    """A prompt that is computed again although all that its next token sees is cached."""
    engine = engine_of()
    texts = prompt_of(300), prompt_of(300) + prompt_of(40, 1)
    hits = []
    for text in (*texts, texts[1]):
        request = add(engine, text, greedy(30))
        finish(engine)
        assert request.output_ids == expected_output(text, 30)
        hits.append(request.sequence.n_prefix_hit)
    assert hits == [0, 288, 336]
    turns = texts[1] + expected_output(texts[1], 30) + prompt_of(20, 2)
    request = add(engine, turns, greedy(5))
    finish(engine)
    assert request.sequence.n_prefix_hit == (340 + 29) // PAGE * PAGE


def test_what_others_share_stays_longer_than_what_a_window_just_passed() -> None:
    """A system message that is computed again for each user: of a small pool its last window must be kept."""
    engine = engine_of(most_pages(1000, PAGE, 64, 64) + 64 // PAGE)
    shared, hits = prompt_of(320), []
    for user in range(4):
        text = shared + prompt_of(150, user)
        request = add(engine, text, greedy(100))
        finish(engine)
        assert request.output_ids == expected_output(text, 100)
        hits.append(request.sequence.n_prefix_hit)
        again = add(engine, text, greedy(3))
        finish(engine)
        assert again.sequence.n_prefix_hit == 464, "an answer drove out the window before its prompt's end"
    assert hits[2:] == [320, 320]  # the second finds out that others share it


def test_passed_pages_that_are_not_cached_yet_are_cached_with_the_rest() -> None:
    """A long prompt of which only the end can be found, although its pages are still there."""
    engine = engine_of()
    text = prompt_of(500)
    add(engine, text, greedy(2))
    finish(engine)
    for n in (100, 260, 400):
        request = add(engine, text[:n] + prompt_of(9, n), greedy(2))
        finish(engine)
        assert request.sequence.n_prefix_hit == n // PAGE * PAGE


def test_a_request_that_outgrows_a_pool_of_windows_is_refused() -> None:
    """A request that waits forever."""
    engine = engine_of(8)
    add(engine, prompt_of(60), greedy(50))
    with pytest.raises(CapacityError, match="KV pages"):
        add(engine, prompt_of(600), greedy(50))
    finish(engine)


def test_pages_set_aside_are_claimed_by_their_owner_alone() -> None:
    """A page cached under the key of a text that it no longer holds."""
    pool = PagePool(2, PAGE, 32, 16)
    (page,) = pool.allocate(1)
    pool.set_aside(page, (1, 0), first_out=True)
    pool.check_integrity([])
    assert pool.n_free == 2
    taken = pool.allocate(2)
    pool.check_integrity([taken])
    pool.claim(page, (1, 0), b"a")
    assert not pool.find([b"a"])
    pool.free(taken[1:])
    pool.set_aside(taken[0], (1, 3), first_out=False)
    pool.claim(taken[0], (1, 0), b"a")
    assert not pool.find([b"a"])
    pool.claim(taken[0], (1, 3), b"a")
    assert pool.find([b"a"]) == taken[:1]
    pool.check_integrity([])


GEMMA_3_4B = KVCost(((None, 5 * 4096 * PAGE), (1024, 29 * 4096 * PAGE)), PAGE, 512)


def test_the_cache_of_a_model_with_windows() -> None:
    """A pool that has room for the whole context in each layer, or too little for a prompt's step."""
    cost = GEMMA_3_4B
    assert cost.n_bytes(cost.most_held(32768)) < 0.8 * 2**30
    assert cost.page_bytes * 32768 // PAGE > 4.2 * 2**30
    assert cost.longest(cost.n_bytes(cost.most_held(32768))) == 32768
    full, windowed = cost.pool_sizes(None, 4, 32768)
    assert (full, windowed) == (4 * 2048, 4 * (most_pages(32768, PAGE, 1024, 512) + 64))
    assert cost.pool_sizes(None, 4, 512) == (128, 128)
    for n_bytes in (200 << 20, 1 << 30, 3 << 30, 40 << 30):
        context = min(cost.longest(n_bytes), 32768)
        sizes = cost.pool_sizes(n_bytes, 4, context)
        assert cost.n_bytes(sizes) <= n_bytes < cost.n_bytes(sizes) * 1.01 + cost.page_bytes
        assert all(n >= most for n, most in zip(sizes, cost.most_held(context), strict=True))
    both = cost.with_others([4096 * PAGE])
    assert both.pools == ((None, 6 * 4096 * PAGE), (1024, 29 * 4096 * PAGE))
    mistral = KVCost(((4096, 4096 * PAGE),), PAGE, 512)
    assert mistral.longest(1 << 30) > 1 << 30
    assert mistral.pool_sizes(1 << 30, 1, 32768) == ((1 << 30) // (4096 * PAGE),)
