"""A short chat beside a long prompt, and a full server: `python -m benchmarks.fairness`.

- **beside**: the first token of a short prompt that arrives when three quarters of a long one are read, from
  the same user, from another, and of a better priority, against the same prompt alone; and what the long one
  loses by it. Every round has all of them, one after another. A model with a longer context than the
  default's: `python -m benchmarks.make_model qwen2.5-0.5b`.
- **full**: a step of many streams while others wait that find no room, against one without, in turns.

Prompts are random ids and sampling is greedy; the engine runs on its thread, as in a server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Comparison, Experiment, Say, Table, model_path, run, silent
from kukri.bench.offline import Kukri
from kukri.bench.turns import in_turns
from kukri.engine import Engine, EngineLoop, Request, StepOutput
from kukri.sampling import SamplingParams

_SHORT, _ANSWER = 30, 16  # tokens of the chat's prompt, and of its answer
_LONG = 13_000  # or what the context holds
_ARRIVES = 0.75  # of the long prompt, when the chat comes
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
    beside_ms: dict[str, float]  # and beside a long prompt, by case
    long_ms: float  # first token of the long prompt alone
    long_ratio: dict[str, float]  # its time beside a chat against alone
    full: Comparison  # ms of a step


def measure(
    model: str | None, n_threads: int, n_streams: int, rounds: int, say: Say = silent
) -> FairnessReport:
    """Measures both."""
    path = model_path(model, _STREAM_PROMPT + _STEPS * (rounds + 2))
    say("a full server")
    with_waiters = _full(str(path), n_threads, n_streams, rounds)
    kukri = Kukri(path, n_threads, _context(path), max_requests=n_streams, prefix_cache=False)
    n_long = min(_LONG, kukri.llm.engine.max_context - 1)
    say(f"a chat beside a prompt of {n_long} tokens")
    user = _User(kukri.llm.engine, n_long)
    found = [[user.chat_alone(), user.long_alone(), *map(user.both, _CASES)] for _ in range(rounds)]
    user.close()
    kukri.close()
    alone, long, *cases = ([*column] for column in zip(*found, strict=True))
    return FairnessReport(
        str(path),
        n_threads,
        n_long,
        median(alone),
        {name: median(short for short, _ in case) for name, case in zip(_CASES, cases, strict=True)},
        median(long),
        {
            name: median(both / one for (_, both), one in zip(case, long, strict=True))
            for name, case in zip(_CASES, cases, strict=True)
        },
        with_waiters,
    )


def _context(path: Any) -> int:
    from kukri.formats.headers import read_headers

    config = read_headers(path).config
    return min(_LONG + 1, config.max_context if config is not None else _LONG)


class _User:
    """Sends requests to an engine on its thread, and waits for their ends."""

    def __init__(self, engine: Engine, n_long: int) -> None:
        self._engine, self._n_long = engine, n_long
        self._random = np.random.default_rng(0)
        self._changed = threading.Condition()
        self._loop = EngineLoop(engine, self._deliver)
        self._loop.start()

    def close(self) -> None:
        """Ends the thread."""
        self._loop.stop()

    def chat_alone(self) -> float:
        """Milliseconds to the first token of a chat."""
        chat = self._send(_SHORT, _ANSWER)
        self._wait(chat)
        return 1e3 * chat.timings.first_token_s

    def long_alone(self) -> float:
        """Milliseconds to the first token of a long prompt."""
        long = self._send(self._n_long, 1)
        self._wait(long)
        return 1e3 * long.timings.first_token_s

    def both(self, case: str) -> tuple[float, float]:
        """The same for a chat that arrives while a long prompt is read, and for the long prompt."""
        long = self._send(self._n_long, 1, client="a")
        while long.n_cached < _ARRIVES * self._n_long:
            time.sleep(0.01)
        chat = self._send(_SHORT, _ANSWER, **_CASES[case])
        self._wait(chat)
        self._wait(long)
        return 1e3 * chat.timings.first_token_s, 1e3 * long.timings.first_token_s

    def _send(self, n_prompt: int, n_new: int, **options: Any) -> Request:
        prompt = self._random.integers(0, self._engine.model.config.n_vocab, n_prompt)
        (request,) = self._engine.make_requests(prompt, _greedy(n_new), **options)
        self._loop.submit([request])
        return request

    def _wait(self, request: Request) -> None:
        with self._changed:
            self._changed.wait_for(lambda: request.has_ended)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        with self._changed:
            self._changed.notify_all()


def _full(path: str, n_threads: int, n_streams: int, rounds: int) -> Comparison:
    """Milliseconds of a step of all streams, with twice as many requests as run and with just as many."""
    context = _STREAM_PROMPT + _STEPS * (2 * rounds + 4)
    kukri = Kukri(path, n_threads, context, max_requests=n_streams, prefix_cache=False)
    engine, random = kukri.llm.engine, np.random.default_rng(1)
    prompts = random.integers(0, engine.model.config.n_vocab, (2 * n_streams, _STREAM_PROMPT))
    requests = [engine.make_request(prompt, _greedy(context - _STREAM_PROMPT)) for prompt in prompts]
    for request in requests[:n_streams]:
        engine.add_request(request)
    while not all(request.n_generated > 4 for request in requests[:n_streams]):
        engine.step()

    def step_ms(n_waiting: int) -> float:
        waiting = [engine.make_request(prompt, _greedy(2)) for prompt in prompts[:n_waiting]]
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

    measures = [partial(step_ms, n) for n in (n_streams, 0)]
    found = Comparison.of(("waiting", "none"), in_turns(measures, rounds, silent))
    kukri.close()
    return found


def _greedy(n_new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)


def _tables(report: FairnessReport) -> Iterator[Table | str]:
    rows = [["alone", f"{report.alone_ms:.0f}", "", ""]]
    for name, ms in report.beside_ms.items():
        rows.append([name, f"{ms:.0f}", f"{ms / report.alone_ms:.1f}", f"{report.long_ratio[name]:.3f}"])
    title = f"first token of {_SHORT} tokens beside {report.n_long} ({report.long_ms / 1e3:.1f} s alone)"
    yield Table(title, ["", "ms", "of alone", "the long one's time"], rows)
    waiting, none = (report.full.median(name) for name in ("waiting", "none"))
    yield (
        f"a step of a full server: {waiting:.3f} ms while others wait, {none:.3f} ms while none does "
        f"({report.full.median_ratio:.3f})"
    )


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("fairness", "Measure a chat beside a long prompt, and a full server.")
    experiment.count("-s", "--streams", 16, "streams of the full server")
    experiment.count("-r", "--rounds", 5, "rounds of each")
    given = experiment.parse()
    report = measure(given.model, given.threads, given.streams, given.rounds, experiment.say)
    experiment.show(report, *_tables(report))


if __name__ == "__main__":
    run(main)
