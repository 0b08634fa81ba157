"""The scheduler by itself, an engine's part played: what holds in each step, whatever arrives and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from kukri.engine.kv_allocator import KVAllocator
from kukri.engine.pages import PageKey, PagePool
from kukri.engine.request import Request
from kukri.engine.scheduled_step import ScheduledChunk, ScheduledStep
from kukri.engine.scheduler import Scheduler
from kukri.engine.sequence import RequestState, TokenSequence
from kukri.engine.states import StatePool
from kukri.errors import CapacityError, KukriError
from kukri.sampling import SampledToken, SamplingParams

PAGE, CONTEXT, STEP, PLACES = 4, 64, 24, 4


@dataclass
class Arrival:
    """A request and the step before which it comes; `leaves` is the step before which its client goes."""

    step: int
    n_prompt: int
    n_new: int
    priority: int
    client: str
    text: int  # equal ones begin alike
    leaves: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        n_prompt=st.integers(1, 40),
        n_new=st.integers(1, 20),
        priority=st.integers(-1, 1),
        client=st.sampled_from("ab"),
        text=st.integers(0, 2),
        leaves=st.none() | st.integers(1, 20),
    ),
    min_size=1,
    max_size=9,
)


@dataclass
class Play:
    """Plays arrivals on a scheduler, one step after another, and checks each."""

    scheduler: Scheduler
    requests: list[Request] = field(default_factory=list)
    n_steps: int = 0

    def add(self, one: Arrival) -> Request | None:
        """Queues a request; None if it could outgrow all pages."""
        prompt = (np.arange(one.n_prompt, dtype=np.int32) * 7 + one.text) % 100
        params = SamplingParams(temperature=0, max_tokens=one.n_new)
        request = Request.new(
            len(self.requests), prompt, params, max_context=CONTEXT, max_pages=CONTEXT // PAGE,
            priority=one.priority, client=one.client,
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except CapacityError:
            return None
        self.requests.append(request)
        return request

    def step(self) -> ScheduledStep:
        """One step, as an engine makes it."""
        scheduler = self.scheduler
        before = list(scheduler.running)
        step = scheduler.schedule()
        self._check(step, before)
        for chunk in step.chunks:
            chunk.request.sequence.is_in_flight = True
        scheduler.check_integrity()
        results: list[list[SampledToken | KukriError]] = []
        for chunk in step.chunks:
            chunk.request.sequence.is_in_flight = False
            results.append([SampledToken(chunk.request.sequence.n_tokens % 90)] if chunk.n_logits else [])
        if step.is_repeat:
            scheduler.postprocess_each(step.chunks, [one[0] for one in results], 0.0)
        else:
            scheduler.postprocess(step.chunks, results, 0.0)
        scheduler.check_integrity()
        self.n_steps += 1
        return step

    def _check(self, step: ScheduledStep, before: list[Request]) -> None:
        scheduler, chunks = self.scheduler, step.chunks
        assert bool(chunks) == bool(scheduler.running or scheduler.waiting), "a step that does nothing"
        assert sum(chunk.n_tokens for chunk in chunks) <= STEP
        inside = [chunk.request for chunk in chunks]
        assert len({request.id for request in inside}) == len(inside), "a request twice in a step"
        assert all(chunk.start == chunk.request.sequence.n_cached for chunk in chunks)
        writing = [self._page_of(chunk.request, i) for chunk in chunks for i in self._slots(chunk)]
        assert len(set(writing)) == len(writing), "two tokens in one place of the cache"
        decoding = [
            r for r in scheduler.running if r in before and r.sequence.n_cached == r.sequence.n_tokens - 1
        ]
        assert all(request in inside for request in decoding), "an answer that stands still"
        lost = [request for request in before if request.sequence.state is RequestState.WAITING]
        kept = [request for request in before if request in scheduler.running]
        turns = [(request.priority, request.id) for request in (*kept, *lost)]
        assert turns == sorted(turns), "somebody preempted before those after him in turn"
        best = min((request.priority for request in scheduler.waiting), default=None)
        if lost and best is not None:
            assert all(request.priority >= best for request in lost), "preempted for somebody less urgent"

    @staticmethod
    def _slots(chunk: ScheduledChunk) -> range:
        return range(chunk.start, chunk.start + chunk.n_tokens)

    @staticmethod
    def _page_of(request: Request, i: int) -> tuple[int, int]:
        return int(request.sequence.page_rows[0][i // PAGE]), i % PAGE


class TwiceAsked(KVAllocator):
    """Compares the short answer to whether a request has room with the long one."""

    def has_room(self, sequence: TokenSequence, *others: Sequence[TokenSequence]) -> bool:
        """See KVAllocator.has_room."""
        has_room, n_found = super().has_room(sequence, *others), sequence.n_found
        assert has_room == (self.find_room(sequence, *others) is not None)
        sequence.n_found = n_found
        return has_room


@pytest.mark.representative(3)
@seed(29)
@settings(max_examples=200, deadline=None, database=None)
@given(
    ARRIVALS,
    st.integers(12, 40),
    st.booleans(),
    st.integers(1, PLACES),
    st.lists(st.tuples(st.integers(1, 20), st.integers(8, 30)), max_size=1),
)
def test_every_request_gets_all_its_tokens(
    arrivals: list[Arrival], n_pages: int, caches: bool, places: int, windows: list[tuple[int, int]]
) -> None:
    """Catches pages lost or given twice, a step that does nothing while somebody waits, a prompt or an answer
    that stands still, preemptions that take turns forever, and room that is there but is not seen."""
    pools = [PagePool(n_pages, PAGE), *(PagePool(n, PAGE, window, STEP) for window, n in windows)]
    play = Play(Scheduler(TwiceAsked(pools, caches_prefixes=caches), places, STEP, 16))
    left = sorted(arrivals, key=lambda one: one.step)
    going: list[tuple[int, Request]] = []
    n_work = 0
    while left or play.scheduler.running or play.scheduler.waiting:
        while left and (left[0].step <= play.n_steps or not play.scheduler.running):
            one = left.pop(0)
            if (request := play.add(one)) is not None:
                n_work += one.n_prompt + one.n_new
                going += [] if one.leaves is None else [(one.leaves, request)]
        for step, request in going:
            if step == play.n_steps and request.sequence.state is not RequestState.FINISHED:
                play.scheduler.finish(request, "abort")
        if play.scheduler.running or play.scheduler.waiting:
            play.step()
        assert play.n_steps <= 20 + 20 * n_work, "it never ends"
    for request in play.requests:
        assert request.answer.finish_reason in ("length", "abort")
        assert request.answer.finish_reason == "abort" or request.sequence.n_tokens == request.max_length
    assert [pool.n_free for pool in pools] == [pool.n_pages for pool in pools]


class CountedKeys(dict[PageKey, int]):
    """Pages by key, which counts how often one is looked up."""

    n_lookups = 0

    def get(self, *key: Any) -> Any:
        """See dict.get."""
        self.n_lookups += 1
        return super().get(*key)

    def __contains__(self, key: object) -> bool:
        self.n_lookups += 1
        return super().__contains__(key)


def lookups_while_waiting(n_tokens: int, *, has_states: bool) -> int:
    """Pages looked up in ten steps while a prompt waits, half of which is cached and idle."""
    pool = PagePool(2 * n_tokens // PAGE, PAGE)
    scheduler = Scheduler(
        KVAllocator([pool], states=StatePool(9) if has_states else None), PLACES, 3 * n_tokens
    )

    def add(n: int, n_new: int, start: int) -> Request:
        prompt, params = np.arange(start, start + n, dtype=np.int32), SamplingParams(max_tokens=n_new)
        request = Request.new(start, prompt, params, max_context=4 * n_tokens, max_pages=pool.n_pages)
        scheduler.add(request)
        return request

    def step() -> None:
        chunks = scheduler.schedule().chunks
        scheduler.postprocess(chunks, [[SampledToken(5)] for _ in chunks], 0.0)
        scheduler.start_over()

    add(n_tokens // 2, 1, 0)
    step()
    add(n_tokens + 20, 20, n_tokens)
    step()
    waiting = add(n_tokens, 1, 0)
    pool._page_of = counted = CountedKeys(pool._page_of)
    for _ in range(10):
        step()
    assert waiting in scheduler.waiting
    return counted.n_lookups


@pytest.mark.parametrize("has_states", [False, True])
def test_a_long_prompt_that_waits_costs_a_step_no_more_than_a_short_one(has_states: bool) -> None:
    """Catches a walk over all pages of a prompt in each step in which it finds no room."""
    short, long = (lookups_while_waiting(n, has_states=has_states) for n in (100, 3_200))
    assert 0 < long <= 3 * short


@seed(29)
@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(2, 6), st.integers(20, 40))
def test_a_client_with_many_requests_takes_no_more_than_half(n_many: int, n_prompt: int) -> None:
    """Catches shares by request: whoever sends more, gets more, and one alone waits for all of them."""
    play = Play(Scheduler(KVAllocator([PagePool(200, PAGE)], caches_prefixes=False), PLACES, STEP, 16))
    many = [play.add(Arrival(0, n_prompt, 4, 0, "a", i, None)) for i in range(n_many)]
    one = play.add(Arrival(0, n_prompt, 4, 0, "b", 9, None))
    assert one is not None
    while not one.n_generated:
        play.step()
    served = sum(request.sequence.n_cached for request in many if request is not None)
    assert served <= one.sequence.n_cached + 2 * STEP
    assert one.n_generated


@seed(29)
@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(4, 30), min_size=1, max_size=5), st.integers(12, 30))
def test_an_urgent_request_never_waits_for_others(others: list[int], n_pages: int) -> None:
    """Catches a request of the best priority that waits while pages of the others could be taken back."""
    play = Play(Scheduler(KVAllocator([PagePool(n_pages, PAGE)], caches_prefixes=False), PLACES, STEP))
    for n in others:
        play.add(Arrival(0, n, 15, 1, "a", n, None))
    for _ in range(3):
        if play.scheduler.running or play.scheduler.waiting:
            play.step()
    urgent = play.add(Arrival(0, 20, 3, -1, "a", 5, None))
    assert urgent is not None
    for _ in range(3):  # in the first, answers may take the pages that were free for it
        play.step()
    assert urgent.n_generated
