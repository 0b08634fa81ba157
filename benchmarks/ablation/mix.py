"""Requests of mixed lengths: the memory that they hold, and the time that they take together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.ablation.trial import Range, Row, Sizes, Trial, random_ids, request_of, row
from kukri.engine import Engine, Request
from kukri.engine.batch_builder import Chunk
from kukri.kernels.backend import Logits
from kukri.kernels.taps import TapListener


def mixed_requests(engine: Engine, sizes: Sizes) -> list[Request]:
    """`n_requests` of random prompts; lengths are drawn evenly on a logarithmic scale, always the same."""
    random = np.random.default_rng(2)

    def lengths(bounds: Range) -> list[int]:
        low, high = np.log(bounds)
        drawn: list[int] = np.exp(random.uniform(low, high, sizes.n_requests)).round().astype(int).tolist()
        return drawn

    pairs = zip(lengths(sizes.mix_prompt), lengths(sizes.mix_answer), strict=True)
    return [request_of(engine, random_ids(engine, n_prompt, random), n_new) for n_prompt, n_new in pairs]


@dataclass
class HeldMemory:
    """The most KV pages that a step held, and what its requests would have held in one piece each.

    `whole`: each has room for the engine's whole context; `own`: for its prompt and all of its answer.
    """

    pages: int = 0
    whole: int = 0
    own: int = 0


def paged_cache(trial: Trial) -> Iterator[Row]:
    """The most pages that a step of the mix holds, and the most that one piece for each request takes.

    A piece is the whole context where no limit is known, or at best the prompt and all of the answer.
    """
    engine = trial.engine
    requests = mixed_requests(engine, trial.sizes)
    with watched(engine) as held:
        serve(engine, [requests])
    page_bytes = engine.runner.cache.n_bytes // engine.pool.n_pages
    for what, n_pages, expected in (
        (f"{engine.max_context} tokens reserved for each", held.whole, (2.0, 2.0)),
        ("each one's most reserved", held.own, None),
    ):
        yield row(what, "bytes", [(n_pages * page_bytes, held.pages * page_bytes)], expected)


@contextmanager
def watched(engine: Engine) -> Iterator[HeldMemory]:
    """Records the pages held during each step within the `with` block."""
    held, forward = HeldMemory(), engine.runner.run

    def look(chunks: Sequence[Chunk], *own: TapListener, **more: Any) -> Logits:
        running = engine.scheduler.running
        held.pages = max(held.pages, engine.pool.n_pages - engine.pool.n_free)
        held.whole = max(held.whole, len(running) * engine.pool.pages_for(engine.max_context))
        held.own = max(held.own, sum(engine.pool.pages_for(request.max_cached) for request in running))
        return forward(chunks, *own, **more)

    engine.runner.run = look  # type: ignore[method-assign]
    try:
        yield held
    finally:
        engine.runner.run = forward  # type: ignore[method-assign]


def batching(trial: Trial) -> Iterator[Row]:
    """All requests of the mix are there at the start: one after another, in batches, or each joining at once.

    A step reads the weights once for all its requests; reading prompts gains nothing. Requests that join at
    once are all answered sooner than in batches, but an answer may come later on the mean.
    """
    engine, sizes = trial.engine, trial.sizes

    def served(group: int) -> Callable[[], tuple[float, float, float]]:
        def measure() -> tuple[float, float, float]:
            requests = mixed_requests(engine, sizes)
            started = time.perf_counter()
            serve(engine, [requests[i : i + group] for i in range(0, len(requests), group)])
            ends = [request.times.last_token_s - started for request in requests]
            firsts = [request.times.first_token_s - started for request in requests]
            return max(ends), float(np.mean(ends)), float(np.mean(firsts))

        return measure

    rounds = trial.in_turns("batching", served(1), served(sizes.n_streams), served(sizes.n_requests))
    for i, what in enumerate(("all answered", "an answer, mean", "a first token, mean")):
        yield row(f"one after another: {what}", "s", [(one[i], all_[i]) for one, _, all_ in rounds])
    for i, what in enumerate(("all answered", "an answer, mean")):
        measure = f"batches of {sizes.n_streams}: {what}"
        yield row(measure, "s", [(batch[i], all_[i]) for _, batch, all_ in rounds])


def serve(engine: Engine, groups: Sequence[Sequence[Request]]) -> None:
    """Computes groups of requests, each to its end before the next begins."""
    for group in groups:
        for request in group:
            engine.add_request(request)
        while engine.has_work:
            engine.step()
