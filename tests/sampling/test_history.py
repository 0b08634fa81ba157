"""The token history of a request: what it finds is what looking everywhere finds, at a bounded cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kukri.sampling import SamplingParams, history
from kukri.sampling.history import DryRepetitions, Tokens
from kukri.sampling.params import TokenSet
from tests.stopwatch import within

N = 131_072


def matches(ids: list[int], most: int) -> list[int]:
    """The definition: for each place, how many tokens up to it equal the last ones."""
    found = []
    for j in range(len(ids)):
        n = 0
        while n <= j and n < most and ids[j - n] == ids[len(ids) - 1 - n]:
            n += 1
        found.append(n)
    return found


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 50), st.sampled_from([0, 16]))
def test_lengths_of_matches_are_those_of_looking_everywhere(ids, most, most_work):
    """Catches a length off by one, in either of the two ways to find them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_MOST_WORK", most_work)
        found = history._match_lengths(np.array(ids, np.int32), min(most, len(ids)))
    assert found.tolist() == matches(ids, min(most, len(ids)))


@pytest.mark.parametrize("text", ["the same", "a pair", "random", "many breakers"])
def test_dry_of_a_long_prompt_is_cheap(text):
    """Catches cost that grows with the square of the prompt, or for each token with the breakers."""
    rng = np.random.default_rng(0)
    prompt = {
        "the same": np.zeros(N, np.int32),
        "a pair": np.arange(N, dtype=np.int32) % 2,
        "random": rng.integers(0, 5, N).astype(np.int32),
        "many breakers": np.zeros(N, np.int32),
    }[text]
    long = [(*(0,) * (i % 60), 1 + i, *(0,) * (60 - i % 60)) for i in range(64)]
    breakers = [*long, TokenSet([*range(100, 100_000)])] if text == "many breakers" else []
    params = SamplingParams(dry_multiplier=1, dry_base=1.00001, dry_allowed_length=1)
    with within(1):
        tokens = Tokens(prompt)
        dry = DryRepetitions(params, tokens, breakers)
    with within(20 * 0.01):
        for i in range(20):
            tokens.add(int(prompt[i]))
            dry.update()
            dry.table()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
)
def test_a_repetition_ends_at_the_last_breaker_of_the_prompt(ids, breakers):
    """Catches a breaker of several tokens that is missed, or is found where it is cut."""
    phrases = [tuple(one) for one in breakers]
    dry = DryRepetitions(SamplingParams(dry_multiplier=1), Tokens(ids), phrases)
    ends = (
        n
        for n in range(len(ids), 0, -1)
        if any(tuple(ids[n - len(p) : n]) == p for p in phrases if len(p) <= n)
    )
    assert dry._start == next(ends, 0)
