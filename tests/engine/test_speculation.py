"""Draft tokens: whatever they are, a request gets the tokens that it gets without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri import LLM
from kukri.engine import Engine, Request
from kukri.engine.drafts import DraftBudget
from kukri.engine.lookup_drafts import EarlierAnswers, LookupDrafts, TextIndex
from kukri.errors import RequestError
from kukri.sampling import Grammar, SamplingParams
from tests.engine.driving import (
    SIZES,
    WINDOWS,
    add,
    any_events,
    finish,
    greedy,
    pages_with_windows,
    play,
    prompt_of,
)
from tests.engine.fake_model import (
    EOS,
    N_VOCAB,
    POISON,
    STATE_BYTES,
    SeerDrafts,
    expected_output,
    make_engine,
)

DRAWN: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 40}


COSTS = (1, 1.1, 1.2, 1.3, 1.7, 1.8, 1.9, 2.0, 2.2, 2.4, 2.6, 2.8, 3.2, 3.2, 3.2, 2.4)  # of rows


def shared(
    offers: Sequence[Sequence[float]],
    n_tokens: int | None = None,
    *,
    room: int = 99,
    relative_cost: float = 0.0,
    others_wait: bool = False,
    costs: tuple[float, ...] = COSTS,
) -> list[int]:
    """How many drafts of given chances a step has; one of `n_tokens` has a prompt as well."""
    n, has_prompt = n_tokens or len(offers), n_tokens is not None
    budget = DraftBudget(costs, n, len(offers), has_prompt=has_prompt, others_wait=others_wait, room=room)
    for chances in offers:
        budget.offer(chances, relative_cost)
    return budget.share()


def make(speculation: str = "ngram", **options: Any) -> Engine:
    return make_engine(speculation=speculation, **options)[0]


def alone(prompt: Sequence[int], params: SamplingParams, max_context: int = 128) -> Request:
    """The request by itself, without drafts."""
    engine = make("off", max_context=max_context)
    request = add(engine, prompt, params)
    finish(engine)
    return request


def seen(engine: Engine, prompt: Sequence[int], params: SamplingParams, skill: float, seed: int) -> Request:
    """A queued request whose drafts are of some skill."""
    request = engine.maker.make_request(prompt, params)
    request.drafts = SeerDrafts(skill, seed)  # type: ignore[assignment]
    engine.add_request(request)
    return request


@pytest.mark.full
@settings(max_examples=150)
@given(
    **SIZES,
    events=any_events(
        st.integers(0, 50),  # tokens of a prompt that others begin with too
        st.integers(1, 30),  # tokens of its own
        st.integers(1, 40),  # to generate
        st.booleans(),  # whether it ignores the end of text
        st.integers(1, 3),  # answers
        st.integers(0, 2),  # priority
        st.sampled_from([0.0, 0.5, 0.9, 1.0]),  # skill
        st.sampled_from([0.0, 1.0, 3.0]),  # temperature
        max_size=30,
    ),
    caches_prefixes=st.booleans(),
    windows=WINDOWS,
    n_snapshots=st.one_of(st.none(), st.integers(0, 8)),  # None: the model has no recurrent state
)
def test_any_drafts_under_any_events_change_no_token(
    max_requests: int,
    max_step_tokens: int,
    n_pages: int,
    n_in_flight: int,
    events: list,
    caches_prefixes: bool,
    windows: list[tuple[int, int]],
    n_snapshots: int | None,
) -> None:
    """A rejected draft kept, pages or states of drafts lost or kept, a token that depends on the drafts
    next to it, drafts in what others read: under arrivals, aborts, shared prompts and too few pages."""
    engine = make(
        has_states=n_snapshots is not None,
        snapshot_bytes=(n_snapshots or 0) * STATE_BYTES,
        max_context=96,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        **pages_with_windows(windows, n_pages, max_step_tokens),
        max_prompt_tokens=9,
        caches_prefixes=caches_prefixes,
    )
    live: list[tuple[Request, list[int]]] = []

    def make_seen(
        i: int, n_shared: int, n_own: int, n: int, ignores: bool, n_answers: int, priority: int,
        skill: float, temperature: float,
    ) -> list[Request]:  # fmt: skip
        prompt = prompt_of(50)[:n_shared] + prompt_of(n_own, i)
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=n, ignore_eos=ignores, n=n_answers,
            logit_bias={POISON: -100},
        )  # fmt: skip
        requests = engine.maker.make_requests(prompt, params, priority=priority)
        for request in requests:
            request.drafts = SeerDrafts(skill, i)  # type: ignore[assignment]
            live.append((request, prompt))
        return requests

    play(engine, events, make_seen, n_in_flight)
    for request, prompt in live:
        want = alone(prompt, request.params, max_context=96).output_ids
        if request.answer.finish_reason == "abort":
            assert request.output_ids == want[: request.n_generated]
        else:
            assert request.output_ids == want
    assert all(pool.n_free == pool.n_pages for pool in engine.allocator.pools)
    assert engine.scheduler.n_accepted == sum(request.sequence.n_accepted for request, _ in live)


@pytest.mark.parametrize("skill", [0.3, 0.9, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.5, "repeat_last_n": 20},
        {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "dry_multiplier": 1.0, "dry_sequence_breakers": ()},
        {"temperature": 1.0, "mirostat": 1, "mirostat_tau": 2.0},
        {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0},
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "bad_words": [[3, 4], [9]], "logit_bias": {5: 2.0}},
        {"temperature": 1.0, "ignore_eos": False, "min_tokens": 17},
        {"temperature": 1.0, "stop_token_ids": [3, 4, 5]},
        {"temperature": 1.0, "logits_processors": [lambda ids, row: np.roll(row, len(ids) % 3)]},
    ],
    ids=lambda params: "-".join(params),
)
def test_tokens_are_those_of_plain_decoding_to_the_bit(params: dict[str, Any], skill: float) -> None:
    """A sampler that is asked out of turn, twice, or with a history that holds drafts."""
    made = SamplingParams(**DRAWN | {"seed": 11} | params)
    want = alone(prompt_of(20), made)
    engine = make()
    request = seen(engine, prompt_of(20), made, skill, seed=3)
    finish(engine)
    assert request.output_ids == want.output_ids
    assert request.answer.sampled == want.answer.sampled
    assert request.answer.cumulative_logprob == want.answer.cumulative_logprob
    assert (request.answer.finish_reason, request.answer.stop_reason) == (
        want.answer.finish_reason,
        want.answer.stop_reason,
    )
    assert request.sequence.n_drafted > 0


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_accepted_drafts_end_where_the_request_does(max_tokens: int) -> None:
    """A token beyond max_tokens, or one too few, where the last of many drafts are accepted."""
    engine = make(max_context=40)
    request = seen(engine, prompt_of(20), greedy(max_tokens), skill=1.0, seed=0)
    finish(engine)
    n = min(max_tokens, 20)
    assert request.output_ids == expected_output(prompt_of(20), n)
    assert request.answer.finish_reason == "length"
    if n > 2:  # the first token comes of the prompt, the second needs no draft
        assert engine.scheduler.n_accepted >= n - 3


def test_an_end_among_drafts_ends_the_request() -> None:
    """Tokens after an end of text, because drafts after it were accepted."""
    for seed in range(30):
        prompt = prompt_of(20, seed)
        want = expected_output(prompt, 60, frozenset([EOS]))
        engine = make()
        request = seen(engine, prompt, greedy(60, ignore_eos=False), skill=1.0, seed=0)
        finish(engine)
        assert request.output_ids == want
        assert request.answer.finish_reason == ("stop" if want[-1] == EOS else "length")


@pytest.mark.full
def test_several_answers_share_a_prompt_and_no_draft() -> None:
    """A draft of one answer left in a page that another continues from."""
    for n_prompt in (15, 16, 17, 31):
        params = SamplingParams(**DRAWN, seed=5, n=4, logit_bias={POISON: -100})
        engine = make(max_requests=4, max_step_tokens=64)
        answers = engine.maker.make_requests(prompt_of(n_prompt), params)
        for i, request in enumerate(answers):
            request.drafts = SeerDrafts(0.7, i)  # type: ignore[assignment]
            engine.add_request(request)
        finish(engine)
        for i, request in enumerate(answers):
            want = alone(prompt_of(n_prompt), replace(params, n=1, seed=5 + i))
            assert request.output_ids == want.output_ids


def test_a_cached_prefix_holds_no_draft() -> None:
    """A page found by tokens that it does not hold."""
    engine = make(max_context=256)
    first = seen(engine, prompt_of(30), greedy(100), skill=0.6, seed=1)
    finish(engine)
    turn = [*prompt_of(30), *first.output_ids, *prompt_of(5, 1)]
    second = seen(engine, turn, greedy(20), skill=0.6, seed=2)
    finish(engine)
    assert second.sequence.n_prefix_hit == 128
    assert second.output_ids == expected_output(turn, 20)


@pytest.mark.full
def test_drafts_preempt_nobody() -> None:
    """A request that loses its pages, or a waiting one that finds none, for tokens that may be wrong."""
    for n_pages in range(6, 14):
        counts = []
        for skill in (None, 0.0):
            engine = make("off", max_context=96, max_requests=3, n_pages=n_pages)
            requests = [engine.maker.make_request(prompt_of(20, seed), greedy(60)) for seed in range(3)]
            for request in requests:
                request.drafts = None if skill is None else SeerDrafts(skill)  # type: ignore[assignment]
                engine.add_request(request)
            finish(engine)
            counts.append(engine.scheduler.n_preemptions)
        assert counts[1] <= counts[0] + 1  # as answers drift apart by lucky drafts, turns may differ by one


def test_logprobs_of_a_prompt_beside_drafts() -> None:
    """Rows of logits taken for another request's, where some belong to drafts."""
    prompt = prompt_of(50, 2)
    want = alone(prompt, greedy(20, prompt_logprobs=1, logprobs=1))
    for skill in (0.0, 0.8):
        engine = make(max_requests=3, max_step_tokens=30, max_prompt_tokens=7)
        others = [seen(engine, prompt_of(20, seed), greedy(40), skill, seed) for seed in (3, 4)]
        for _ in range(6):
            engine.step()
        request = seen(engine, prompt, greedy(20, prompt_logprobs=1, logprobs=1), skill, 5)
        finish(engine)
        assert request.answer.prompt_logprobs == want.answer.prompt_logprobs
        assert request.answer.sampled == want.answer.sampled
        for seed, other in zip((3, 4), others, strict=True):
            assert other.output_ids == expected_output(prompt_of(20, seed), 40)


