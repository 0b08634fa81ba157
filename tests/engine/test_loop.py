"""The engine's thread: what is submitted from others comes back, ended requests and failures included."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from kukri.engine import Engine, EngineLoop, Request, StepOutput
from kukri.errors import CapacityError, HookError, KukriError
from kukri.sampling import SamplingParams
from tests.engine.driving import greedy, prompt_of
from tests.engine.fake_model import POISON, FakeBackend, expected_output, hidden_state, make_engine


class Inbox:
    """Outputs that the loop delivered, by request."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[StepOutput]] = {}
        self.changed = threading.Condition()

    def __call__(self, outputs: list[StepOutput]) -> None:
        with self.changed:
            for output in outputs:
                self.outputs.setdefault(output.request.id, []).append(output)
            self.changed.notify_all()

    def tokens(self, request: Request) -> list[int]:
        return [o.token.id for o in self.outputs.get(request.id, []) if o.token is not None]

    def reason(self, request: Request) -> str | None:
        outputs = self.outputs.get(request.id)
        return outputs[-1].finish_reason if outputs else None

    def wait(self, *requests: Request) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.reason(r) for r in requests), 20)


@contextmanager
def running_loop(
    max_waiting: int = 100, **options: int
) -> Iterator[tuple[EngineLoop, Engine, FakeBackend, Inbox]]:
    engine, backend = make_engine(**{"max_context": 128, "max_requests": 3, **options})
    inbox = Inbox()
    loop = EngineLoop(engine, inbox, max_waiting=max_waiting)
    loop.start()
    try:
        yield loop, engine, backend, inbox
    finally:
        loop.stop()
        engine.check_integrity()
        assert engine.pool.n_free == engine.pool.n_pages


