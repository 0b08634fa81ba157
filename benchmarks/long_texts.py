"""What Python does in a step, next to long texts: `python -m benchmarks.long_texts`.

One answer is decoded while a prompt of N tokens waits, whose beginning is cached and for whose rest
there are no pages; and DRY looks back on a text of N tokens. Times are medians, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.harness import Experiment, Table, run

_PAGE_TOKENS = 16
_N_VOCAB = 30_000


@dataclass(frozen=True)
class LongTextsReport:
    """The report of `python -m benchmarks.long_texts`: microseconds by number of tokens."""

    waiting_us: dict[int, float]  # scheduling a step while a prompt waits
    waiting_with_states_us: dict[int, float]  # the same of a model with recurrent layers
    dry_us: dict[int, float]  # DRY's part of a token


def _text(n_tokens: int, seed: int) -> np.ndarray:
    """Tokens whose frequencies fall as those of words do."""
    weights = 1 / (np.arange(_N_VOCAB) + 3.7)
    rng = np.random.default_rng(seed)
    return rng.choice(_N_VOCAB, n_tokens, p=weights / weights.sum()).astype(np.int32)


def _median_us(n: int, work: Callable[[], object], between: Callable[[], object] = lambda: None) -> float:
    """The median of n calls, after some to warm up."""
    times = []
    for _ in range(n + 10):
        between()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e6 * median(times[10:])


def waiting_us(n_tokens: int, n_steps: int, *, has_states: bool = False) -> float:
    """Microseconds to schedule a step while a prompt of `n_tokens` waits for room."""
    from kukri.engine.kv_allocator import KVAllocator
    from kukri.engine.pages import PagePool, pages_for
    from kukri.engine.request import Request
    from kukri.engine.scheduled_step import ScheduledStep
    from kukri.engine.scheduler import Scheduler
    from kukri.engine.states import StatePool
    from kukri.errors import KukriError
    from kukri.sampling import SampledToken, SamplingParams

    n_needed = pages_for(n_tokens, _PAGE_TOKENS)
    n_pages = 2 * n_needed + n_steps // _PAGE_TOKENS
    states = StatePool(64) if has_states else None
    scheduler = Scheduler(KVAllocator([PagePool(n_pages, _PAGE_TOKENS)], states=states), 4, 1 << 20)
    made: list[Request] = []

    def add(prompt: np.ndarray, n_new: int) -> None:
        params = SamplingParams(max_tokens=n_new)
        made.append(Request.new(len(made), prompt, params, max_context=1 << 20, max_pages=n_pages))
        scheduler.add(made[-1])

    def finish(step: ScheduledStep) -> None:
        results: list[list[SampledToken | KukriError]] = [
            [SampledToken(5)] if chunk.n_logits else [] for chunk in step.chunks
        ]
        scheduler.postprocess(step.chunks, results, 1.0)
        scheduler.start_over()  # as drafts, recurrent layers and steps in flight do

    shared, rest = _text(n_tokens // 2, 1), _text(n_tokens - n_tokens // 2, 2)
    add(shared, 1)
    finish(scheduler.schedule())
    add(_text((n_pages - n_needed + 1) * _PAGE_TOKENS, 3), n_steps + 20)
    finish(scheduler.schedule())
    add(np.concatenate([shared, rest]), 1)
    taken_us = _median_us(n_steps, scheduler.schedule, lambda: finish(scheduler._step))
    assert made[-1] in scheduler.waiting, "the prompt found room"
    return taken_us


def dry_us(n_tokens: int, n_steps: int) -> float:
    """Microseconds that DRY takes for a token after a text of `n_tokens`."""
    from kukri.sampling import SamplingParams
    from kukri.sampling.history import DryRepetitions, Tokens

    tokens = Tokens(_text(n_tokens, 4))
    dry = DryRepetitions(SamplingParams(dry_multiplier=0.8), tokens, [])
    to_come = iter(_text(n_steps + 10, 5).tolist())

    def step() -> None:
        dry.update()
        dry.table()

    return _median_us(n_steps, step, lambda: tokens.add(next(to_come)))


def main() -> None:
    """The experiment's command line."""
    experiment = Experiment(
        "long_texts", "Measure Python's part of a step next to long texts.", with_model=False
    )
    experiment.count("-s", "--n-steps", 400, "steps")
    sizes, n = (1_000, 10_000, 100_000), experiment.parse().n_steps
    report = LongTextsReport(
        {size: waiting_us(size, n) for size in sizes},
        {size: waiting_us(size, n, has_states=True) for size in sizes},
        {size: dry_us(size, n) for size in sizes},
    )
    rows = [
        [name, *(f"{by_size[size]:.0f}" for size in sizes)]
        for name, by_size in (
            ("a step, while a prompt waits", report.waiting_us),
            ("the same with recurrent states", report.waiting_with_states_us),
            ("DRY, for each token", report.dry_us),
        )
    ]
    experiment.show(report, Table("µs next to a text of tokens", ["", *(f"{s:,}" for s in sizes)], rows))


if __name__ == "__main__":
    run(main)
