"""Hooks and captures of single requests, next to others in one batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri import LLM
from kukri.engine import RequestState
from kukri.errors import HookError, RequestError
from kukri.interp.interventions.request_taps import RequestTaps
from kukri.sampling import SamplingParams
from tests.tiny_gguf import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
STREAM = "blocks.1.hook_resid_pre"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("taps") / "tiny.gguf")


@pytest.fixture(params=["reference", "cpu"])
def llm(request, path):
    with LLM(path, backend=request.param, n_threads=2, max_step_tokens=24, max_requests=8) as opened:
        yield opened


def prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def steer(value, hook):
    value[...] += np.linspace(-1, 1, value.shape[-1], dtype=np.float32)


def taps_of(llm, names=(), hooks=()):
    session = llm.interp
    return RequestTaps(session.values, session.select(list(names)), session.listen(hooks))


def test_others_in_the_batch_are_as_alone(llm):
    """A hook that sees another's rows, others whose bits differ, drafts or prefixes that are lost."""
    prompts = [prompt(30 + i, i) for i in range(6)]
    alone = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    llm.engine.pool.forget()
    # the answers are known, so drafts are accepted
    params = [replace(GREEDY, prediction=tuple(ids)) for ids in alone]
    requests = [llm.engine.maker.make_request(ids, own) for ids, own in zip(prompts, params)]
    captured, steered = (
        taps_of(llm, [STREAM, "blocks.0.attn.hook_pattern"]),
        taps_of(llm, (), [(STREAM, steer)]),
    )
    requests[0].listen(captured)
    requests[1].listen(steered)
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    found = [request.output_ids for request in requests]
    assert found[1] != alone[1]
    assert found[:1] + found[2:] == alone[:1] + alone[2:]
    assert all(request.sequence.n_accepted > 0 for request in requests[2:])
    assert requests[0].sequence.n_drafted == requests[1].sequence.n_drafted == 0
    cache = captured.cache(requests[0])
    text = [*prompts[0], *found[0][:-1]]
    _, whole = llm.run_with_cache(text)
    np.testing.assert_array_equal(cache[STREAM], whole[STREAM])
    np.testing.assert_array_equal(cache.tokens[0], text)
    np.testing.assert_allclose(cache["pattern", 0], whole["pattern", 0], atol=1e-6)
    # what a request edited is no prefix of others, and what one captured is
    again = [llm.engine.maker.make_request(ids, GREEDY) for ids in prompts[:2]]
    for request in again:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.output_ids for request in again] == alone[:2]
    assert again[0].sequence.n_prefix_hit > 0
    assert again[1].sequence.n_prefix_hit == 0


def test_an_error_ends_its_request_alone(llm):
    """A hook that takes the whole step with it."""

    def fail(value, hook):
        if hook.start >= 32:
            raise ValueError("no more")

    prompts = [prompt(30, 1), prompt(28, 2)]
    alone = llm.generate(prompts[1], GREEDY).token_ids
    requests = [llm.engine.maker.make_request(ids, GREEDY) for ids in prompts]
    requests[0].listen(taps_of(llm, (), [(STREAM, fail)]))
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert requests[0].sequence.state is RequestState.FINISHED
    assert isinstance(requests[0].answer.error, HookError)
    assert "raised ValueError: no more" in str(requests[0].answer.error)
    assert requests[1].output_ids == alone


def test_generate_with_hooks(llm):
    """An answer without its activations, a hook of one prompt that hears another's."""
    starts = []
    ids = prompt(40, 5)
    plain = llm.generate(ids, GREEDY)
    result, cache = llm.generate_with_hooks(
        ids,
        GREEDY,
        names=["resid_post1", "q0"],
        fwd_hooks=[("hook_embed", lambda x, hook: starts.append(hook.start))],
    )
    assert result.token_ids == plain.token_ids
    assert cache["q", 0].shape == (1, 51, 4, 16)
    assert starts == [0, 24, *range(40, 51)]
    (one, _), (other, _) = llm.generate_with_hooks([ids, ids], GREEDY, fwd_hooks=[(STREAM, steer)])
    assert one.token_ids == other.token_ids != plain.token_ids
    assert llm.generate(ids, GREEDY).token_ids == plain.token_ids
    with pytest.raises(HookError, match="not supported in requests"):
        llm.generate_with_hooks(ids, GREEDY, fwd_hooks=[("blocks.0.attn.hook_pattern", steer)])
    with pytest.raises(RequestError, match="single answer"):
        llm.generate_with_hooks(ids, GREEDY, n=2)
    with pytest.raises(HookError, match="raised ZeroDivisionError"):
        llm.generate_with_hooks(ids, GREEDY, fwd_hooks=[(STREAM, lambda x, hook: 1 / 0)])


def test_a_chunk_may_be_computed_again_at_another_length(llm):
    """Shapes of the first run of a request that was preempted after its first chunk."""
    taps = taps_of(llm, [STREAM], [(STREAM, steer)])
    for n in (16, 8):
        taps.begin(0, n)
        x = np.zeros((n, 64), np.float32)
        taps(STREAM, x)
        np.testing.assert_array_equal(x, np.tile(np.linspace(-1, 1, 64, dtype=np.float32), (n, 1)))