def test_hooks_see_no_draft() -> None:
    """A hook that is shown tokens which are in no text, or one twice."""
    engine, backend = make_engine(speculation="ngram")
    hooks = {"hook_embed": lambda name, x: None}
    engine.add_hooks(hooks)
    request = seen(engine, prompt_of(10), greedy(20), skill=1.0, seed=0)
    for _ in range(10):
        engine.step()
    assert [t for t, _, _ in backend.batches] == [10] + [1] * 9
    engine.remove_hooks(hooks)
    finish(engine)
    assert request.output_ids == expected_output(prompt_of(10), 20)
    assert len(backend.batches) <= 12


def test_what_a_wrong_draft_breaks_is_overwritten() -> None:
    """NaN stored by a draft, met by the tokens that come in its place."""
    engine = make()
    request = engine.maker.make_request(prompt_of(28), greedy(20))
    request.drafts = SeerDrafts(1.0)  # type: ignore[assignment]
    request.drafts.propose = lambda n: [POISON] * n  # type: ignore[union-attr, method-assign]
    engine.add_request(request)
    finish(engine)
    assert engine.scheduler.n_drafted > 0
    assert request.output_ids == expected_output(prompt_of(28), 20)


def test_a_request_that_fails_among_drafts_fails_there() -> None:
    """Tokens lost that came before unusable logits."""
    engine = make()
    request = seen(engine, prompt_of(20), greedy(20, logit_bias={POISON: 100}), skill=1.0, seed=0)
    finish(engine)
    plain = alone(prompt_of(20), greedy(20, logit_bias={POISON: 100}))
    assert request.answer.finish_reason == plain.answer.finish_reason == "error"
    assert request.output_ids == plain.output_ids


