"""Repeated steps: the last step's objects, advanced by a token, give what a new step gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.engine import Engine
from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.request import Request
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.sampling import SamplingParams
from tests.engine.driving import add, greedy, prompt_of
from tests.engine.fake_model import POISON, expected_output, make_engine
from tests.tiny_gguf import write_tiny

PAGE = 16


def arrays_of(batch: ForwardBatch) -> dict[str, np.ndarray]:
    """A batch's arrays by name."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def test_a_batch_moved_on_is_the_batch_made_again() -> None:
    """A position, slot, length or page that stays where it was, within a page and from page to page."""
    limits = StepLimits(max_tokens=8, max_sequences=4, max_logit_rows=4, max_pages=6)
    requests = [
        Request.new(i, np.arange(90, dtype=np.int32), SamplingParams(), max_context=96, max_pages=6)
        for i in range(3)
    ]
    for i, request in enumerate(requests):
        request.sequence.page_rows[0][:] = np.arange(6) * 3 + i + 1
    chunks = [
        Chunk(request.sequence, start, 1, 1) for request, start in zip(requests, (3, 14, 31), strict=True)
    ]
    moved = BatchBuilder(StepInputs.zeros(limits), PAGE)
    for _ in range(40):
        again = BatchBuilder(StepInputs.zeros(limits), PAGE).build(chunks)
        got = moved.build(chunks)
        for name, array in arrays_of(again).items():
            np.testing.assert_array_equal(arrays_of(got)[name], array, name)
        for chunk in chunks:
            chunk.start += 1
            if chunk.start % PAGE == 0:  # a page just given
                chunk.sequence.page_rows[0][chunk.start // PAGE] += 50


def repeats(engine: Engine) -> bool:
    """Runs a step; whether it continued from the one before."""
    step = engine.launch()
    assert step is not None
    engine.collect(step)
    engine.check_integrity()
    return step.is_repeat


def test_steps_continue_until_other_requests_run() -> None:
    """A step of those that ran before, while a request waits, has ended, or was aborted."""
    engine, _ = make_engine(max_requests=3, max_step_tokens=64)
    first, second = (add(engine, prompt_of(20, i), greedy(n)) for i, n in enumerate((60, 8)))
    assert [repeats(engine) for _ in range(8)] == [False, False, *[True] * 6]  # `second` ends with these
    assert [repeats(engine) for _ in range(2)] == [False, True]
    third = add(engine, prompt_of(20, 2), greedy(40))
    assert [repeats(engine) for _ in range(3)] == [False, False, True]
    engine.abort(third)
    assert [repeats(engine) for _ in range(2)] == [False, True]
    while engine.has_work:
        repeats(engine)
    assert first.output_ids == expected_output(prompt_of(20, 0), 60)
    assert second.output_ids == expected_output(prompt_of(20, 1), 8)


def test_a_step_that_continues_is_not_launched_twice() -> None:
    """A token computed by two steps in flight."""
    engine, _ = make_engine(max_requests=2, max_step_tokens=64)
    request = add(engine, prompt_of(20), greedy(30))
    while not repeats(engine):
        pass
    step = engine.launch()
    assert step is not None
    assert step.is_repeat
    assert engine.launch() is None
    engine.collect(step)
    while engine.has_work:
        engine.step()
    assert request.output_ids == expected_output(prompt_of(20), 30)


def test_an_abort_in_flight_of_a_step_that_continues() -> None:
    """A token for a request that has ended, or a page that it keeps."""
    engine, _ = make_engine(max_requests=2, max_step_tokens=64)
    stays, leaves = (add(engine, prompt_of(20, i), greedy(30)) for i in range(2))
    while not repeats(engine):
        pass
    step = engine.launch()
    assert step is not None
    engine.abort(leaves)
    assert [output.request for output in engine.collect(step)] == [stays]
    engine.check_integrity()
    while engine.has_work:
        engine.step()
    assert stays.output_ids == expected_output(prompt_of(20, 0), 30)
    assert engine.pool.n_free == engine.pool.n_pages


def test_pages_that_run_out_end_going_on() -> None:
    """Pages taken that nobody has, or a request preempted whose chunk is repeated."""
    engine, _ = make_engine(max_context=64, max_requests=3, max_step_tokens=64, n_pages=6)
    requests = [add(engine, prompt_of(14 + i, i), greedy(40)) for i in range(3)]
    while engine.has_work:
        repeats(engine)
    assert engine.scheduler.n_preemptions
    for i, request in enumerate(requests):
        assert request.output_ids == expected_output(prompt_of(14 + i, i), 40)


@pytest.mark.parametrize("spoil", [lambda row: row * np.nan, lambda row: row + np.inf])
def test_logits_that_are_no_numbers_end_their_request_alone(
    spoil: Callable[[np.ndarray], np.ndarray],
) -> None:
    """An error that takes the other requests of a repeated step with it."""
    engine, _ = make_engine(max_requests=2, max_step_tokens=64)
    well, ill = (add(engine, prompt_of(20, i), greedy(30)) for i in range(2))
    while not repeats(engine):
        pass
    step = engine.launch()
    assert step is not None
    row = step.logits.numpy()[1]
    row[...] = spoil(row)
    outputs = engine.collect(step)
    assert [output.finish_reason for output in outputs] == [None, "error"]
    assert ill.answer.error is not None
    while engine.has_work:
        engine.step()
    assert well.output_ids == expected_output(prompt_of(20, 0), 30)
    assert POISON not in well.output_ids


@pytest.mark.full
def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Rows, grammars and taps of the last requests in memory until others come."""
    for ends in ("length", "abort"):
        engine, _ = make_engine(max_requests=2, max_step_tokens=64)
        requests = [add(engine, prompt_of(20, i), greedy(9)) for i in range(2)]
        gone = [weakref.ref(request) for request in requests]
        for _ in range(5):
            engine.step()
        while ends == "abort" and requests:
            engine.abort(requests.pop())
        while engine.has_work:
            engine.step()
        requests.clear()
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_a_step_that_cannot_continue_takes_no_pages() -> None:
    """Pages given to the first requests of a step that then fails for the last: held beyond their tokens."""
    engine, _ = make_engine(max_context=64, max_requests=2, max_step_tokens=64, n_pages=4)
    requests = [add(engine, prompt_of(14, i), greedy(40)) for i in range(2)]
    while not (repeats(engine) and engine.pool.n_free == 2):
        pass
    while requests[0].sequence.n_cached % PAGE:
        repeats(engine)
    engine.pool.allocate(1)  # one is left, and both need one
    assert not engine.scheduler._repeat()
    assert [request.sequence.n_pages for request in requests] == [1, 1]


def test_steps_continue_while_those_that_wait_find_no_room() -> None:
    """A server whose steps take longest when it is full; one who waits for a place that has become free."""
    for limit in ({"max_requests": 2}, {"max_requests": 3, "n_pages": 7}):
        engine, _ = make_engine(max_context=64, max_step_tokens=64, **limit)
        running = [add(engine, prompt_of(20, i), greedy(n)) for i, n in enumerate((40, 12))]
        waiting = add(engine, prompt_of(50, 2), greedy(3))
        ways = []
        while running[1].answer.finish_reason is None:
            ways.append(repeats(engine))
        assert ways == [False, False, *[True] * 10]
        while running[0].answer.finish_reason is None:
            repeats(engine)
            assert waiting.n_generated or engine.pool.n_free < 4
        while engine.has_work:
            repeats(engine)
        for i, request in enumerate((*running, waiting)):
            prompt = prompt_of(request.n_prompt, i)
            assert request.output_ids == expected_output(prompt, request.n_generated)


def test_who_comes_while_others_wait_may_find_room() -> None:
    """A short request that is not looked at since a long one before it had found no room, then left."""
    engine, _ = make_engine(max_context=64, max_requests=3, max_step_tokens=64, n_pages=6)
    add(engine, prompt_of(20), greedy(40))
    long = add(engine, prompt_of(60, 1), greedy(2))
    while not repeats(engine):
        pass
    short = add(engine, prompt_of(10, 2), greedy(2))
    engine.abort(long)
    repeats(engine)
    assert short.n_generated == 1


class SeenRows:
    """Taps that note which tokens they see, and raise at one of them."""

    names, edits = frozenset({"blocks.0.hook_resid_post"}), False

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[int] = []
        self._fails_at = fails_at

    def begin(self, start: int, n_tokens: int) -> None:
        self._tokens = range(start, start + n_tokens)

    def __call__(self, name: str, x: np.ndarray) -> None:
        self.seen += self._tokens
        if self._tokens.start == self._fails_at:
            raise ValueError("stop")


def test_steps_with_taps_repeat(tmp_path: Path) -> None:
    """Catches rows that are shown at another token's position, or twice, and an error in one request's taps
    that a repeated step drops, or that ends its neighbors.
    """
    with LLM(write_tiny(tmp_path / "tiny.gguf"), backend="reference", max_requests=4) as llm:
        engine, prompt = llm.calls.engine, list(range(20, 35))
        expected = llm.generate(prompt, greedy(12)).token_ids
        taps = [None, SeenRows(), SeenRows(fails_at=20)]
        requests = []
        for each in taps:
            requests.append(engine.maker.make_request(prompt, greedy(12)))
            if each is not None:
                requests[-1].listen(each)
            engine.add_request(requests[-1])
        n_repeats = 0
        while engine.has_work:
            n_repeats += repeats(engine)
    assert n_repeats > 6
    assert [request.output_ids for request in requests[:2]] == [expected, expected]
    assert taps[1].seen == list(range(15 + 11))
    assert (requests[2].answer.finish_reason, taps[2].seen[-1]) == ("error", 20)
    assert requests[2].output_ids == expected[: 20 - 14]