def submit(loop: EngineLoop, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = loop.engine.maker.make_requests(prompt, params)
    loop.submit([request])
    return request


def test_requests_of_many_threads_get_their_tokens() -> None:
    """A token delivered to another request, twice or not at all."""
    with running_loop() as (loop, _, _, inbox):
        wrong: list[int] = []

        def client(seed: int) -> None:
            for i in range(5):
                prompt = prompt_of(10 + seed, seed + 100 * i)
                request = submit(loop, prompt, greedy(20))
                inbox.wait(request)
                if inbox.tokens(request) != expected_output(prompt, 20):
                    wrong.append(seed)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        status = loop.status()
        assert (status.n_running, status.n_waiting, status.n_generated) == (0, 0, 8 * 5 * 20)
        assert loop.is_stepping


def test_a_finished_or_aborted_request_hears_no_more() -> None:
    """Tokens after a stop string was met, or pages kept by a client that is gone."""
    with running_loop(max_context=4096) as (loop, engine, _, inbox):
        request = submit(loop, prompt_of(10), greedy(None))
        with inbox.changed:
            inbox.changed.wait_for(lambda: len(inbox.tokens(request)) > 3, 20)
        loop.abort(request)
        other = submit(loop, prompt_of(5), greedy(3))
        inbox.wait(other)
        n = len(inbox.tokens(request))
        again = submit(loop, prompt_of(6), greedy(3))
        inbox.wait(again)
        assert len(inbox.tokens(request)) == n < 4000
        assert inbox.reason(request) is None
        assert request.answer.finish_reason == "abort"
        time.sleep(0.05)
        assert engine.pool.n_free == engine.pool.n_pages


def test_a_request_ended_before_it_was_queued_never_runs() -> None:
    """An abort that overtakes the request and leaves it running for nobody."""
    with running_loop() as (loop, _, _, inbox):
        (request,) = loop.engine.maker.make_requests(prompt_of(5), greedy(5))
        loop.abort(request)
        loop.submit([request])
        inbox.wait(submit(loop, prompt_of(5), greedy(5)))
        assert inbox.tokens(request) == []


def test_failures_end_their_requests_and_not_the_thread() -> None:
    """An engine that dies of one request, or a client that waits forever."""
    with running_loop() as (loop, _, backend, inbox):
        bad = submit(loop, [*prompt_of(5), POISON], greedy(5))
        inbox.wait(bad)
        assert inbox.reason(bad) == "error"
        assert "nan" in str(bad.answer.error).lower()
        for error in (HookError("a hook raised"), ValueError("deep inside")):
            backend.error = error
            failed = submit(loop, prompt_of(5), greedy(5))
            inbox.wait(failed)
            assert inbox.reason(failed) == "error"
        good = submit(loop, prompt_of(5), greedy(5))
        inbox.wait(good)
        assert inbox.tokens(good) == expected_output(prompt_of(5), 5)


def test_a_full_queue_refuses() -> None:
    """A queue without an end, or half of a group of answers accepted."""
    with running_loop(max_waiting=4, max_requests=1, max_context=4096) as (loop, engine, _, inbox):
        first = submit(loop, prompt_of(5), greedy(None))
        with inbox.changed:
            inbox.changed.wait_for(lambda: inbox.tokens(first), 20)
        with pytest.raises(CapacityError, match="waiting"):
            loop.submit(engine.maker.make_requests(prompt_of(5), SamplingParams(n=5)))
        waiting = engine.maker.make_requests(prompt_of(5), greedy(3, n=4))
        loop.submit(waiting)
        with pytest.raises(CapacityError, match="4 requests are already waiting"):
            submit(loop, prompt_of(5), greedy(3))
        loop.abort(first)
        inbox.wait(*waiting)
        assert all(inbox.tokens(r) == expected_output(prompt_of(5), 3) for r in waiting)
    with running_loop(n_pages=3) as (loop, _, _, _), pytest.raises(CapacityError, match="KV pages"):
        submit(loop, prompt_of(60), greedy(3))


def test_draining_ends_what_runs_and_refuses_the_rest() -> None:
    """Answers cut off when the server stops, or new ones that keep it from stopping."""
    with running_loop() as (loop, _, _, inbox):
        requests = [submit(loop, prompt_of(5, seed), greedy(50)) for seed in range(6)]
        assert loop.drain(20)
        with pytest.raises(CapacityError, match="shutting down"):
            submit(loop, prompt_of(5), greedy(3))
        for seed, request in enumerate(requests):
            assert inbox.tokens(request) == expected_output(prompt_of(5, seed), 50)


def test_stopping_tells_those_that_are_left() -> None:
    """A client that waits for an engine that is gone."""
    with running_loop(max_context=4096) as (loop, _, _, inbox):
        request = submit(loop, prompt_of(5), greedy(None))
        assert not loop.drain(0.01) or request.n_generated
        loop.stop()
        assert inbox.reason(request) in ("abort", "length")
        assert not loop.is_stepping


def test_a_dead_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that looks healthy and answers nobody."""
    engine, _ = make_engine(max_context=128)
    inbox = Inbox()
    loop = EngineLoop(engine, inbox)
    monkeypatch.setattr(loop, "_step", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    loop.start()
    request = submit(loop, prompt_of(5), greedy(5))
    inbox.wait(request)
    assert inbox.reason(request) == "error"
    loop._thread.join(5)
    assert not loop.is_stepping
    with pytest.raises(CapacityError):
        submit(loop, prompt_of(5), greedy(5))


@pytest.mark.parametrize("fault", [SystemExit("enough"), None], ids=["of a command", "of a step"])
def test_calls_are_answered_though_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException | None
) -> None:
    """Catches an adapter that is loaded forever: a future that is pending when the engine's thread ends."""
    engine, _ = make_engine(max_context=128)
    loop = EngineLoop(engine, Inbox())
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def command() -> None:
        if fault is not None:
            raise fault
        monkeypatch.setattr(loop, "_next_commands", lambda: 1 / 0)

    first, second = loop.call(command), loop.call(lambda: None)
    left = loop.call(lambda: None)
    assert left.cancel()  # by a client that has gone
    loop.start()
    if fault is None:
        first.result(20)
        second.result(20)
    else:
        with pytest.raises(SystemExit):
            first.result(20)
        with pytest.raises(KukriError, match="the engine stopped: see the log"):
            second.result(20)
    loop._thread.join(20)
    with pytest.raises(CapacityError):
        loop.call(lambda: None)


def test_calls_are_answered_when_the_engine_is_stopped() -> None:
    """Catches a future that is pending forever, as its command came while the thread was being stopped."""
    with running_loop() as (loop, _, _, _):
        may_go = threading.Event()
        first = loop.call(lambda: may_go.wait(20) and None)
        stopping = threading.Thread(target=loop.stop)
        cancelled = loop.call(lambda: None)
        cancelled.cancel()
        second = loop.call(lambda: None)
        stopping.start()
        may_go.set()
        first.result(20)
        with suppress(CapacityError):
            second.result(20)
        stopping.join(20)


def test_pages_that_do_not_add_up_end_nobodys_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an inspection of the idle engine by which its thread ends, and all answers with it."""
    monkeypatch.setattr("kukri.engine.loop._IDLE_S", 0.01)
    with running_loop() as (loop, engine, _, inbox):
        with monkeypatch.context() as patched:
            patched.setattr(engine, "check_integrity", lambda: 1 / 0)
            deadline = time.monotonic() + 20
            while "do not add up" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
        assert loop.n_faults
        assert "do not add up" in caplog.text
        request = submit(loop, prompt_of(5), greedy(5))
        inbox.wait(request)
        assert inbox.reason(request) == "length"


def test_a_request_that_cannot_be_queued_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose queueing raises, and with it the engine's thread."""
    engine, _ = make_engine(max_context=128)
    inbox = Inbox()
    loop = EngineLoop(engine, inbox)
    add = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda one: 1 / 0 if one.n_prompt == 5 else add(one))
    loop.start()
    bad, good = (submit(loop, prompt_of(n), greedy(5)) for n in (5, 6))
    inbox.wait(bad)
    inbox.wait(good)
    assert (inbox.reason(bad), inbox.reason(good)) == ("error", "length")
    assert "ZeroDivisionError" in str(bad.answer.error)
    loop.stop()


