"""Measurements in turns: sides of a comparison within a second or two of each other, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

SETTLE_S = 0.1  # between measurements: threads that spin for work have gone to sleep by then


def in_turns(
    measures: Sequence[Callable[[], T]],
    n_rounds: int,
    on_round: Callable[[str], None],
    warm_ups: Sequence[Callable[[], T]] = (),
) -> list[tuple[T, ...]]:
    """Returns the results of `measures` in their order, one tuple per round.

    A first round, of `warm_ups` if there are any, is dropped. Each round starts with another measure, so that
    none profits from its place. `on_round` is called before each round begins.
    """
    rounds: list[tuple[T, ...]] = []
    n = len(measures)
    for i in range(n_rounds + 1):
        calls = measures if i else warm_ups or measures
        on_round(f"round {i} of {n_rounds}" if i else "warming up")
        results: dict[int, T] = {}
        for j in range(n):
            place = (i + j) % n
            time.sleep(SETTLE_S)
            results[place] = calls[place]()
        rounds.append(tuple(results[place] for place in range(n)))
    return rounds[1:]
