"""Recurrent states: slots, snapshots, prefixes that continue from them, preemption, several answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.config import EngineConfig
from kukri.engine import Engine, Request
from kukri.engine.draft_model import DraftModel, DraftSource
from kukri.engine.states import StatePool, snapshot_places
from kukri.errors import ConfigError
from tests.engine.driving import (
    SIZES,
    WINDOWS,
    Event,
    Pipeline,
    add,
    any_events,
    finish,
    greedy,
    pages_with_windows,
    play,
    prompt_of,
)
from tests.engine.fake_model import STATE_BYTES, FakeModel, SeerDrafts, expected_output, make_engine


def hybrid(n_snapshots: int = 20, **options: Any) -> Engine:
    """An engine on the fake model with a state, which asserts that each state is that of its text."""
    sizes: dict[str, Any] = {"max_context": 256, "max_step_tokens": 100, **options}
    return make_engine(has_states=True, snapshot_bytes=n_snapshots * STATE_BYTES, **sizes)[0]


def run(engine: Engine, prompt: list[int], n: int = 3) -> Request:
    """A finished request, with the tokens that it must have."""
    request = add(engine, prompt, greedy(n))
    finish(engine)
    assert request.output_ids == expected_output(prompt, n)
    return request


def test_a_shared_prefix_is_computed_once() -> None:
    """Prompts that are read again from the start, or from a state that is not after the pages they share."""
    engine = hybrid()
    shared, ends = prompt_of(100), [prompt_of(30, seed) for seed in (1, 2, 3)]
    hits = [run(engine, shared + end).sequence.n_prefix_hit for end in ends]
    # the first left states after tokens 128, 64 and (back by twice as much) none; the second one after the
    # 96 tokens that both share
    assert hits == [0, 64, 96]
    assert run(engine, shared + ends[0]).sequence.n_prefix_hit == 128


def test_the_next_turn_continues_after_the_answer() -> None:
    """An answer whose state is lost with its request, or one for each of its pages."""
    engine = hybrid()
    prompt = prompt_of(20)
    first = run(engine, prompt, 60)
    said = [*prompt, *first.output_ids]
    assert engine.allocator.states is not None
    assert engine.allocator.states.n_snapshots == 2  # after 16 tokens of the prompt and 64 of all
    assert run(engine, said + prompt_of(9, 1)).sequence.n_prefix_hit == 64


def test_without_snapshots_prompts_are_read_whole() -> None:
    """A slot of a request taken for a snapshot; a state taken from nowhere."""
    for options in ({"n_snapshots": 0}, {"caches_prefixes": False}):
        engine = hybrid(**options, max_requests=2)
        assert [run(engine, prompt_of(100)).sequence.n_prefix_hit for _ in range(2)] == [0, 0]
        assert engine.allocator.states is not None
        assert engine.allocator.states.n_slots == 2


def test_the_longest_unused_snapshot_makes_room() -> None:
    """A snapshot in use that is lost, or a request that finds no slot."""
    engine = hybrid(n_snapshots=2)
    prompts = [prompt_of(40, seed) for seed in range(3)]
    run(engine, prompts[0])
    run(engine, prompts[1])
    assert run(engine, prompts[0]).sequence.n_prefix_hit == 32
    run(engine, prompts[2])
    assert run(engine, prompts[0]).sequence.n_prefix_hit == 32
    assert run(engine, prompts[1]).sequence.n_prefix_hit == 0


def test_several_answers_share_their_prompt() -> None:
    """A second answer that reads the prompt again, or continues with the first one's state."""
    engine = hybrid(max_requests=4)
    prompt = prompt_of(70)
    requests = engine.maker.make_requests(prompt, greedy(20, n=3))
    for request in requests:
        engine.add_request(request)
    finish(engine)
    for request in requests:
        assert request.output_ids == expected_output(prompt, 20)
    assert [request.sequence.n_prefix_hit for request in requests] == [0, 64, 64]


def test_a_preempted_request_is_recomputed() -> None:
    """A state that is not given back, or continues from where its request was preempted."""
    engine = hybrid(max_context=128, max_requests=3, n_pages=9)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    requests = [add(engine, prompt, greedy(60)) for prompt in prompts]
    finish(engine)
    assert engine.scheduler.n_preemptions > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == expected_output(prompt, 60)


def test_what_hooks_saw_leaves_no_snapshot() -> None:
    """A state that a hook may have changed, found by a later request."""
    engine = hybrid()
    prompt = prompt_of(50)
    run(engine, prompt)
    engine.add_hooks({})
    assert engine.allocator.states is not None
    assert engine.allocator.states.n_snapshots == 0
    assert run(engine, prompt).sequence.n_prefix_hit == 0