def outputs(loop: EngineLoop, n: int, n_tokens: int = 20, client: str = "") -> list[Request]:
    """Requests for hidden states, submitted."""
    make = loop.engine.maker.make_output_request
    requests = [make(prompt_of(n_tokens, i), "pooled", client=client) for i in range(n)]
    loop.submit(requests)
    return requests


def test_requests_for_rows_take_turns_with_those_that_generate() -> None:
    """Streams that stand still until all texts are embedded, texts that wait for all streams, rows lost."""
    with running_loop(max_context=4096, max_requests=3, max_prompt_tokens=16) as (loop, _, backend, inbox):
        alone = outputs(loop, 3)
        inbox.wait(*alone)
        request = submit(loop, prompt_of(10), greedy(200))
        with inbox.changed:
            assert inbox.changed.wait_for(lambda: inbox.tokens(request), 20)
        beside = outputs(loop, 20)
        inbox.wait(request, *beside)
        assert inbox.tokens(request) == expected_output(prompt_of(10), 200)
        for i, done in enumerate(beside):
            assert inbox.reason(done) == "stop"
            assert done.answer.rows is not None
            if i < 3:
                np.testing.assert_array_equal(done.answer.rows, alone[i].answer.rows)
            np.testing.assert_allclose(done.answer.rows, mean_state(prompt_of(20, i)), rtol=1e-5)
        assert max(backend.batches[-50:])[0] <= 17  # tokens of a step next to one that generates
        assert loop.status().n_generated == 200
        assert loop.drain(20)


def test_clients_that_want_rows_take_turns() -> None:
    """One client's many texts that are all embedded before another's first."""
    with running_loop(max_requests=1, max_context=4096) as (loop, _, _, inbox):
        first = submit(loop, prompt_of(5), greedy(None))
        with inbox.changed:
            assert inbox.changed.wait_for(lambda: inbox.tokens(first), 20)
        many = outputs(loop, 10, client="a")
        (other,) = outputs(loop, 1, client="b")
        loop.abort(first)
        inbox.wait(*many, other)
        ends = [request.times.last_token_s or request.times.started_s for request in many]
        assert sum(end < other.times.started_s for end in ends) <= 2


def test_requests_for_rows_may_fail_be_left_or_be_too_many() -> None:
    """An engine that one error ends, work for nobody, and requests without number."""
    with running_loop(max_waiting=4, max_requests=1) as (loop, _, backend, inbox):
        backend.error = ValueError("no luck")
        (failing,) = outputs(loop, 1)
        inbox.wait(failing)
        assert (inbox.reason(failing), str(failing.answer.error)) == ("error", "no luck")
        with pytest.raises(CapacityError, match="requests are already waiting: try again later"):
            outputs(loop, 6)
        left, last = outputs(loop, 2)
        loop.abort(left)
        inbox.wait(last)
        inbox.wait(submit(loop, prompt_of(5), greedy(3)))
        loop.stop()
        with pytest.raises(CapacityError, match="shutting down"):
            outputs(loop, 1)


def mean_state(ids: list[int]) -> np.ndarray:
    return np.mean([hidden_state(ids[: i + 1]) for i in range(len(ids))], axis=0)


def test_a_request_does_not_wait_for_the_engine_to_look_itself_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at every page, tens of milliseconds of a large pool, under the lock that `submit` takes."""
    monkeypatch.setattr("kukri.engine.loop._IDLE_S", 0.01)
    with running_loop() as (loop, engine, _, inbox):
        looking, may_end = threading.Event(), threading.Event()

        def look() -> None:
            looking.set()
            assert may_end.wait(20)

        with monkeypatch.context() as patched:
            patched.setattr(engine, "check_integrity", look)
            assert looking.wait(20)
            submitting = threading.Thread(target=lambda: requests.append(submit(loop, [1, 2], greedy(2))))
            requests: list[Request] = []
            submitting.start()
            submitting.join(5)
            was_let_in = bool(requests)
            may_end.set()
            submitting.join()
        assert was_let_in
        inbox.wait(*requests)