@pytest.mark.full
def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """Drafts that make themselves more likely, or less: by chi-square over pairs of tokens."""
    n, prompt = 4000, prompt_of(5)
    counts: list[Counter[tuple[int, ...]]] = []
    for skill in (None, 0.5):
        engine = make("off", max_context=16, max_requests=8)
        params = SamplingParams(temperature=2.0, max_tokens=4, ignore_eos=True, top_k=4)
        requests = []
        for i in range(n):
            request = engine.maker.make_request(prompt, replace(params, seed=i if skill is None else n + i))
            request.drafts = None if skill is None else SeerDrafts(skill, i)  # type: ignore[assignment]
            requests.append(request)
            engine.add_request(request)
        while engine.has_work:
            engine.step()
        counts.append(Counter(tuple(request.output_ids[1:3]) for request in requests))
    kinds = [kind for kind in counts[0] if counts[0][kind] + counts[1][kind] >= 10]
    a, b = (np.array([count[kind] for kind in kinds], float) for count in counts)
    chi_square = ((a - b) ** 2 / (a + b)).sum()
    degrees = len(kinds) - 1
    assert degrees > 20
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def followed(
    tokens: Sequence[int], n_prompt: int = 0, texts: Sequence[Sequence[int]] = (), first: int | None = None
) -> LookupDrafts:
    """The drafts after some tokens, of which the first are the prompt."""
    drafts = LookupDrafts(TextIndex([*texts, tokens[:n_prompt]]), first)
    drafts.follow(np.array(tokens, np.int32), len(tokens))
    return drafts


