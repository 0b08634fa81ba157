"""Shared pages: prefixes of past requests, and one prompt among several answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kukri.engine import Engine, Request
from kukri.engine.pages import page_key
from kukri.sampling import SamplingParams
from tests.engine.driving import add, finish, greedy, prompt_of, rows_of
from tests.engine.fake_model import POISON, expected_output, make_engine


def add_all(engine: Engine, prompt: list[int], params: SamplingParams, **options: object) -> list[Request]:
    requests = engine.maker.make_requests(prompt, params, **options)  # type: ignore[arg-type]
    for request in requests:
        engine.add_request(request)
    return requests


def test_a_known_prefix_is_not_computed_again() -> None:
    """A prompt read again at every turn of a conversation, or a prefix that ends at the wrong token."""
    engine, backend = make_engine(max_context=256, max_step_tokens=100)
    system = prompt_of(70)
    first = add(engine, system + prompt_of(10, 1), greedy(20))
    finish(engine)
    backend.batches.clear()
    second = add(engine, system + prompt_of(10, 2), greedy(5))
    finish(engine)
    assert (first.sequence.n_prefix_hit, second.sequence.n_prefix_hit) == (0, 64)
    assert backend.batches[0][0] == 80 - 64
    assert second.output_ids == expected_output(system + prompt_of(10, 2), 5)
    turn = [*system, *prompt_of(10, 1), *first.output_ids, *prompt_of(3, 3)]
    third = add(engine, turn, greedy(5))
    finish(engine)
    assert third.sequence.n_prefix_hit == 96  # generated tokens too: 80 + 19 of them were stored
    assert third.output_ids == expected_output(turn, 5)


@pytest.mark.parametrize("options", [{}, {"windows": [20]}, {"has_states": True, "snapshot_bytes": 1 << 10}])
def test_what_an_aborted_prompt_computed_is_not_computed_again(options: dict[str, Any]) -> None:
    """Catches a client with a short time limit that never gets an answer, as its prompt begins again."""
    engine, _ = make_engine(max_context=512, max_step_tokens=48, **options)
    prompt, n_tries = prompt_of(400), 0
    while not (request := add(engine, prompt, greedy(4))).has_ended:
        n_tries += 1
        before = request.sequence.n_prefix_hit
        for _ in range(3):  # as many steps as the client waits for
            engine.step()
            before = max(before, request.sequence.n_prefix_hit)
        if request.n_generated:
            finish(engine)
            break
        engine.abort(request)
        engine.check_integrity()
        assert n_tries < 8, "it makes no progress"
    assert request.output_ids == expected_output(prompt, 4)
    assert n_tries > 1, "the premise"


def test_a_preempted_prompt_continues_where_it_was() -> None:
    """Catches a prompt that is read again though nobody has taken its pages yet."""
    engine, backend = make_engine(max_context=256, max_step_tokens=32, max_requests=2)
    request = add(engine, prompt_of(200), greedy(3))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(request)
    finish(engine)
    assert request.output_ids == expected_output(prompt_of(200), 3)
    assert sum(n for n, _, _ in backend.batches) < 200 + 3 + 16


def test_a_prompt_that_is_known_whole_computes_its_last_token() -> None:
    """A step without a token to compute, and no logits to sample from."""
    engine, backend = make_engine(max_context=128)
    prompt = prompt_of(64)
    for n_hit in (0, 48, 48):
        request = add(engine, prompt, greedy(4))
        finish(engine)
        assert request.sequence.n_prefix_hit == n_hit
        assert request.output_ids == expected_output(prompt, 4)
    assert all(n > 0 for n, _, _ in backend.batches)


def test_the_longest_unused_prefix_is_given_up_first() -> None:
    """A prefix in use overwritten, or the newest dropped for the oldest."""
    engine, _ = make_engine(max_context=64, n_pages=8)
    prompts = [prompt_of(40, seed) for seed in range(4)]  # 3 pages each
    for i in (0, 1, 0):
        add(engine, prompts[i], greedy(2))
        finish(engine)
    add(engine, prompts[2], greedy(2))  # takes free pages first, then those of prompt 1
    finish(engine)
    add(engine, prompts[3], greedy(20))
    finish(engine)
    hits = {}
    for i in (0, 1):
        request = add(engine, prompts[i], greedy(1))
        finish(engine)
        hits[i] = request.sequence.n_prefix_hit
    assert hits[0] > hits[1]


def test_equal_prompts_at_a_time_end_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages with equal contents kept twice."""
    engine, _ = make_engine(max_context=128, max_requests=2, max_step_tokens=200)
    monkeypatch.setattr(engine.scheduler, "_awaits_prefix", lambda request: False)
    prompt = prompt_of(50)
    a, b = (add(engine, prompt, greedy(30)) for _ in range(2))
    engine.step()
    engine.check_integrity()
    assert a.sequence.pages()[:3] == b.sequence.pages()[:3]
    assert a.sequence.pages()[3] != b.sequence.pages()[3]
    finish(engine)
    assert a.output_ids == b.output_ids == expected_output(prompt, 30)


