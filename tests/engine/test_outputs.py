"""Requests for rows of logits or hidden states: those that they get alone, whatever runs next to them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.engine import Request, step_sampler
from kukri.errors import CapacityError
from tests.engine.driving import SIZES, add, any_events, finish, greedy, play, prompt_of, rows_of
from tests.engine.fake_model import (
    N_HIDDEN,
    N_VOCAB,
    POISON,
    expected_output,
    hidden_state,
    make_engine,
    next_token,
)


def states(ids: list[int], first_row: int = 0) -> np.ndarray:
    return np.stack([hidden_state(ids[: i + 1]) for i in range(first_row, len(ids))])


def check(request: Request, ids: list[int], first_row: int) -> None:
    """Asserts that a finished request has its rows."""
    assert request.answer.finish_reason == "stop"
    assert request.n_generated == 0
    assert request.answer.rows is not None
    if request.output == "logits":
        want = [next_token(ids[: i + 1]) for i in range(first_row, len(ids))]
        assert request.answer.rows.argmax(axis=1).tolist() == want
    elif request.output == "hidden":
        np.testing.assert_array_equal(request.answer.rows, states(ids, first_row))
    else:
        np.testing.assert_array_equal(request.answer.rows, states(ids, first_row).mean(axis=0))


@pytest.mark.full
@settings(max_examples=150)
@given(
    **SIZES,
    events=any_events(
        st.integers(0, 50),  # tokens of a prompt that others begin with too
        st.integers(1, 30),  # tokens of its own
        st.sampled_from(["tokens", "logits", "hidden", "pooled"]),
        st.integers(0, 79),  # the first row, as far as there are so many
        st.integers(0, 1),  # priority
        st.sampled_from(["", "a"]),  # client
        max_size=30,
    ),
    caches_prefixes=st.booleans(),
)
def test_any_order_of_events_gives_every_request_its_rows(
    max_requests: int,
    max_step_tokens: int,
    n_pages: int,
    n_in_flight: int,
    events: list,
    caches_prefixes: bool,
) -> None:
    """Rows of another request or token, rows lost at a chunk's edge, by a prefix hit or preemption, a request
    of one program that waits forever for those of the other, pages kept."""
    engine, _ = make_engine(
        96, max_requests, max_step_tokens, n_pages, max_prompt_tokens=9, caches_prefixes=caches_prefixes
    )
    live: list[tuple[Request, list[int], int]] = []

    def make(
        i: int, n_shared: int, n_own: int, output: Any, first_row: int, priority: int, client: str
    ) -> list[Request]:
        prompt = prompt_of(50)[:n_shared] + prompt_of(n_own, i)
        first_row = min(first_row, len(prompt) - 1)
        if output == "tokens":
            requests = engine.maker.make_requests(prompt, greedy(9), priority=priority, client=client)
        else:
            options = {"first_row": first_row, "priority": priority, "client": client}
            requests = [engine.maker.make_output_request(prompt, output, **options)]
        live.extend((request, prompt, first_row) for request in requests)
        return requests

    play(engine, events, make, n_in_flight)
    for request, prompt, first_row in live:
        if request.answer.finish_reason == "abort":
            continue
        if request.output == "tokens":
            assert request.output_ids == expected_output(prompt, 9)
        else:
            check(request, prompt, first_row)
    assert engine.pool.n_free == n_pages


def test_pooled_rows_are_added_one_after_another() -> None:
    """Catches a sum that depends on the chunks of a prompt, as NumPy states no order for `sum`."""
    rows = np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32)
    total = np.zeros(3, np.float32)
    for row in rows:
        total += row
    for cuts in ([0, 500], [0, 1, 130, 499, 500]):
        request: Any = SimpleNamespace(answer=SimpleNamespace(rows=None), output="pooled", first_row=0)
        request.stop_row = 500
        for start, stop in pairwise(cuts):
            chunk: Any = SimpleNamespace(request=request, start=start, n_tokens=stop - start)
            step_sampler._keep_rows(chunk, np.asfortranarray(rows[start:stop]))
        np.testing.assert_array_equal(request.answer.rows, total / np.float32(500))


def test_rows_use_the_prefix_before_the_first_that_is_wanted() -> None:
    """Rows left out because their tokens were cached, or a known prefix computed again for one row."""
    engine, backend = make_engine(max_context=128, max_step_tokens=128)
    prompt = prompt_of(70)
    assert rows_of(engine, prompt, "hidden").shape == (70, N_HIDDEN)
    for first_row, n_computed in ((69, 6), (40, 38), (0, 70)):
        backend.batches.clear()
        rows = rows_of(engine, prompt, "hidden", first_row=first_row)
        np.testing.assert_array_equal(rows, states(prompt, first_row))
        assert backend.batches == [(n_computed, 1, 70 - first_row)]
    request = add(engine, prompt, greedy(3))  # a prefix is the same for both programs
    finish(engine)
    assert request.sequence.n_prefix_hit == 64
    assert request.output_ids == expected_output(prompt, 3)


def test_rows_are_given_for_a_text_that_fills_the_context() -> None:
    """A page for a token that never comes, or one page too few."""
    engine, _ = make_engine(max_context=64, n_pages=4)
    assert rows_of(engine, prompt_of(64)).shape == (64, N_VOCAB)
    np.testing.assert_array_equal(
        rows_of(engine, prompt_of(64), "pooled"), states(prompt_of(64)).mean(axis=0)
    )
    engine, _ = make_engine(max_context=128, n_pages=4)
    with pytest.raises(CapacityError, match="KV pages"):
        rows_of(engine, prompt_of(65))


def test_programs_take_turns() -> None:
    """Texts that wait until nobody generates, or streams that wait until no text is left."""
    engine, _ = make_engine(max_context=256, max_requests=4, max_prompt_tokens=16)
    request = add(engine, prompt_of(5), greedy(100))
    engine.step()
    texts = [engine.maker.make_output_request(prompt_of(64, i), "pooled") for i in range(6)]
    for text in texts:
        engine.add_request(text)
    n_steps = 0
    while not all(text.answer.finish_reason for text in texts):
        engine.step()
        n_steps += 1
    assert n_steps == 2 * (6 * 64 // 16) - 1  # the first and the last are of texts
    assert request.n_generated == 1 + n_steps // 2


def test_nan_is_a_result_that_no_other_request_reads() -> None:
    """NaN in a page that others find, or a text that fails where its numbers are wanted."""
    engine, _ = make_engine(max_context=64)
    poisoned = [*prompt_of(20), POISON, *prompt_of(15, 1)]
    rows = rows_of(engine, poisoned, "hidden")
    assert np.isnan(rows[20:]).any(axis=1).all()
    assert not np.isnan(rows[:20]).any()
    assert engine.pool.n_cached == 0
    assert np.isnan(rows_of(engine, poisoned, "pooled")).any()


def test_hidden_states_are_compiled_when_first_wanted() -> None:
    """A program that every start pays for, or one that is compiled at each step or listens to no hook."""
    engine, backend = make_engine()
    add(engine, prompt_of(5), greedy(3))
    finish(engine)
    assert backend.n_compiled == 1
    for _ in range(3):
        rows_of(engine, prompt_of(5), "pooled")
    assert backend.n_compiled == 2