@pytest.mark.parametrize("n_prompt", [0, 1, 3, 4])
def test_a_text_is_expected_to_continue_as_before(n_prompt: int) -> None:
    """The oldest place followed, one by a single token, one after another text, or a shorter match."""
    for text, drafts in (
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),
        ([1, 2, 3, 4, 7, 9, 3, 4, 8, 1, 2, 3, 4], [7, 9, 3]),  # four tokens, not two
        ([1, 2, 3, 2], []),
        ([5, 6, 5, 6, 5, 6], [5, 6, 5]),
    ):
        assert followed(text, n_prompt).propose(3) == drafts
    assert followed([5]).propose(3) == []
    text = [8, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4]
    assert followed(text, 16).propose(3) == [7, 9, 1]  # five tokens, not the newest four


def test_places_vote_and_the_longest_match_is_followed_on() -> None:
    """The newest place followed against two others, or left for a newer one while it is right."""
    text = [0, 1, 2, 7, 8, 0, 1, 2, 7, 9, 0, 1, 2, 6, 0, 1, 2]
    assert followed(text, 15).propose(2) == [7, 9]
    assert followed([*text, 6], 15).propose(2) == [0, 1]
    # a span that is right is followed past a newer one with as many tokens
    assert followed([3, 1, 2, 4, 5, 9, 1, 2, 4, 6, 0, 3, 1, 2, 4], 11).propose(1) == [5]


def test_a_replaced_token_is_passed() -> None:
    """Drafts that end with the first token that differs, in an edit of a word."""
    drafts = followed([1, 2, 3, 4, 5, 6, 0, 1, 2, 9], 7)
    assert drafts.propose(2) == [4, 5]
    assert list(drafts.chances(1)) < list(followed([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], 7).chances(1))


def test_a_given_text_is_followed_from_its_beginning() -> None:
    """A prediction found only after some of it is written, or drafts that run over its end."""
    given = [1, 2, 3, 4]
    drafts = followed([50, 51], 2, [given], first=0)
    assert drafts.propose(3) == [1, 2, 3]
    assert drafts.propose(9) == [1, 2, 3, 4]
    drafts.follow(np.array([50, 51, 1, 9], np.int32), 4)  # 9 in the place of 2
    assert drafts.propose(9) == [3, 4]
    assert followed([50, 1, 2], 1, [given, [7, 1, 2, 6]]).propose(9) == [6]  # as frequent, and newer
    assert followed([50, 3, 4], 1, [given]).propose(9) == []  # nothing follows the end of a text


@settings(max_examples=200)
@given(text=st.lists(st.integers(0, 5), min_size=2, max_size=60), n_prompt=st.integers(0, 60))
def test_drafts_follow_a_longest_match_wherever_the_prompt_ends(text: list[int], n_prompt: int) -> None:
    """A place lost or moved at the end of the index, or tokens that come at once read otherwise."""
    n_prompt = min(n_prompt, len(text) - 1)
    whole, by_one = followed(text, n_prompt), followed(text[: n_prompt + 1], n_prompt)
    for n in range(n_prompt + 2, len(text) + 1):
        by_one.follow(np.array(text, np.int32), n)
    assert whole.propose(7) == by_one.propose(7)
    assert list(whole.chances(7)) == list(by_one.chances(7))
    if n_prompt == len(text) - 1:  # looked up at once
        ends = [
            next((k for k in range(min(i, 16)) if text[i - 1 - k] != text[-1 - k]), min(i, 16))
            for i in range(1, len(text))
        ]
        if max(ends) >= 2:
            longest = [text[i] for i, n in enumerate(ends, 1) if n == max(ends)][-4:]
            assert whole.propose(1)[0] in longest