@pytest.mark.parametrize("skill", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("n_snapshots", [0, 3, 20])
@pytest.mark.parametrize("windows", [(), (40, 9), (1,)], ids=str)
def test_drafts_leave_the_state_of_what_was_accepted(
    skill: float, n_snapshots: int, windows: tuple[int, ...]
) -> None:
    """A state that has read a rejected draft, or not an accepted one; an answer that leaves no snapshot of
    its last page because its drafts went past it; a model with windows that has no drafts, or whose window
    has passed what the state reads again.
    """
    engine = hybrid(n_snapshots, max_requests=2, windows=windows)
    prompt = prompt_of(20)
    request = engine.maker.make_request(prompt, greedy(100))
    request.drafts = SeerDrafts(skill, seed=1)  # type: ignore[assignment]
    engine.add_request(request)
    finish(engine)
    assert request.output_ids == expected_output(prompt, 100)
    assert request.sequence.n_drafted > 0
    if skill == 1:
        assert request.sequence.n_accepted > 100 - 2 - 100 // 16 - 2, "a step for each page"
    turn = [*prompt, *request.output_ids, *prompt_of(9, 1)]
    assert run(engine, turn).sequence.n_prefix_hit == (112 if n_snapshots else 0)


def test_a_draft_model_has_no_state() -> None:
    """A draft model that cannot go back."""
    model: Any = FakeModel(64)
    small = FakeModel(64, has_states=True)
    with pytest.raises(ConfigError, match=r"a draft model \(--draft-model\) must have no recurrent"):
        Engine(model, make_engine()[1], EngineConfig(), draft=DraftSource(small, DraftModel))  # type: ignore[arg-type]


@pytest.mark.full
@given(
    events=any_events(
        st.integers(1, 70),
        st.integers(1, 20),
        st.integers(0, 3),
        st.integers(0, 60),
        st.integers(1, 3),
        max_size=12,
    ),
    n_snapshots=st.integers(0, 6),
    n_in_flight=SIZES["n_in_flight"],
    max_requests=SIZES["max_requests"],
    max_step_tokens=SIZES["max_step_tokens"],
    n_pages=SIZES["n_pages"],
    windows=WINDOWS,
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_states_are_those_of_their_texts(
    events: list[Event],
    n_snapshots: int,
    n_in_flight: int,
    n_pages: int,
    windows: list[tuple[int, int]],
    **sizes: Any,
) -> None:
    """A slot lost or held twice, a snapshot overwritten while it is found, or one of another text."""
    sizes |= pages_with_windows(windows, n_pages, sizes["max_step_tokens"])
    engine = hybrid(n_snapshots, max_context=96, **sizes)
    made: list[tuple[Request, list[int], int]] = []

    def make(i: int, n_prompt: int, n_tokens: int, seed: int, n_shared: int, n: int) -> list[Request]:
        prompt = (prompt_of(n_shared) + prompt_of(n_prompt, seed))[:70]
        requests = engine.maker.make_requests(prompt, greedy(n_tokens, n=n))
        made.extend((request, prompt, n_tokens) for request in requests)
        return requests

    play(engine, events, make, n_in_flight)
    for request, prompt, n_tokens in made:
        if request.answer.finish_reason == "length":
            assert request.output_ids == expected_output(prompt, n_tokens)


def test_steps_in_flight_keep_their_states() -> None:
    """A state given to another while a step that writes it is under way."""
    engine = hybrid(n_snapshots=1, max_requests=4, max_step_tokens=16)
    pipeline = Pipeline(engine, 3)
    requests = [add(engine, prompt_of(40, seed), greedy(9)) for seed in range(6)]
    for _ in range(3):
        pipeline.step()
    engine.abort(requests[0])
    finish(engine, pipeline=pipeline)
    assert pipeline.most_in_flight > 1
    for seed, request in enumerate(requests[1:], 1):
        assert request.output_ids == expected_output(prompt_of(40, seed), 9)


def test_places_of_snapshots() -> None:
    """One that leaves no token to compute, or places that are no ends of pages."""
    assert snapshot_places(16, 0, 16) == []
    assert snapshot_places(17, 0, 16) == [16]
    assert snapshot_places(1000, 0, 16) == [992, 928, 800, 544, 32]
    assert snapshot_places(1000, 640, 16) == [992, 928, 800, 640, 544, 32]
    assert snapshot_places(100, 96, 16) == [96, 32]


def test_the_pool_finds_a_slot_held_twice() -> None:
    """A check that passes whatever is lost."""
    pool = StatePool(3)
    slot = pool.allocate()
    pool.keep(b"7", slot)
    held = pool.allocate()
    pool.check_integrity([held])
    for wrong in ([], [held, held], [slot, held]):
        with pytest.raises(AssertionError, match="lost, or held twice"):
            pool.check_integrity(wrong)
