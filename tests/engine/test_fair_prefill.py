"""Prompts share the steps: a short one next to a long one, clients, priorities, and the time of a step."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kukri.engine import Engine, Request
from kukri.engine.step_cost import StepCost
from kukri.kernels.host_step import HostLogits
from kukri.kernels.step import ForwardBatch
from tests.engine.driving import add, finish, greedy, prompt_of
from tests.engine.fake_model import FakeBackend, expected_output, make_engine


def make(**options: Any) -> Engine:
    sizes = {"max_context": 1024, "max_requests": 4, "max_step_tokens": 64}
    return make_engine(**{**sizes, **options})[0]


def arrive(engine: Engine, n: int, seed: int, n_new: int = 2, **options: Any) -> Request:
    request = engine.maker.make_requests(
        ([seed + 14] * 3 + prompt_of(40, seed) * 25)[:n], greedy(n_new), **options
    )[0]
    engine.add_request(request)
    return request


def steps_until(engine: Engine, request: Request) -> int:
    """Steps until a request's first token."""
    n = 0
    while not request.n_generated:
        engine.step()
        engine.check_integrity()
        n += 1
    return n


@pytest.mark.parametrize("client", ["a", "b"])
def test_a_short_prompt_begins_at_once_beside_long_ones(client: str) -> None:
    """A chat that waits for another's whole document, whether in the queue or in each step."""
    engine = make()
    long = [arrive(engine, 900, seed, client="a") for seed in range(3)]
    for _ in range(3):
        engine.step()
    short = arrive(engine, 30, 5, client=client)
    before = [request.sequence.n_cached for request in long]
    assert steps_until(engine, short) == 1
    assert sum(request.sequence.n_cached for request in long) - sum(before) == 64 - 30  # the rest of the step
    finish(engine)
    for request in (*long, short):
        assert request.output_ids == expected_output(request.sequence.tokens[: request.n_prompt].tolist(), 2)


def test_a_long_prompt_never_stands_still() -> None:
    """One that starves while short ones keep coming: it gets half of every step."""
    engine = make(max_requests=8)
    long = arrive(engine, 600, 0)
    for i in range(60):
        arrive(engine, 45, 1 + i)
        before = long.sequence.n_cached
        engine.step()
        if long.n_generated:
            break
        assert long.sequence.n_cached - before >= (64 - engine.config.max_requests) // 2
    assert long.n_generated


def test_the_shortest_of_those_that_wait_goes_first() -> None:
    """A queue in which a short prompt stands after the long ones that came before it."""
    engine = make(max_requests=3)
    arrive(engine, 900, 0)
    engine.step()
    others = [arrive(engine, 700, seed) for seed in range(1, 5)]
    short = arrive(engine, 20, 9)
    assert steps_until(engine, short) == 1
    assert not any(request.sequence.n_cached for request in others[1:])


def test_clients_share_evenly() -> None:
    """A client with many prompts who gets as many shares."""
    engine = make(max_requests=8)
    many = [arrive(engine, 900, seed, client="many") for seed in range(5)]
    one = arrive(engine, 900, 7, client="one")
    while not one.n_generated and not all(request.n_generated for request in many):
        engine.step()
    assert sum(request.sequence.n_cached for request in many) <= 1.2 * one.sequence.n_cached


def test_better_priorities_take_the_whole_step() -> None:
    """An urgent prompt that shares with those of less priority, or makes them stand still once it is done."""
    engine = make()
    slow = arrive(engine, 900, 0, priority=5)
    for _ in range(2):
        engine.step()
    urgent = arrive(engine, 320, 1, priority=-10)
    short = arrive(engine, 20, 2, priority=5)
    assert steps_until(engine, urgent) == 5
    assert (slow.sequence.n_cached, short.sequence.n_cached) == (128, 0)
    finish(engine)
    assert slow.n_generated == short.n_generated == 2


def test_a_prompt_waits_for_a_prefix_that_is_about_to_be_cached() -> None:
    """A prefix that many share computed by each of them, or a short one that waits for a long one."""
    engine = make(max_requests=8)
    shared = prompt_of(160)
    first = add(engine, [*shared, *prompt_of(20, 1)], greedy(40))
    rest = [add(engine, [*shared, *prompt_of(20, seed)], greedy(2)) for seed in range(2, 6)]
    finish(engine)
    assert [request.sequence.n_prefix_hit for request in rest] == [160] * 4
    other = [40, *prompt_of(63, 7)]
    long = add(engine, [*other, *prompt_of(40, 8) * 20], greedy(2))
    engine.step()
    short = add(engine, [*other, 1], greedy(2))  # `long` has 13 steps to go, and this is two of work
    assert steps_until(engine, short) <= 3
    assert not long.n_generated
    finish(engine)
    assert first.n_generated == 40


