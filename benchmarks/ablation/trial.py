"""The setting of a measurement: the model, the sizes, an engine, and rounds in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.turns import T, in_turns
from kukri.bench.card import ModelCard
from kukri.bench.offline import Kukri
from kukri.config import ModelConfig
from kukri.engine import Engine, Request
from kukri.kernels.arrays import IntArray
from kukri.sampling import SamplingParams

Range = tuple[int, int]  # the least and the most, both meant


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads, in tokens and requests; the defaults are those of a run."""

    context: int = 2048  # the engine's; what a contiguous cache sets aside for a request
    generations: tuple[tuple[int, int], ...] = ((128, 128), (512, 32))  # (prompt, generated) by the KV cache
    n_prompt: int = 512  # tokens of the prompt whose prefill is timed
    n_generate: int = 128  # generated when decode is timed
    n_requests: int = 24  # in the mix of lengths
    n_streams: int = 16  # how many of them run at a time
    mix_prompt: Range = (32, 1024)
    mix_answer: Range = (16, 256)
    shared_prompt: int = 1000
    own_prompt: int = 20  # what follows the shared prompt
    attention: tuple[int, ...] = (4096, 8192)  # prompts


@dataclass(frozen=True)
class Row:
    """One measurement: medians without and with a technique, and how many times better it makes things.

    `gain` is the median of `gains`, each of one round; of bytes and seconds fewer are better. `expected` is
    the range of gains reported for the technique, None if nothing is.
    """

    measure: str
    unit: str  # "s", "tokens/s" or "bytes"
    off: float
    on: float
    gain: float
    gains: tuple[float, ...]
    expected: tuple[float, float] | None = None


def row(
    measure: str,
    unit: str,
    rounds: Iterable[Sequence[float]],
    expected: tuple[float, float] | None = None,
) -> Row:
    """The Row of rounds, each (without, with)."""
    off, on = zip(*rounds, strict=True)
    pairs = zip(on, off, strict=True) if unit == "tokens/s" else zip(off, on, strict=True)
    gains = tuple(better / worse for better, worse in pairs)
    return Row(measure, unit, median(off), median(on), median(gains), gains, expected)


class Trial:
    """A model file, and the setting it is measured in; `on_round` is called before each round.

    Attributes: card, config, path, n_threads, repetitions, sizes. Close it to end its threads.
    """

    def __init__(
        self,
        card: ModelCard,
        config: ModelConfig,
        n_threads: int,
        repetitions: int,
        sizes: Sizes,
        on_round: Callable[[str], None],
    ) -> None:
        self.card, self.config, self.path = card, config, Path(card.path)
        self.n_threads, self.repetitions, self.sizes = n_threads, repetitions, sizes
        self._on_round = on_round

    def in_turns(self, what: str, *measures: Callable[[], T]) -> list[tuple[T, ...]]:
        """`turns.in_turns` over this trial's repetitions; `what` names them in the progress."""
        return in_turns(measures, self.repetitions, lambda text: self._on_round(f"{what}: {text}"))

    @cached_property
    def _kukri(self) -> Kukri:
        kukri = Kukri(self.path, self.n_threads, self.sizes.context, max_requests=self.sizes.n_streams)
        kukri.llm.engine.allocator.caches_prefixes = False  # what was computed before helps nobody
        return kukri

    @property
    def engine(self) -> Engine:
        """An engine for `n_streams` requests of `context` tokens, that keeps no prefixes."""
        return self._kukri.llm.engine

    def close(self) -> None:
        """Ends the engine, if there is one."""
        if "_kukri" in self.__dict__:
            self._kukri.close()


def random_ids(engine: Engine, n_tokens: int, random: np.random.Generator) -> IntArray:
    """Token ids of no meaning, int32 [n_tokens]."""
    return random.integers(0, engine.model.config.n_vocab, n_tokens, np.int32)


def request_of(engine: Engine, prompt: IntArray, n_new: int) -> Request:
    """A greedy request for exactly `n_new` tokens, not yet queued."""
    return engine.maker.make_request(prompt, SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True))


def run(engine: Engine, request: Request) -> Request:
    """The request, computed to its end."""
    engine.add_request(request)
    while engine.has_work:
        engine.step()
    return request