def test_a_prompt_is_indexed_where_its_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that stands still for the index of a prompt, and an index for each answer to it."""
    made: list[int] = []
    index = TextIndex.__init__

    def counting(self: TextIndex, texts: Any) -> None:
        made.append(1)
        index(self, texts)

    monkeypatch.setattr(TextIndex, "__init__", counting)
    engine = make(max_context=512, max_step_tokens=32, max_requests=2)
    requests = engine.maker.make_requests(prompt_of(40) * 4, greedy(20, n=2))
    assert made == [1]
    for request in requests:
        engine.add_request(request)
    for _ in range(8):
        engine.step()
    engine.scheduler.preempt(requests[0])
    finish(engine)
    assert made == [1]
    assert [r.output_ids for r in requests] == [expected_output(prompt_of(40) * 4, 20)] * 2


def test_odds_are_learned_without_trying() -> None:
    """A request whose drafts keep failing and are made again and again, or that never tries again."""
    random = np.random.default_rng(0)
    text = random.integers(0, 12, 2000).astype(np.int32)  # pairs come again, and mean nothing
    text[1500:] = np.tile(np.arange(100, 150), 10)
    drafts = followed(text[:1].tolist())
    n_taken = []
    for n in range(1, 2000):
        drafts.follow(text, n)
        n_taken += shared([list(drafts.chances(8))])
    assert sum(n > 0 for n in n_taken[300:1500]) < 120
    assert min(n_taken[1570:]) >= 7


def test_drafts_are_worth_their_rows() -> None:
    """Drafts that cost more time than they save, and rows that are free and left empty."""
    assert shared([[0.6] * 8]) == [3]
    assert shared([[0.05] * 8]) == [0]
    assert shared([[0.99] * 15]) == [15]
    assert shared([[0.3] * 8] * 16) == [0] * 16  # each row beyond 16 costs as much as those before it
    # the first draft of each of eight fills the panel of 16
    assert shared([[0.4, 0.1]] * 8) == [1] * 8
    # next to a prompt a token more costs next to nothing
    assert shared([[0.9] * 5], 200) == [5]
    assert shared([[0.3] * 8] * 4, 200) == [0] * 4


def test_the_likeliest_drafts_go_first() -> None:
    """Rows that go to requests in the order of their turn, or beyond the room of a step."""
    assert shared([[0.3] * 4, [0.9] * 4, [0.95] * 4], room=4) == [0, 2, 2]
    assert shared([[0.3] * 4, [0.9] * 4, [0.95] * 4], room=4, others_wait=True) == [0, 1, 3]
    assert shared([[0.99] * 15], room=0) == [0]
    assert shared([[0.6] * 8], relative_cost=0.3) < shared([[0.6] * 8])


def test_one_requests_drafts_do_not_delay_all_others() -> None:
    """Steps that give more tokens in sum, and each of seven streams fewer for the time."""
    costs = (1, 1.1, 1.2, 1.22, 1.67, 1.72, 1.78, 1.82, *[2.1] * 4, *[3.35] * 4)
    one_of_eight: list[list[float]] = [[0.95] * 4, *[[]] * 7]
    assert shared(one_of_eight, costs=costs) == [0] * 8
    # it ends sooner, and the next one begins
    assert shared(one_of_eight, others_wait=True, costs=costs) == [4, *[0] * 7]


def test_requests_without_hope_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups that cost a crowd more time than one request, or a request that is never asked again."""
    asked: list[int] = []

    def chances(self: SeerDrafts, n: int) -> list[float]:
        asked.append(n)
        return [0.01] * n

    monkeypatch.setattr(SeerDrafts, "chances", chances)
    engine = make("off", max_requests=8)
    for i in range(8):
        seen(engine, prompt_of(10, i), greedy(41, ignore_eos=True), 1.0, i)
    finish(engine)
    assert 30 <= len(asked) <= 50  # 40 steps