@pytest.mark.parametrize("n_prompt", [1, 2, 16, 17, 31, 32, 40])
@pytest.mark.parametrize("max_requests", [1, 2, 5])
@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_answers_to_one_prompt_are_those_of_requests_alone(
    n_prompt: int, max_requests: int, caches_prefixes: bool
) -> None:
    """Answers that write into each other's page, share a seed, or read the prompt n times."""
    engine, _ = make_engine(
        max_context=96, max_requests=max_requests, caches_prefixes=caches_prefixes, max_step_tokens=64
    )
    prompt = prompt_of(n_prompt)
    params = SamplingParams(
        temperature=1.0, seed=5, n=4, max_tokens=30, ignore_eos=True, logit_bias={POISON: -100}
    )
    answers = add_all(engine, prompt, params)
    finish(engine)
    n_computed = engine.scheduler.n_computed
    outputs = [request.output_ids for request in answers]
    assert len({tuple(o) for o in outputs}) > 1
    for i, output in enumerate(outputs):
        alone, _ = make_engine(max_context=96)
        request = add(alone, prompt, replace(params, n=1, seed=5 + i))
        finish(alone)
        assert request.output_ids == output
    if max_requests == 5:
        assert n_computed == n_prompt + 3 + 4 * 29  # the prompt once, its last token for each


def test_hooks_see_every_token_and_leave_no_prefix_behind() -> None:
    """A hook that misses the tokens of a cached prefix, or whose edits reach requests that come later."""
    engine, _ = make_engine(max_context=128, max_step_tokens=100)
    prompt = prompt_of(60)
    add(engine, prompt, greedy(3))
    finish(engine)
    hooks = {"hook_embed": lambda name, x: None}
    engine.add_hooks(hooks)
    under = add(engine, prompt, greedy(3))
    finish(engine)
    engine.remove_hooks(hooks)
    after = add(engine, prompt, greedy(3))
    finish(engine)
    again = add(engine, prompt, greedy(3))
    finish(engine)
    assert [under.sequence.n_prefix_hit, after.sequence.n_prefix_hit, again.sequence.n_prefix_hit] == [
        0,
        0,
        48,
    ]


@pytest.mark.parametrize("options", [{}, {"has_states": True, "snapshot_bytes": 1 << 12}])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_conversation_that_is_kept_outlives_others(options: dict[str, Any], is_kept: bool) -> None:
    """Catches a conversation that waits for a tool and is forgotten first, as it is the oldest."""
    engine, _ = make_engine(max_context=256, n_pages=16, **options)
    prompt = prompt_of(96)
    request = add(engine, prompt, greedy(4))
    finish(engine)
    if is_kept:
        engine.keep(request)
    for seed in range(1, 5):
        add(engine, prompt_of(96, seed), greedy(2))
        finish(engine)
    more = add(engine, [*prompt, *request.output_ids, *prompt_of(10, 9)], greedy(2))
    finish(engine)
    assert more.sequence.n_prefix_hit >= 80 if is_kept else more.sequence.n_prefix_hit == 0
    engine.check_integrity()


