"""Gain of each technique of the engine on this machine: the figures of `python -m benchmarks.ablate`.

Each technique is measured in pairs, with and without it in turns, so that what else the machine does meets
both alike; medians are shown, and the median of the ratios of each round. Where the engine has no switch,
what it would do without is done by its own means: `benchmarks.ablation` has a function for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.ablation import attention, cache, mix, speed
from benchmarks.ablation.trial import Row, Sizes, Trial
from kukri.bench.card import MachineCard, ModelCard, machine_card, model_card
from kukri.errors import ConfigError
from kukri.formats import hub
from kukri.formats.headers import read_headers


@dataclass(frozen=True)
class Technique:
    """A technique, and how it is measured next to a baseline without it.

    `measure` gives its rows and says how in its docstring; `n_loops`: how often it goes through all rounds.
    """

    name: str
    measure: Callable[[Trial], Iterator[Row]]
    n_loops: Callable[[Sizes], int]

    @property
    def how(self) -> str:
        """Description of the measurement: the docstring of `measure`, in one line."""
        return " ".join((inspect.getdoc(self.measure) or "").split())


def _once(sizes: Sizes) -> int:
    return 1


def _never(sizes: Sizes) -> int:
    return 0


TECHNIQUES: dict[str, Technique] = {
    technique.name: technique
    for technique in (
        Technique("kv-cache", cache.kv_cache, lambda sizes: len(sizes.generations)),
        Technique("quantization", speed.quantization, _once),
        Technique("grouped-queries", cache.grouped_queries, _never),
        Technique("paged-cache", mix.paged_cache, _never),
        Technique("batching", mix.batching, _once),
        Technique("prefix-cache", cache.prefix_cache, _once),
        Technique("attention", attention.attention, lambda sizes: len(sizes.attention)),
        Technique("threads", speed.threads, _once),
    )
}


@dataclass(frozen=True)
class AblationReport:
    """The results of `python -m benchmarks.ablate`: rows by the name of their technique."""

    machine: MachineCard
    model: ModelCard
    n_threads: int
    repetitions: int
    sizes: Sizes
    techniques: dict[str, tuple[Row, ...]]


def chosen(names: Sequence[str], n_threads: int) -> list[Technique]:
    """Techniques by name, in the order of TECHNIQUES; none named means all that `n_threads` allow.

    Raises ConfigError on an unknown name, and for "threads" if there is just one.
    """
    for name in names:
        if name not in TECHNIQUES:
            raise ConfigError(f"there is no technique {name!r}: use {', '.join(TECHNIQUES)}")
    if n_threads == 1 and "threads" in names:
        raise ConfigError("one thread has nothing to be compared with: set --threads to more")
    left_out = {"threads"} if n_threads == 1 else set()
    return [t for t in TECHNIQUES.values() if t.name not in left_out and (t.name in names or not names)]


def n_rounds(techniques: Sequence[Technique], repetitions: int, sizes: Sizes) -> int:
    """Number of rounds of `ablate`, warm-up rounds included."""
    return sum(technique.n_loops(sizes) for technique in techniques) * (repetitions + 1)


def ablate(
    model: str | None,
    techniques: Sequence[Technique],
    *,
    n_threads: int,
    repetitions: int,
    sizes: Sizes,
    on_round: Callable[[str], None],
) -> AblationReport:
    """Measures techniques on a .gguf model; `on_round` is called before each round.

    Raises ConfigError on a directory, and on a model whose context is shorter than `sizes.context`.
    """
    path = hub.resolve(model)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: make a file of it with `kukri convert {path} model.gguf`")
    card, config = model_card(path), read_headers(path).config
    assert config is not None, "a model that has a card has a configuration"
    if config.max_context < sizes.context:
        raise ConfigError(
            f"{path} has a context of {config.max_context} tokens, and {sizes.context} are measured with:"
            " use another model"
        )
    machine = machine_card(n_threads)
    trial = Trial(card, config, n_threads, repetitions, sizes, on_round)
    try:
        found = {technique.name: tuple(technique.measure(trial)) for technique in techniques}
    finally:
        trial.close()
    return AblationReport(machine, card, n_threads, repetitions, sizes, found)
