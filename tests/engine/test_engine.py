"""The engine on a model that is a hash of its context: any slot, page or position out of place shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.config import EngineConfig
from kukri.engine import Engine, Request, RequestState
from kukri.errors import CapacityError, ConfigError, ContextLengthError, HookError, KukriError, RequestError
from kukri.sampling import SamplingParams
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
    rows_of,
)
from tests.engine.fake_model import (
    EOS,
    N_VOCAB,
    POISON,
    FakeBackend,
    FakeModel,
    expected_output,
    make_engine,
    next_token,
)


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 32, 512])
def test_a_request_gets_its_tokens(n_prompt: int, max_step_tokens: int) -> None:
    """A chunk boundary, page boundary or last token handled wrongly."""
    engine, backend = make_engine(max_step_tokens=max_step_tokens)
    prompt = prompt_of(n_prompt)
    request = add(engine, prompt, greedy(20))
    finish(engine)
    assert request.output_ids == expected_output(prompt, 20)
    assert (request.answer.finish_reason, request.sequence.state) == ("length", RequestState.FINISHED)
    assert engine.pool.n_free == engine.pool.n_pages
    n_prompt_steps = -(-n_prompt // max_step_tokens)
    assert len(backend.batches) == n_prompt_steps + 19
    assert [n for _, _, n in backend.batches] == [0] * (n_prompt_steps - 1) + [1] * 20


def test_requests_wait_their_turn() -> None:
    """Two requests in one step where only one may run, or the queue out of order."""
    engine, backend = make_engine()
    prompts = [prompt_of(20, seed) for seed in range(3)]
    requests = [add(engine, prompt, greedy(5)) for prompt in prompts]
    finish(engine)
    assert [r.output_ids for r in requests] == [expected_output(p, 5) for p in prompts]
    assert all(s == 1 for _, s, _ in backend.batches)
    times = [r.times for r in requests]
    for one, following in pairwise(times):
        assert one.started_s < one.last_token_s <= following.started_s
    # what a machine does between two calls of `add` counts, so that waits themselves cannot be compared
    assert [r.timings.queue_s for r in requests] == [one.started_s - one.arrived_s for one in times]


def test_requests_share_steps() -> None:
    """Sequences mixed up in a batch of prompts and decodes."""
    engine, backend = make_engine(max_requests=4, max_step_tokens=40)
    prompts = [prompt_of(n, n) for n in (50, 3, 30, 17, 1)]
    requests = [add(engine, prompt, greedy(9)) for prompt in prompts]
    finish(engine)
    assert [r.output_ids for r in requests] == [expected_output(p, 9) for p in prompts]
    assert max(s for _, s, _ in backend.batches) == 4


@pytest.mark.representative(6)
@settings(max_examples=150)
@given(
    **SIZES,
    events=any_events(
        st.integers(0, 50),  # tokens of a prompt that others begin with too
        st.integers(1, 30),  # tokens of its own
        st.integers(1, 30),  # to generate
        st.booleans(),  # whether it ignores the end of text
        st.integers(1, 3),  # answers
        st.integers(0, 2),  # priority
        st.sampled_from(["", "a", "b"]),  # client
        max_size=40,
    ),
    caches_prefixes=st.booleans(),
    windows=WINDOWS,
)
def test_any_order_of_events_gives_every_request_its_tokens(
    max_requests: int,
    max_step_tokens: int,
    n_pages: int,
    n_in_flight: int,
    events: list,
    caches_prefixes: bool,
    windows: list[tuple[int, int]],
) -> None:
    """Pages lost or held twice, tokens crossed between requests, a preempted request that answers otherwise,
    a prefix taken for another, a page written that others read, a request that never ends: under arrivals,
    aborts, shared prompts, priorities and too few pages for all, with one step in flight or several."""
    pages = pages_with_windows(windows, n_pages, max_step_tokens)
    engine, _ = make_engine(
        96, max_requests, max_step_tokens, **pages, max_prompt_tokens=9, caches_prefixes=caches_prefixes
    )
    live: list[tuple[Request, list[int], SamplingParams]] = []

    def make(
        i: int, n_shared: int, n_own: int, n: int, ignores: bool, n_answers: int, priority: int, client: str
    ) -> list[Request]:
        prompt = prompt_of(50)[:n_shared] + prompt_of(n_own, i)
        params = greedy(n, ignore_eos=ignores, n=n_answers)
        requests = engine.maker.make_requests(prompt, params, priority=priority, client=client)
        live.extend((request, prompt, params) for request in requests)
        return requests

    play(engine, events, make, n_in_flight)
    for request, prompt, params in live:
        stop_ids = frozenset() if params.ignore_eos else frozenset([EOS])
        assert params.max_tokens is not None
        want = expected_output(prompt, min(params.max_tokens, max(96 - len(prompt), 1)), stop_ids)
        if request.answer.finish_reason == "abort":
            assert request.output_ids == want[: request.n_generated]
        else:
            assert request.output_ids == want
            assert request.answer.finish_reason == ("stop" if want[-1] in stop_ids else "length")
    assert all(pool.n_free == pool.n_pages for pool in engine.allocator.pools)


def test_page_pressure_preempts_the_youngest() -> None:
    """A property test that never met the case it is about: pages that run out amid generation."""
    engine, _ = make_engine(96, 3, 32, n_pages=6)
    prompts = [prompt_of(20, seed) for seed in range(3)]
    requests = [add(engine, prompt, greedy(60)) for prompt in prompts]
    finish(engine)
    assert engine.scheduler.n_preemptions > 0
    assert [r.output_ids for r in requests] == [expected_output(p, 60) for p in prompts]
    assert requests[0].times.last_token_s < requests[1].times.last_token_s < requests[2].times.last_token_s


def test_the_context_ends_generation() -> None:
    """A token written beyond the last page, or a full context refused."""
    engine, _ = make_engine(max_context=64)
    for n_prompt, n_generated in ((40, 24), (63, 1), (64, 1)):
        prompt = prompt_of(n_prompt)
        request = add(engine, prompt, greedy(None))
        finish(engine)
        assert request.output_ids == expected_output(prompt, n_generated)
        assert request.answer.finish_reason == "length"
    with pytest.raises(ContextLengthError, match=r"65 tokens.*64") as caught:
        engine.maker.make_request(prompt_of(65))
    assert (caught.value.n_tokens, caught.value.max_context) == (65, 64)


@pytest.mark.parametrize("seed", range(5))
def test_stop_ids_and_eos_end_a_request(seed: int) -> None:
    """A stop id that is ignored, comes before min_tokens, or is reported as an end of text."""
    engine, _ = make_engine()
    prompt = prompt_of(10, seed)
    free = expected_output(prompt, 30)
    stop = free[4]
    first = free.index(stop)
    request = add(engine, prompt, greedy(30, stop_token_ids=[stop]))
    finish(engine)
    assert request.output_ids == free[: first + 1]
    assert (request.answer.finish_reason, request.answer.stop_reason) == ("stop", stop)

    request = add(engine, prompt, greedy(30, stop_token_ids=[stop], min_tokens=12))
    finish(engine)
    assert request.n_generated >= 12
    assert stop not in request.output_ids[:12]


def test_eos_ends_a_request_unless_ignored() -> None:
    """End of text reported as a stop id, or not ignored where asked."""
    engine, _ = make_engine()
    seed = next(s for s in range(1000) if EOS in expected_output(prompt_of(5, s), 20))
    prompt = prompt_of(5, seed)
    request = add(engine, prompt, greedy(20, ignore_eos=False))
    finish(engine)
    assert request.output_ids[-1] == EOS
    assert EOS not in request.output_ids[:-1]
    assert (request.answer.finish_reason, request.answer.stop_reason) == ("stop", None)
    request = add(engine, prompt, greedy(20))
    finish(engine)
    assert request.output_ids == expected_output(prompt, 20)


def test_nan_logits_fail_one_request_alone() -> None:
    """NaN sampled as if it were a logit, batch mates taken down, or NaN left in pages that others get."""
    engine, _ = make_engine(max_requests=3)
    good = prompt_of(20, 1)
    bad_prompt = [*prompt_of(30, 2), POISON]
    first, bad, last = (add(engine, p, greedy(8)) for p in (good, bad_prompt, good[:5]))
    finish(engine)
    assert isinstance(bad.answer.error, KukriError)
    assert "nan" in str(bad.answer.error).lower()
    assert (bad.answer.finish_reason, bad.n_generated) == ("error", 0)
    assert first.output_ids == expected_output(good, 8)
    assert last.output_ids == expected_output(good[:5], 8)


def test_failed_and_aborted_requests_leave_pages_for_others() -> None:
    """Pages that are lost, or contents that the request which gets the page next takes for its own."""
    engine, _ = make_engine()
    for end in ("abort", "error"):
        request = add(engine, prompt_of(40) if end == "abort" else [*prompt_of(20), POISON], greedy(50))
        engine.step()
        if end == "abort":
            engine.abort(request)
        assert request.answer.finish_reason == end
        after = add(engine, prompt_of(30, 7), greedy(20))
        finish(engine)
        assert after.output_ids == expected_output(prompt_of(30, 7), 20)
        assert engine.pool.n_free == engine.pool.n_pages


def test_a_failed_step_frees_everything_and_the_engine_continues() -> None:
    """Pages leaked, requests stuck, or an error without a text, after a hook or the user stopped a step."""
    for error in (HookError("the hook on x raised"), KeyboardInterrupt(), ValueError("deep inside")):
        engine, backend = make_engine(max_requests=2)
        requests = [add(engine, prompt_of(20, seed), greedy(20)) for seed in range(3)]
        for _ in range(4):
            engine.step()
        backend.error = error
        with pytest.raises(type(error)):
            engine.step()
        engine.check_integrity()
        assert [r.answer.finish_reason for r in requests] == ["error", "error", None]
        assert all(isinstance(r.answer.error, KukriError) and str(r.answer.error) for r in requests[:2])
        finish(engine)
        assert requests[2].output_ids == expected_output(prompt_of(20, 2), 20)
        assert engine.pool.n_free == engine.pool.n_pages


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "at least one token"),
        (np.zeros(0, np.int32), "at least one token"),
        ([1, N_VOCAB], f"token id {N_VOCAB} must be from 0 to {N_VOCAB - 1}"),
        ([-1], "token id -1"),
        ([2**40], "must be from 0 to 49"),
        ([2**70], "integers"),
        ([1.0, 2.0], "integers"),
        ([True, False], "integers"),
        (["a"], "integers"),
        ([[1, 2], [3]], "integers"),
        ([[1, 2]], "integers"),
        (5, "integers"),
        (None, "integers"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: object, says: str) -> None:
    """An IndexError, or a lookup outside of the embedding."""
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=says) as caught:
        engine.maker.make_request(prompt)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_a_request_that_can_never_fit_is_refused() -> None:
    """A request that waits forever for more pages than there are."""
    engine, _ = make_engine(max_context=128, n_pages=4)
    with pytest.raises(CapacityError, match="KV pages"):
        add(engine, prompt_of(30), greedy(60))
    assert not engine.has_work
    request = add(engine, prompt_of(30), greedy(35))  # 64 in the cache: the last token is not read
    finish(engine)
    assert request.n_generated == 35


def test_logits_of_every_token() -> None:
    """Rows of one chunk returned for another, or pages kept."""
    engine, _ = make_engine(max_context=256, max_step_tokens=100)
    ids = prompt_of(150)
    logits = rows_of(engine, ids)
    assert logits.shape == (150, N_VOCAB)
    assert logits.argmax(axis=1).tolist() == [next_token(ids[: i + 1]) for i in range(150)]
    assert engine.pool.n_free == engine.pool.n_pages
    with pytest.raises(ContextLengthError):
        engine.maker.make_output_request(prompt_of(257), "logits")
    with pytest.raises(RequestError, match="at least one token"):
        engine.maker.make_output_request([], "logits")


def test_logits_beside_a_running_request() -> None:
    """Pages of a running request overwritten, or taken for good."""
    engine, _ = make_engine(max_context=64, max_requests=2)
    prompt = prompt_of(20)
    request = add(engine, prompt, greedy(20))
    engine.step()
    assert rows_of(engine, prompt).argmax(axis=1).tolist()[-1] == request.output_ids[0]
    finish(engine)
    assert request.output_ids == expected_output(prompt, 20)


def test_a_set_of_taps_is_compiled_once() -> None:
    """A plan recorded again at each step or when the same taps get other hooks, or hooks that stay after they
    are removed."""
    engine, backend = make_engine()
    add(engine, prompt_of(5), greedy(60))
    hooks = {"hook_embed": lambda name, x: None}
    engine.step()
    assert backend.n_compiled == 1
    engine.runner.hooks.add(hooks)
    for _ in range(3):
        engine.step()
    assert backend.n_compiled == 2
    engine.runner.hooks.remove(hooks)
    engine.step()
    engine.runner.hooks.add({"hook_embed": lambda name, x: x})
    engine.step()
    assert backend.n_compiled == 2
    engine.runner.hooks.add({"ln_final.hook_normalized": lambda name, x: x})
    engine.step()
    assert backend.n_compiled == 3
    assert engine.runner.hooks.names == {"hook_embed", "ln_final.hook_normalized"}


def test_programs_with_taps_are_kept_by_their_last_use() -> None:
    """A plan for every set of taps that ever was, or the one in use thrown away."""
    engine, backend = make_engine()
    add(engine, prompt_of(5), greedy(60))

    def step_with(name: str) -> int:
        hooks = {name: lambda name, x: None}
        engine.runner.hooks.add(hooks)
        engine.step()
        engine.runner.hooks.remove(hooks)
        return backend.n_compiled

    assert [step_with(name) for name in "abcd"] == [2, 3, 4, 5]
    assert [step_with(name) for name in "ae"] == [5, 6]  # b is the longest unused
    assert [step_with(name) for name in "acdeb"] == [6, 6, 6, 6, 7]


def test_same_hook_twice() -> None:
    """Removing one listener removes its twin as well."""
    engine, _ = make_engine()
    hooks = {"hook_embed": lambda name, x: None}
    engine.runner.hooks.add(hooks)
    engine.runner.hooks.add(hooks)
    engine.runner.hooks.remove(hooks)
    assert engine.runner.hooks.names == {"hook_embed"}
    engine.runner.hooks.remove(hooks)
    assert not engine.runner.hooks


def test_timings_add_up() -> None:
    """Rates over the wrong span, as a decode rate that counts the prompt."""
    engine, _ = make_engine()
    request = add(engine, prompt_of(40), greedy(11))
    finish(engine)
    timings = request.timings
    assert (timings.n_prompt_tokens, timings.n_generated) == (40, 11)
    assert timings.first_token_s == pytest.approx(timings.queue_s + timings.prompt_s)
    assert timings.decode_tokens_per_s == pytest.approx(10 / timings.decode_s)
    assert timings.prompt_tokens_per_s == pytest.approx(40 / timings.prompt_s)
    single = add(engine, prompt_of(3), greedy(1))
    finish(engine)
    assert single.timings.decode_tokens_per_s == 0.0


def test_a_context_beyond_the_models_is_refused() -> None:
    """RoPE positions that the model never saw."""
    with pytest.raises(ConfigError, match=r"128 tokens, not 129"):
        Engine(FakeModel(128), FakeBackend(), EngineConfig(max_context=129))
    assert Engine(FakeModel(128), FakeBackend(), EngineConfig(max_context=100)).max_context == 100


def test_a_cache_beyond_memory_is_refused() -> None:
    """A MemoryError with a traceback for a context that a file merely claims."""
    model = FakeModel(64)
    object.__setattr__(model.config, "max_context", 1 << 40)
    with pytest.raises(ConfigError, match=r"GiB.*max_context"):
        Engine(model, FakeBackend(), EngineConfig())