def test_a_request_under_way_when_a_hook_came_shares_nothing() -> None:
    """Half of a prefix computed under a hook that is gone, found by a later request."""
    engine, _ = make_engine(max_context=128)
    prompt = prompt_of(60)
    request = add(engine, prompt, greedy(30))
    engine.step()
    hooks = {"hook_embed": lambda name, x: None}
    engine.add_hooks(hooks)
    engine.step()
    engine.remove_hooks(hooks)
    finish(engine)
    assert request.output_ids == expected_output(prompt, 30)
    assert engine.pool.n_cached == 0


def test_a_request_aborted_in_flight_under_a_hook_shares_nothing() -> None:
    """Catches pages written under a hook that are cached when the aborted request's step is collected."""
    engine, _ = make_engine(max_context=128)
    hooks = {"hook_embed": lambda name, x: None}
    engine.add_hooks(hooks)
    request = add(engine, prompt_of(60), greedy(30))
    engine.step()
    step = engine.launch()
    engine.abort(request)
    engine.remove_hooks(hooks)
    assert step is not None
    engine.collect(step)
    engine.check_integrity()
    assert engine.pool.n_cached == 0


def test_logprobs_of_the_prompt() -> None:
    """Rows booked for the wrong token, a chunk's edge lost, or a prefix hit that leaves rows out."""
    engine, _ = make_engine(max_context=128, max_requests=2, max_step_tokens=30)
    prompt = prompt_of(50)
    rows = rows_of(engine, prompt)
    want = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    for _ in range(2):
        other = add(engine, prompt_of(20, 9), greedy(8))
        request = add(engine, prompt, greedy(5, prompt_logprobs=2))
        finish(engine)
        assert request.output_ids == expected_output(prompt, 5)
        assert other.output_ids == expected_output(prompt_of(20, 9), 8)
        assert [token.id for token in request.answer.prompt_logprobs] == prompt[1:]
        got = [token.logprob for token in request.answer.prompt_logprobs]
        assert got == pytest.approx([want[i, t] for i, t in enumerate(prompt[1:])], abs=1e-5)
        assert all(len(token.top_logprobs or ()) == 2 for token in request.answer.prompt_logprobs)


def test_the_best_of_several_answers_has_its_logprob() -> None:
    """Sums over the tokens of another answer, or none where no log-probabilities were asked for."""
    engine, _ = make_engine(max_context=96, max_requests=4)
    params = SamplingParams(n=1, best_of=3, seed=1, max_tokens=10, ignore_eos=True, logit_bias={POISON: -100})
    answers = add_all(engine, prompt_of(20), params)
    finish(engine)
    assert len(answers) == 3
    for request in answers:
        assert len(request.answer.sampled) == 10
        assert request.answer.cumulative_logprob == pytest.approx(
            sum(t.logprob or 0.0 for t in request.answer.sampled)
        )


def test_better_priorities_go_first_and_take_the_place_of_others() -> None:
    """An urgent request that waits for those that are not, or a preempted one that answers otherwise."""
    engine, _ = make_engine(max_context=96, max_requests=2)
    slow = [add_all(engine, prompt_of(20, seed), greedy(40), priority=5)[0] for seed in (1, 2)]
    for _ in range(5):
        engine.step()
    (urgent,) = add_all(engine, prompt_of(20, 3), greedy(5), priority=1)
    while urgent.sequence.state.value != "finished":
        engine.step()
        engine.check_integrity()
    assert all(request.n_generated < 40 for request in slow)
    assert slow[1].sequence.n_preemptions == 1
    finish(engine)
    for seed, request in zip((1, 2), slow):
        assert request.output_ids == expected_output(prompt_of(20, seed), 40)


