"""Several steps in flight: each request gets the tokens that it gets one step at a time."""

from __future__ import annotations

import pytest

from kukri.engine import RequestState
from tests.engine.driving import Pipeline, add, finish, greedy, prompt_of
from tests.engine.fake_model import POISON, expected_output, make_engine


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_give_the_tokens_of_one_at_a_time(depth: int) -> None:
    """Logits of one step taken for another's, a token computed twice, a request left waiting."""
    engine, _ = make_engine(max_requests=6, max_step_tokens=16)
    requests = [add(engine, prompt_of(20 + 5 * i, i), greedy(30)) for i in range(6)]
    pipeline = Pipeline(engine, depth)
    finish(engine, pipeline=pipeline)
    assert pipeline.most_in_flight == depth
    for i, request in enumerate(requests):
        assert request.output_ids == expected_output(prompt_of(20 + 5 * i, i), 30)
    assert engine.pool.n_free == engine.pool.n_pages


def test_steps_in_flight_are_of_different_requests() -> None:
    """A request in two steps at a time, or a step that waits although others could run."""
    engine, _ = make_engine(max_requests=3, max_step_tokens=16)
    first = add(engine, prompt_of(16), greedy(5))
    one = engine.launch()
    assert one is not None
    assert engine.launch() is None
    second = add(engine, prompt_of(10, 1), greedy(5))
    two = engine.launch()
    assert two is not None
    assert [chunk.request for chunk in two.chunks] == [second]
    assert [(o.request, o.token.id) for o in engine.collect(one) if o.token] == [
        (first, expected_output(prompt_of(16), 1)[0])
    ]
    three = engine.launch()
    assert three is not None
    assert [chunk.request for chunk in three.chunks] == [first]
    with pytest.raises(AssertionError, match="in the order"):
        engine.collect(three)
    engine.collect(two)
    engine.collect(three)
    finish(engine)
    assert first.output_ids == expected_output(prompt_of(16), 5)
    assert second.output_ids == expected_output(prompt_of(10, 1), 5)


def test_an_abort_in_flight_keeps_the_pages_until_the_step_lands() -> None:
    """Pages given to another while a step still writes them."""
    engine, _ = make_engine(max_requests=2, n_pages=8)
    request = add(engine, [*prompt_of(20), POISON], greedy(5))
    step = engine.launch()
    assert step is not None
    engine.abort(request)
    assert (request.sequence.state, request.answer.finish_reason) == (RequestState.FINISHED, "abort")
    assert engine.has_work
    assert engine.pool.n_free == 6
    engine.check_integrity()
    assert engine.collect(step) == []
    assert not engine.has_work
    assert engine.pool.n_free == 8
    engine.check_integrity()


def test_a_request_in_flight_is_not_preempted() -> None:
    """Pages taken from a request whose step is still to write them; an older one that gives up its own."""
    engine, _ = make_engine(max_context=64, max_requests=2, max_step_tokens=32, n_pages=4)
    old, young = (add(engine, prompt_of(32, i), greedy(20)) for i in range(2))
    first, second = engine.launch(), engine.launch()
    assert first is not None
    assert second is not None
    urgent = engine.maker.make_requests(prompt_of(30, 9), greedy(3), priority=-1)[0]
    engine.add_request(urgent)
    assert engine.launch() is None  # all pages are held by requests in flight
    engine.collect(first)
    assert engine.launch() is None  # neither `old`'s next page nor those of `urgent` are free
    assert engine.scheduler.n_preemptions == 0
    engine.check_integrity()
    engine.collect(second)
    finish(engine)
    assert engine.scheduler.n_preemptions > 0
    for i, request in enumerate((old, young)):
        assert request.output_ids == expected_output(prompt_of(32, i), 20)
    assert urgent.output_ids == expected_output(prompt_of(30, 9), 3)


@pytest.mark.parametrize("when", ["launch", "collect"])
def test_a_step_that_fails_leaves_the_others_in_flight(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step's error that ends the requests of all, or leaves its own half alive."""
    engine, backend = make_engine(max_requests=3, max_step_tokens=16)
    good = add(engine, prompt_of(16), greedy(8))
    steps = [engine.launch()]
    bad = add(engine, prompt_of(12, 1), greedy(8))
    if when == "launch":
        backend.error = ValueError("the backend broke")
        with pytest.raises(ValueError, match="broke"):
            engine.launch()
    else:
        steps.append(engine.launch())
    last = add(engine, prompt_of(14, 2), greedy(8))
    steps.append(engine.launch())
    for step in steps:
        assert step is not None
        if when == "collect" and step is steps[1]:
            with monkeypatch.context() as patch:
                patch.setattr(engine.sampler, "sample", lambda chunks, logits: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.collect(step)
        else:
            engine.collect(step)
        engine.check_integrity()
    finish(engine)
    assert (bad.answer.finish_reason, bad.n_generated) == ("error", 0)
    assert good.output_ids == expected_output(prompt_of(16), 8)
    assert last.output_ids == expected_output(prompt_of(14, 2), 8)
    assert engine.pool.n_free == engine.pool.n_pages