class TimedBackend(FakeBackend):
    """Moves a clock by what its steps would take: a token a millisecond, and as much for 100 keys."""

    now_s = 0.0
    slow = 1.0

    def compile(self, *given: Any, **options: Any) -> Any:
        compiled = super().compile(*given, **options)

        def run(batch: ForwardBatch, on_tap: Any = None) -> HostLogits:
            self.now_s += self.slow * 0.001 * float((1 + batch.positions / 100).sum())
            return compiled(batch, on_tap)

        run.inputs = compiled.inputs  # type: ignore[attr-defined]
        return run


def timed_engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, TimedBackend]:
    backend = TimedBackend()
    monkeypatch.setattr("tests.engine.fake_model.FakeBackend", lambda: backend)
    monkeypatch.setattr("kukri.engine.engine.even_depth", lambda *given: 100.0)
    engine = make(max_step_ms=100, max_step_tokens=256, **options)
    engine._clock = lambda: backend.now_s
    return engine, backend


def test_a_step_is_bounded_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of as many tokens deep in a prompt as at its beginning, that take ten times as long.

    Or, while nobody else could wait, short ones that read the weights again and again.
    """
    engine, backend = timed_engine(monkeypatch)
    long = arrive(engine, 1000, 0)
    took, n_tokens = [], []
    while not long.n_generated:
        if long.sequence.n_cached > 500 and len(engine.scheduler.running) == 1:
            arrive(engine, 1010, 1)  # a longer one, whose turn does not come
            n_alone = len(took)
        before, n_before = backend.now_s, long.sequence.n_cached
        engine.step()
        took.append(backend.now_s - before)
        n_tokens.append(long.sequence.n_cached - n_before)
    assert n_tokens[0] == 256  # nothing is known yet
    assert max(took[1:n_alone]) <= 0.6 * took[0]
    assert min(n_tokens[1:n_alone]) >= 32  # six times as dear there
    assert max(took[n_alone:]) < 0.2
    assert min(n_tokens[n_alone:-1]) >= 8
    for _ in range(20):
        backend.slow *= 1.2  # others use the machine
        arrive(engine, 300, 1)
        engine.step()
    finish(engine)


def test_a_short_prompt_is_not_cut_for_time_beside_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens a step for a short prompt while the long one's sixteen take a second, for seconds."""
    engine, backend = timed_engine(monkeypatch)
    backend.slow = 50.0
    long = arrive(engine, 900, 0)
    while long.sequence.n_cached < 600:
        engine.step()
    before_s = backend.now_s
    short = arrive(engine, 30, 1)
    assert steps_until(engine, short) <= 2
    alone_s = 50 * 0.001 * 30
    assert backend.now_s - before_s < 5 * alone_s
    assert not long.n_generated


def test_who_came_once_is_expected_for_a_while_and_not_for_ever() -> None:
    """Long steps amid a conversation, or short ones for as long as a batch lasts that came at once."""
    cost = StepCost(100.0, max_step_s=0.1)
    cost.observe(100.0, 0.1)
    alone = cost.limit(256, 1e4, has_decodes=False)
    assert alone == cost.of(0, 128)
    assert cost.limit(256, 500.0, has_decodes=False) == 500.0
    cost.share()
    assert cost.limit(256, 1e4, has_decodes=False) == 128.0
    assert cost.limit(64, 1e4, has_decodes=True) == pytest.approx(100.0)
    cost.observe(0.0, 9.0)
    assert cost.limit(256, 1e4, has_decodes=False) == 128.0
    cost.observe(0.0, 1.5)
    assert cost.limit(256, 1e4, has_decodes=False) == alone


def test_a_slow_first_step_is_forgotten() -> None:
    """Short steps for a whole prompt, or many prompts, after kernels were compiled in the first."""
    cost = StepCost(1e9, max_step_s=0.1)
    cost.observe(512.0, 30.0)
    cost.observe(256.0, 0.01)
    assert cost.limit(512, 1e4, has_decodes=True) > 512
    cost.observe(512.0, 30.0)
    assert cost.limit(512, 1e4, has_decodes=True) > 512


@given(st.floats(1, 1e4), st.integers(0, 10**5), st.integers(0, 2000))
def test_tokens_within_a_cost_are_those_that_cost_it(depth: float, start: int, n: int) -> None:
    """A step planned by another formula than it is measured by."""
    cost = StepCost(depth)
    units = cost.of(start, n)
    found = cost.n_within(start, units * (1 + 1e-9) + 1e-6)
    assert n - 8 < found <= n + 1
    assert cost.of(start, found) <= units * (1 + 1e-6) + 1e-3
    assert cost.n_within(start, inf) > 10**6
    assert StepCost().n_within(start, 17.5) == 17
