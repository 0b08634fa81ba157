"""A short chat next to a long prompt, and a full server: `python -m benchmarks.fairness`.

- **chat**: the first token of a short prompt that arrives when three quarters of a long one are read, from
  the same user, from another, and of a better priority, against the same prompt alone; how many steps it
  waits for, which no other load of the machine changes; and what the long one loses by it. Every round has
  all of them, each begins with another, and a first one warms up. A model with a longer context than the
  default's: `python -m benchmarks.make_model qwen2.5-0.5b`.
- **full**: a step of many streams while others wait that find no room, against one without. A round has both
  twice, in the order 1, 2, 2, 1: the contexts grow meanwhile, and with them each step's time.
- **arrivals**: a step of the same streams in which a long prompt arrives that finds no room, whose beginning
  is cached and which looks up drafts, against a step without.

Prompts are random ids and sampling is greedy; the engine runs on its thread, as in a server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Comparison, Experiment, Say, Table, model_path, run, silent
from benchmarks.turns import in_turns
from kukri.bench.offline import Kukri
from kukri.engine import Engine, EngineLoop, Request, StepOutput
from kukri.sampling import SamplingParams

_SHORT, _ANSWER = 30, 16  # tokens of the chat's prompt, and of its answer
_LONG = 13_000
_WARM = 1_000  # tokens of the long prompt of the round that warms up
_ARRIVES = 0.75  # the share of the long prompt that is read when the chat comes
_CASES: dict[str, dict[str, Any]] = {
    "same user": {"client": "a"},
    "another user": {"client": "b"},
    "priority -10": {"client": "a", "priority": -10},
}
_STREAM_PROMPT, _STEPS = 64, 60


@dataclass(frozen=True)
class FairnessReport:
    """The report of `python -m benchmarks.fairness`: times in ms, medians of the rounds."""

    model: str
    n_threads: int
    n_long: int
    alone_ms: float  # first token of the chat without a neighbour
    chat_ms: dict[str, float]  # and next to a long prompt, by case
    steps: dict[str, int]  # from the chat's arrival to its first token, the one under way included; the most
    long_ms: float  # first token of the long prompt alone
    long_ratio: dict[str, float]  # its time next to a chat against alone
    full: Comparison  # ms of a step
    arrivals: Comparison  # the same


def measure(
    model: str | None, n_threads: int, n_streams: int, rounds: int, n_long: int = _LONG, say: Say = silent
) -> FairnessReport:
    """Measures both."""
    path = model_path(model, _STREAM_PROMPT + _n_streamed(rounds))
    say("a full server")
    with_waiters, arrivals = _full(path, n_threads, n_streams, rounds, n_long)
    kukri = Kukri(path, n_threads, _context(path, n_long), max_requests=n_streams, prefix_cache=False)
    n_long = min(n_long, kukri.llm.engine.max_context - 1)
    say(f"a chat next to a prompt of {n_long} tokens")
    user = _User(kukri.llm.engine, n_long)
    measures: list[Callable[[], _FirstTokens]] = [user.alone, *(partial(user.both, case) for case in _CASES)]

    def begin(text: str) -> None:
        user.n_long = _WARM if text == "warming up" else n_long  # it takes as long as a round otherwise
        say(text)

    found = in_turns(measures, rounds, begin)
    user.close()
    kukri.close()
    alone, *others = zip(*found, strict=True)
    cases = dict(zip(_CASES, others, strict=True))
    return FairnessReport(
        str(path),
        n_threads,
        n_long,
        median(one.chat_ms for one in alone),
        {name: median(one.chat_ms for one in case) for name, case in cases.items()},
        {name: max(one.n_steps for one in case) for name, case in cases.items()},
        median(one.long_ms for one in alone),
        {
            name: median(one.long_ms / lone.long_ms for one, lone in zip(case, alone, strict=True))
            for name, case in cases.items()
        },
        with_waiters,
        arrivals,
    )


def _context(path: Any, n_long: int) -> int:
    from kukri.formats.headers import read_headers

    config = read_headers(path).config
    return min(n_long + 1, config.max_context if config is not None else n_long)


class _FirstTokens(NamedTuple):
    """Milliseconds to the first tokens of a chat and of a long prompt, and the steps that the chat waited."""

    chat_ms: float
    long_ms: float
    n_steps: int = 0


class _User:
    """Sends requests to an engine on its thread, and waits for their ends."""

    def __init__(self, engine: Engine, n_long: int) -> None:
        self._engine, self.n_long = engine, n_long
        self._random = np.random.default_rng(0)
        self._changed = threading.Condition()
        self._n_steps: dict[int, int] = {}  # the engine's steps so far, at the first token of each request
        self._loop = EngineLoop(engine, self._deliver)
        self._loop.start()

    def close(self) -> None:
        """Ends the thread."""
        self._loop.stop()

    def alone(self) -> _FirstTokens:
        """A chat, and then a long prompt."""
        chat = self._send(_SHORT, _ANSWER)
        self._wait(chat)
        long = self._send(self.n_long, 1)
        self._wait(long)
        return _FirstTokens(1e3 * chat.timings.first_token_s, 1e3 * long.timings.first_token_s)

    def both(self, case: str) -> _FirstTokens:
        """A chat that arrives while a long prompt is read."""
        long = self._send(self.n_long, 1, client="a")
        while long.sequence.n_cached < _ARRIVES * self.n_long and not long.has_ended:
            time.sleep(0.01)
        n_before = self._loop.status().n_steps
        chat = self._send(_SHORT, _ANSWER, **_CASES[case])
        self._wait(chat)
        self._wait(long)
        chat_s, long_s = (one.timings.first_token_s for one in (chat, long))
        return _FirstTokens(1e3 * chat_s, 1e3 * long_s, self._n_steps[chat.id] - n_before)

    def _send(self, n_prompt: int, n_new: int, **options: Any) -> Request:
        prompt = self._random.integers(0, self._engine.model.config.n_vocab, n_prompt)
        (request,) = self._engine.maker.make_requests(prompt, _greedy(n_new), **options)
        self._loop.submit([request])
        return request

    def _wait(self, request: Request) -> None:
        with self._changed:
            self._changed.wait_for(lambda: request.has_ended)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self._n_steps.setdefault(output.request.id, self._loop.status().n_steps)
        with self._changed:
            self._changed.notify_all()


def _full(
    path: Path, n_threads: int, n_streams: int, rounds: int, n_long: int
) -> tuple[Comparison, Comparison]:
    """Milliseconds of a step of all streams, with twice as many requests as run and with just as many; and
    of one in which a prompt of up to `n_long` tokens arrives.
    """
    n_streamed = _n_streamed(rounds)
    n_long = max(n_long, _STREAM_PROMPT + n_streamed)
    kukri = Kukri(path, n_threads, _context(path, n_long), max_requests=n_streams)
    engine, random = kukri.llm.engine, np.random.default_rng(1)
    n_long = min(n_long, engine.max_context - 2)
    prompts = random.integers(0, engine.model.config.n_vocab, (2 * n_streams, _STREAM_PROMPT))
    long = random.integers(0, engine.model.config.n_vocab, n_long)
    engine.add_request(engine.maker.make_request(long, _greedy(1)))
    while engine.has_work:
        engine.step()
    streams = [engine.maker.make_request(prompt, _greedy(n_streamed)) for prompt in prompts[:n_streams]]
    for request in streams:
        engine.add_request(request)
    while not all(request.n_generated > 4 for request in streams):
        engine.step()

    def step_ms(n_waiting: int) -> float:
        waiting = [engine.maker.make_request(prompt, _greedy(2)) for prompt in prompts[:n_waiting]]
        for request in waiting:
            engine.add_request(request)
        for _ in range(3):
            engine.step()
        times = []
        for _ in range(_STEPS - 3):
            started_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started_s)
        for request in waiting:
            engine.abort(request)
        return 1e3 * median(times)

    def arrivals_ms() -> tuple[float, float]:
        """Every other step has an arrival: both kinds see the same load of the machine."""
        times: tuple[list[float], list[float]] = [], []
        for i in range(_STEPS):
            new = engine.maker.make_request(long, _greedy(2, speculation="ngram"))
            started_s = time.perf_counter()
            if i % 2 == 0:
                engine.add_request(new)
            engine.step()
            times[i % 2].append(time.perf_counter() - started_s)
            engine.abort(new)
        return 1e3 * median(times[0]), 1e3 * median(times[1])

    rows = [[step_ms(n) for n in (n_streams, 0, 0, n_streams)] for _ in range(rounds + 1)][1:]
    waiting = Comparison.of(("waiting", "none"), [((a + d) / 2, (b + c) / 2) for a, b, c, d in rows])
    arrivals = Comparison.of(("arriving", "none"), [arrivals_ms() for _ in range(rounds + 1)][1:])
    kukri.close()
    return waiting, arrivals


def _n_streamed(rounds: int) -> int:
    return _STEPS * (5 * rounds + 12)


def _greedy(n_new: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, **options)


def _tables(report: FairnessReport) -> Iterator[Table | str]:
    rows = [["alone", f"{report.alone_ms:.0f}", "", "", ""]]
    for name, ms in report.chat_ms.items():
        ratio, of_long = f"{ms / report.alone_ms:.1f}", f"{report.long_ratio[name]:.3f}"
        rows.append([name, f"{ms:.0f}", ratio, str(report.steps[name]), of_long])
    title = f"first token of {_SHORT} tokens next to {report.n_long} ({report.long_ms / 1e3:.1f} s alone)"
    yield Table(title, ["", "ms", "of alone", "steps, at most", "the long one's time"], rows)
    for what, full in (("others wait", report.full), ("a long prompt arrives", report.arrivals)):
        with_others, none = (full.median(name) for name in full.sides)
        ratio = f"{full.median_ratio:.3f}"
        yield f"a step of a full server: {with_others:.3f} ms while {what}, {none:.3f} ms without ({ratio})"


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("fairness", "Measure a chat next to a long prompt, and a full server.")
    experiment.count("-s", "--streams", 16, "streams of the full server")
    experiment.count("-r", "--rounds", 5, "rounds of each")
    experiment.count("-p", "--prompt-tokens", _LONG, "tokens of the long prompt, or what the context holds")
    given = experiment.parse()
    report = measure(
        given.model, given.threads, given.streams, given.rounds, given.prompt_tokens, experiment.say
    )
    experiment.show(report, *_tables(report))


if __name__ == "__main__":
    run(main)