def test_no_preemption_without_enough_pages_for_the_urgent_request() -> None:
    """Work lost for nothing: all of a lower priority make less room than an urgent request needs."""
    engine, _ = make_engine(max_context=128, max_requests=3, max_step_tokens=256, n_pages=10)
    (urgent_too,) = add_all(engine, prompt_of(90, 1), greedy(20), priority=0)
    (slow,) = add_all(engine, prompt_of(20, 2), greedy(20), priority=5)
    engine.step()
    (urgent,) = add_all(engine, prompt_of(70, 3), greedy(2), priority=1)
    for _ in range(5):
        engine.step()
        engine.check_integrity()
    assert slow.sequence.n_preemptions == 0
    finish(engine)
    assert (urgent_too.sequence.n_preemptions, slow.sequence.n_preemptions) == (0, 0)
    for seed, request in enumerate((urgent_too, slow, urgent), 1):
        n, n_prompt = request.n_generated, request.n_prompt
        assert request.output_ids == expected_output(prompt_of(n_prompt, seed), n)


def test_pages_that_others_share_make_no_room() -> None:
    """A request preempted for pages that stay, as another that runs holds them too."""
    engine, _ = make_engine(max_context=128, max_requests=4, max_step_tokens=256, n_pages=7)
    shared = prompt_of(70)
    add_all(engine, shared, greedy(4), priority=0)
    finish(engine)
    (stays,) = add_all(engine, [*shared, 1], greedy(10), priority=0)
    (leaves,) = add_all(engine, [*shared, 2], greedy(10), priority=5)
    engine.step()
    assert (stays.sequence.n_pages, leaves.sequence.n_pages, engine.pool.n_free) == (5, 5, 1)
    (urgent,) = add_all(engine, prompt_of(40, 3), greedy(2), priority=1)
    engine.step()
    assert leaves.sequence.n_preemptions == 0  # it would free one page, and three are needed
    finish(engine)
    assert urgent.output_ids == expected_output(prompt_of(40, 3), 2)


def test_the_pages_of_a_prompt_are_hashed_once_and_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand hashes a step while a long known prompt waits for room, or in the first that sees it."""
    counted: list[int] = []

    def counting(tokens: object, *given: object) -> object:
        counted.append(1)
        return page_key(tokens, *given)  # type: ignore[arg-type]

    monkeypatch.setattr("kukri.engine.sequence.page_key", counting)
    engine, _ = make_engine(max_context=128, max_requests=2, max_step_tokens=256, n_pages=8)
    (known,) = add_all(engine, prompt_of(100), greedy(2))
    finish(engine)
    (blocking,) = add_all(engine, prompt_of(100, 1), greedy(25))
    engine.step()
    counted.clear()
    waiting, alike = engine.maker.make_requests(prompt_of(100), greedy(2, n=2))
    assert len(counted) == waiting.n_prompt // 16
    engine.add_request(waiting)
    engine.add_request(alike)
    for _ in range(15):
        engine.step()
    assert waiting.sequence.n_cached == 0
    assert len(counted) <= waiting.n_prompt // 16 + 1  # the page that `blocking` has filled
    finish(engine)
    assert waiting.output_ids == known.output_ids
    assert blocking.n_generated == 25


def test_a_client_with_many_requests_does_not_starve_another() -> None:
    """A queue that is served in order of arrival alone."""
    engine, _ = make_engine(max_context=64)
    flood = [add_all(engine, prompt_of(20, i), greedy(10), client="flood")[0] for i in range(20)]
    for _ in range(3):
        engine.step()
    (other,) = add_all(engine, prompt_of(20, 99), greedy(10), client="other")
    finish(engine)
    assert sum(request.times.last_token_s < other.times.first_token_s for request in flood) <= 2


def test_prompts_beside_decodes_have_a_budget_of_their_own() -> None:
    """Tokens that come late because a long prompt fills every step."""
    engine, backend = make_engine(max_context=512, max_requests=3, max_step_tokens=256, max_prompt_tokens=24)
    talking = add(engine, prompt_of(10), greedy(60))
    engine.step()
    reading = add(engine, prompt_of(200, 1), greedy(3))
    finish(engine)
    beside = [t for t, _, _ in backend.batches if t > 2]
    assert max(beside[1:]) == 25
    assert talking.output_ids == expected_output(prompt_of(10), 60)
    assert reading.output_ids == expected_output(prompt_of(200, 1), 3)
