"""An engine on the fake model driven by hand, and by random events, which the property tests share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from kukri.engine import Engine, InFlight, Request, RequestState, StepOutput
from kukri.engine.pages import most_pages
from kukri.sampling import SamplingParams
from tests.engine.fake_model import EOS, N_VOCAB, POISON

Event = tuple[Any, ...]

# sizes of small engines, where requests meet every bound, for `given`
SIZES: dict[str, st.SearchStrategy[Any]] = {
    "max_requests": st.integers(1, 4),
    "max_step_tokens": st.sampled_from([1, 2, 5, 16, 33, 100]),
    "n_pages": st.integers(6, 14),
    "n_in_flight": st.integers(1, 3),
}

# (window, pages that its pool has beyond what a request needs) of layers besides those that see all
WINDOWS = st.lists(
    st.tuples(st.sampled_from([1, 7, 16, 25, 40]), st.integers(0, 5)), max_size=2, unique_by=lambda w: w[0]
)


def pages_with_windows(windows: Sequence[tuple[int, int]], n_pages: int, step_tokens: int) -> dict[str, Any]:
    """Options of an engine with `WINDOWS`: every request of 96 tokens fits, and others may have to leave."""
    windows = sorted(windows, reverse=True)
    own = [most_pages(96, 16, window, step_tokens) + more for window, more in windows]
    return {"n_pages": (n_pages, *own), "windows": [window for window, _ in windows]}


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """n tokens, without those that mean something here."""
    plain = [i for i in range(N_VOCAB) if i not in (EOS, POISON)]
    return np.random.default_rng(seed).choice(plain, n).tolist()


def greedy(max_tokens: int | None, **kwargs: Any) -> SamplingParams:
    """The likeliest tokens, past the end of text."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **kwargs})


def add(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Request:
    """A queued request."""
    request = engine.maker.make_request(prompt, params)
    engine.add_request(request)
    return request


class Pipeline:
    """Steps an engine with up to `depth` steps in flight, looking it over after each half of a step."""

    def __init__(self, engine: Engine, depth: int) -> None:
        self.engine, self.depth, self.most_in_flight = engine, depth, 0
        self.in_flight: deque[InFlight] = deque()

    def step(self) -> list[StepOutput]:
        """Launches what there is room for, then collects the oldest step."""
        while len(self.in_flight) < self.depth:
            launched = self.engine.launch()
            self.engine.check_integrity()
            if launched is None:
                break
            self.in_flight.append(launched)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        if not self.in_flight:
            return []
        outputs = self.engine.collect(self.in_flight.popleft())
        self.engine.check_integrity()
        return outputs


def rows_of(
    engine: Engine,
    ids: Sequence[int],
    output: Literal["logits", "hidden", "pooled"] = "logits",
    **options: Any,
) -> np.ndarray:
    """The rows of a request for them, next to whatever else the engine has to do."""
    request = engine.maker.make_output_request(ids, output, **options)
    engine.add_request(request)
    while request.sequence.state is not RequestState.FINISHED:
        engine.step()
    assert request.answer.rows is not None
    return request.answer.rows


def finish(engine: Engine, max_steps: int = 10_000, pipeline: Pipeline | None = None) -> None:
    """Steps until nothing is left to do, looking the engine over after each."""
    pipeline = pipeline or Pipeline(engine, 1)
    for _ in range(max_steps):
        if not engine.has_work:
            return
        pipeline.step()
    raise AssertionError("the engine does not come to an end")


def any_events(*fields: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[list[Event]]:
    """Arrivals of requests that `fields` describe, aborts, steps, and all that was computed forgotten."""
    return st.lists(
        st.one_of(
            st.tuples(st.just("add"), *fields),
            st.tuples(st.just("abort"), st.integers(0, 9)),
            st.tuples(st.just("step"), st.integers(1, 12)),
            st.tuples(st.just("forget")),
        ),
        max_size=max_size,
    )


def play(
    engine: Engine, events: Sequence[Event], make: Callable[..., Iterable[Request]], n_in_flight: int = 1
) -> None:
    """Lets the events happen, then whatever they left to do, looking the engine over after every step.

    `make(i, *fields)` makes the requests of the arrival at place i. Aborts and arrivals come while up to
    `n_in_flight - 1` steps are in flight.
    """
    pipeline = Pipeline(engine, n_in_flight)
    requests: list[Request] = []
    for i, (kind, *given) in enumerate(events):
        if kind == "add":
            for request in make(i, *given):
                engine.add_request(request)
                requests.append(request)
        elif kind == "forget":
            engine.add_hooks({})
        elif kind == "abort" and given[0] < len(requests):
            engine.abort(requests[given[0]])
        elif kind == "step":
            for _ in range(given[0]):
                pipeline.step()
    finish(engine, pipeline=pipeline)