def test_requests_choose() -> None:
    """A field that is ignored."""
    engine = make("off")
    assert engine.maker.make_request([1], greedy(5)).drafts is None
    assert engine.maker.make_request([1], greedy(5, speculation="ngram")).drafts is not None
    request = engine.maker.make_request([1], greedy(5, prediction=[1, 2], max_draft_tokens=3))
    assert request.drafts is not None
    assert request.max_drafts == 3
    assert make().maker.make_request([1], greedy(5, speculation="off")).drafts is None
    with pytest.raises(RequestError, match="prediction"):
        engine.maker.make_request([1], greedy(5, prediction=[N_VOCAB]))
    for wrong in ({"speculation": "magic"}, {"speculation": "off", "prediction": [1]}, {"prediction": [-1]}):
        with pytest.raises(RequestError):
            greedy(5, **wrong)


COPY = "Repeat this text word by word.\n\nThe quick brown fox jumps over the lazy dog. " * 2


@pytest.fixture(scope="module")
def pair(smollm2_path: Path) -> Any:
    """The real model, with drafts and without."""
    with (
        LLM(smollm2_path, max_context=512, max_requests=4, speculation="off") as plain,
        LLM(smollm2_path, max_context=512, max_requests=4) as drafting,
    ):
        yield plain, drafting


@pytest.mark.representative(2)
@pytest.mark.full(but=["temperature-stop"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_k": 40, "repetition_penalty": 1.1, "logprobs": 2},
        {"temperature": 0.0, "stop": ["lazy", "jumps over"]},
        {"temperature": 0.0, "stop": ["lazy"], "min_tokens": 30},
        {"temperature": 0.0, "prediction": COPY},
        {"temperature": 0.5, "seed": 1, "grammar": Grammar.json({
            "type": "object",
            "properties": {name: {"type": "string", "maxLength": 20} for name in ("dog", "dogs", "fox")},
            "required": ["dog", "dogs", "fox"], "additionalProperties": False,
        })},
    ],
    ids=lambda params: "-".join(params),
)  # fmt: skip
def test_the_real_model_says_the_same_to_the_bit(pair: Any, params: dict[str, Any]) -> None:
    """Logits that depend on how tokens are cut into steps, or a text that continues after its stop string."""
    plain, drafting = pair
    n_before = drafting.engine.scheduler.n_accepted
    prompts = [COPY, COPY + COPY, "Once upon a time"]
    answers = plain.generate(prompts, max_tokens=60, **params)
    params = {"prediction": answers[1].token_ids} | params  # so that many drafts are accepted
    for a, b in zip(answers, drafting.generate(prompts, max_tokens=60, **params), strict=True):
        output = replace(a.outputs[0], timings=b.timings)
        assert replace(a, timings=b.timings, outputs=(output,)) == b
    assert drafting.engine.scheduler.n_accepted > n_before


def test_earlier_answers_are_drafted_to_their_client_alone() -> None:
    """An answer that another key's drafts come from, whose speed tells what it was; or none kept at all."""
    engine, prompt = make(max_context=512), prompt_of(20)
    want = expected_output(prompt, 100)
    accepted = {}
    for client in ("a", "b", "a"):
        (request,) = engine.maker.make_requests(prompt, greedy(100), client=client)
        engine.add_request(request)
        finish(engine)
        assert request.output_ids == want
        accepted[client] = request.sequence.n_accepted
    assert accepted["a"] > 80 > 20 > accepted["b"]
    predicted = replace(greedy(100), prediction=tuple(want[50:]))  # the place of a prediction is after them
    (request,) = engine.maker.make_requests([*prompt, *want[:50]], predicted, client="a")
    engine.add_request(request)
    finish(engine)
    assert request.output_ids[:50] == want[50:]
    assert request.sequence.n_accepted > 40


def test_earlier_answers_are_few() -> None:
    """Memory that grows with answers or clients; the oldest kept and the newest forgotten."""
    answers = EarlierAnswers()
    for i in range(100):
        for client in ("a", f"{i}"):
            answers.add(client, np.arange(i, i + 200, dtype=np.int32))
    assert sum(map(len, answers.of("a"))) <= 4096
    assert [answer[0] for answer in answers.of("a")] == list(range(80, 100))
    answers.add("a", np.arange(90, 290, dtype=np.int32))  # said before: it is the newest now
    assert [answer[0] for answer in answers.of("a")][-2:] == [99, 90]
    assert len(answers.of("a")) == 20
    assert answers.of("20") == ()
    assert len(answers.of("99")) == 1
    answers.add("a", np.zeros(9000, np.int32))
    assert [len(answer) for answer in answers.of("a")] == [4096]
