"""The engine on the real model: who else is there changes no bit of a request's answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.engine import Engine, Request
from kukri.sampling import SamplingParams

N_NEW = 24


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    """Ids of 32 prompts; half of them begin with the same 100 tokens."""
    random = np.random.default_rng(4)
    shared = random.integers(20, 40000, 100).tolist()
    own = [random.integers(20, 40000, int(n)).tolist() for n in random.integers(1, 60, 32)]
    return [shared + ids if i % 2 else ids for i, ids in enumerate(own)]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt's answer alone, read in one piece by an engine that keeps nothing."""
    with LLM(smollm2_path, max_context=256) as llm:
        llm.engine.allocator.caches_prefixes = False
        return [llm.generate(ids, greedy()).token_ids for ids in prompts]


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    """One with places for 32 and pages for a few of them."""
    page_bytes = 30 * 2 * 3 * 64 * 2 * 16
    with LLM(
        smollm2_path, max_context=256, max_requests=32, max_step_tokens=48, kv_bytes=26 * page_bytes
    ) as llm:
        yield llm.engine


@pytest.mark.full
def test_a_crowd_changes_no_answer(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """A token that depends on batch mates, chunks, preemption or where a prefix came from."""
    requests = [engine.maker.make_request(ids, greedy()) for ids in prompts]
    for request in requests:
        engine.add_request(request)
    n_steps = 0
    while engine.has_work:
        engine.step()
        n_steps += 1
        if n_steps % 16 == 0:
            engine.check_integrity()
    assert [request.output_ids for request in requests] == alone
    assert engine.scheduler.n_preemptions > 0
    assert engine.allocator.n_prefix_hit > 1000


@pytest.mark.full
def test_random_arrivals_and_aborts_change_no_answer(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """The same over hundreds of steps, with pages that aborted requests leave behind."""
    random = np.random.default_rng(5)
    live: list[tuple[int, Request]] = []
    done = 0
    n_steps = 0
    while n_steps < 300:
        while len(live) < 12 and random.random() < 0.5:
            i = int(random.integers(len(prompts)))
            live.append((i, engine.maker.make_request(prompts[i], greedy())))
            engine.add_request(live[-1][1])
        if live and random.random() < 0.05:
            engine.abort(live[int(random.integers(len(live)))][1])
        engine.step()
        n_steps += 1
        engine.check_integrity()
        for i, request in [item for item in live if item[1].answer.finish_reason]:
            assert request.output_ids == alone[i][: request.n_generated]
            assert request.answer.finish_reason == "abort" or request.n_generated == N_NEW
            live.remove((i, request))
            done += request.answer.finish_reason == "length"
    for _, request in live:
        engine.abort(request)
    assert done > 50
    assert engine.pool.n_free == engine.pool.n_pages
