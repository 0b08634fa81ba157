"""Costs of rows and of drafts are learned from the steps that ran, and decide how many drafts there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kukri.engine.drafts import DraftBudget
from kukri.engine.row_costs import MakingCost, RowCosts
from tests.engine.driving import add, finish, greedy, prompt_of
from tests.engine.fake_model import FakeProgram, SeerDrafts, expected_output, make_engine
from tests.engine.test_draft_model import make as make_with_draft_model

TABLE = (1, 1.1, 1.2, 1.22, 1.67, 1.72, 1.78, 1.82, 2.1, 2.3, 2.6, 2.65, 3.25, 3.3, 3.3, 3.35)
STEEP = tuple(1 + 4 * (cost - 1) for cost in TABLE)
EVEN = tuple(1 + 0.3 * i for i in range(16))
FLAT = tuple(1 + 0.02 * i for i in range(16))


@pytest.fixture
def learning(learn_costs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured, by the clock that the test has."""
    monkeypatch.setattr(RowCosts, "observe", learn_costs)


def gain(
    real: Sequence[float], chance: float, costs: RowCosts, *, n_requests: int = 1, n: int = 2000
) -> float:
    """Tokens for the time, by plain decoding's, on a machine whose rows have `real` costs.

    Steps take up to 1.4 times as long as they should, one in a hundred five times, and all of them longer
    now and then.
    """
    draws, load, n_tokens, spent = random.Random(0), 1.0, 0.0, 0.0
    for i in range(n):
        load = draws.choice([1.0, 1.0, 2.0]) if i % 500 == 0 else load
        budget = DraftBudget(costs.of(n_requests), n_requests, n_requests, has_prompt=False, room=15)
        for _ in range(n_requests):
            budget.offer([chance] * 15)
        n_drafts = [0] if costs.needs_plain(n_requests) else budget.share()
        n_rows = n_requests + sum(n_drafts)
        cost = real[min(n_rows, 16) - 1] * max(n_rows / 16, 1.0)
        hiccup = draws.uniform(1.0, 1.4) * (5.0 if draws.random() < 0.01 else 1.0)
        costs.observe(n_requests, sum(n_drafts), 0.002 * load * cost * hiccup)
        n_tokens += n_requests + sum(chance**i for n in n_drafts for i in range(1, n + 1))
        spent += cost
    return n_tokens / spent / (n_requests / real[n_requests - 1])


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize("n_requests", [1, 2, 8])
@pytest.mark.parametrize("real", [TABLE, STEEP, EVEN, FLAT])
def test_drafts_do_not_lose_on_any_machine(real: Sequence[float], n_requests: int) -> None:
    """Drafts by a table of another machine, which ran prose at 0.85 of plain."""
    costs = RowCosts(TABLE)
    for chance in (0.4, 0.1, 0.6, 0.9, 0.4):
        assert gain(real, chance, costs, n_requests=n_requests) > 0.96


@pytest.mark.full
@pytest.mark.usefixtures("learning")
def test_what_rows_are_worth_is_found() -> None:
    """One that stops drafting for good, by a table or by a moment in which steps were slow."""
    assert gain(TABLE, 0.7, RowCosts(TABLE)) > 1.7
    assert gain(EVEN, 0.9, RowCosts(STEEP)) > 1.7
    assert gain(FLAT, 0.9, RowCosts(TABLE)) > 4.5
    costs = RowCosts(TABLE)
    costs.observe(1, 0, 0.002)
    for _ in range(20):
        costs.observe(1, 3, 0.02)
    assert gain(TABLE, 0.7, costs) > 1.6


@pytest.mark.usefixtures("learning")
def test_the_first_steps_are_forgotten() -> None:
    """Kernels that were compiled in a step, taken for what plain steps take."""
    costs = RowCosts(TABLE)
    costs.observe(1, 0, 10.0)
    assert gain(EVEN, 0.3, costs) > 0.97


def clocked(
    engine: Any, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any, int], float]
) -> list[float]:
    """Runs an engine by a clock that only its steps move: by a program and its tokens. Gives the clock."""
    now = [0.0]
    run = FakeProgram.__call__

    def timed(program: FakeProgram, batch: Any, on_tap: Any = None) -> Any:
        now[0] += seconds(program, len(batch.token_ids))
        return run(program, batch, on_tap)

    monkeypatch.setattr(FakeProgram, "__call__", timed)
    engine._clock = lambda: now[0]
    return now


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize(("row", "most", "least"), [(1.0, 1.05, 0.95), (0.02, 0.85, 0.0)])
def test_an_engine_times_its_steps(
    row: float, most: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that reach no costs: drafts of which few are right, where rows are dear and where not."""
    spent = []
    for kind in ("off", "ngram"):
        engine, _ = make_engine(speculation=kind, max_context=512)
        now = clocked(engine, monkeypatch, lambda _, n_tokens: 1 + row * (n_tokens - 1))
        request = engine.maker.make_request(prompt_of(10), greedy(400))
        if kind == "ngram":
            request.drafts = SeerDrafts(0.3)
            monkeypatch.setattr(SeerDrafts, "chances", lambda _, n: [0.3] * n)
        engine.add_request(request)
        finish(engine)
        assert request.output_ids == expected_output(prompt_of(10), 400)
        spent.append(now[0])
    assert least < spent[1] / spent[0] < most


@pytest.mark.usefixtures("learning")
def test_what_a_model_takes_for_its_drafts_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model whose steps take as long as the larger's, asked for drafts because it is small."""
    engine = make_with_draft_model(0, max_context=512)
    now = clocked(engine, monkeypatch, lambda *_: 1.0)
    request = add(engine, prompt_of(10), greedy(400))
    finish(engine)
    assert request.output_ids == expected_output(prompt_of(10), 400)
    assert engine.drafting.drafter is not None
    assert 0.7 < engine.drafting.drafter.cost.of_one < 1.2
    assert now[0] < 1.1 * 400


def test_a_moment_does_not_decide_what_drafts_cost() -> None:
    """One measurement believed, of a model that was asleep."""
    cost = MakingCost(0.1)
    cost.observe(0.3, 30.0)
    assert 0.1 < cost.of_one < 0.12
    cost.observe(0.0, 1.0)  # drafts of texts
    for _ in range(50):
        cost.observe(3 * cost.of_one, 0.6)
    assert cost.of_one == pytest.approx(0.2, rel=0.02)
