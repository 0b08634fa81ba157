"""The costs of a step's rows and of drafts: from a table at first, then learned from the steps that ran.

A table of costs holds for the processor that it was measured on. On another processor, with a longer context
or on a busy machine costs differ, and with a wrong table drafts lose time instead of saving it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, log

import numpy as np

from kukri.engine.step_cost import smoothed

_PLAIN_EVERY = 24  # steps with drafts, before one without is due, with whose time they are compared
_PLAIN_WEIGHT, _MAKING_WEIGHT = 0.15, 0.1  # weights of a measurement, after the first
_LEAST_FALL = 5.0  # see `smoothed`: one step alone may well take half as long as another
_MEMORY = 0.97  # factor of a measurement's weight after each later one
_FORGET_EVERY = 8  # steps without drafts
_TABLE_WEIGHT = 1.0  # measurements that the table counts for
_MOST_EXCESS = log(2.0)  # a larger excess over the expected cost counts as this


class RowCosts:
    """The time of steps by their rows, from a table corrected by steps that ran. No result depends on it."""

    def __init__(self, table: Sequence[float]) -> None:
        """`table`: see Backend.row_costs."""
        self._table = tuple(table)
        self._measured: dict[int, _MeasuredCosts] = {}  # by tokens of a step without its drafts

    def of(self, n_tokens: int) -> tuple[float, ...]:
        """Return the costs of steps of 1, 2, ... rows with `n_tokens` tokens besides drafts."""
        measured = self._measured.get(n_tokens)
        return self._table if measured is None else measured.costs

    def needs_plain(self, n_tokens: int) -> bool:
        """Return True if a step of `n_tokens` tokens should have no drafts, because its duration was never
        measured or the measurement is out of date. It is False where steps are not measured.
        """
        measured = self._measured.get(n_tokens)
        return bool(self._measured) if measured is None else measured.n_since_plain >= _PLAIN_EVERY

    def unit_s(self, n_tokens: int) -> float | None:
        """The seconds that `of` counts as 1; None if not known."""
        measured = self._measured.get(n_tokens)
        if measured is None or measured.plain_s is None:
            return None
        return measured.plain_s / self.of(n_tokens)[n_tokens - 1]

    def observe(self, n_tokens: int, n_drafts: int, elapsed_s: float) -> None:
        """Notes the time of a step that had no prompt."""
        if n_tokens >= len(self._table):  # a row costs as much as each before it
            return
        measured = self._measured.get(n_tokens)
        if measured is None:
            measured = self._measured[n_tokens] = _MeasuredCosts(self._table, n_tokens)
        if n_drafts:
            measured.observe_drafts(n_drafts, elapsed_s)
        else:
            measured.observe_plain(elapsed_s)


class _MeasuredCosts:
    """Costs of steps that have the same number of tokens besides drafts, which are not one for each row."""

    def __init__(self, table: Sequence[float], n_tokens: int) -> None:
        self._costs: tuple[float, ...] | None = tuple(table)  # None: to be corrected when it is asked for
        self.plain_s: float | None = None  # time of a step without drafts
        self.n_since_plain = _PLAIN_EVERY
        self._n_tokens, self._n_plain = n_tokens, 0
        self._table = np.log(table)
        places = np.log2(np.arange(1, len(table) + 1))
        # the influence of a measurement on other numbers of rows, which falls with their ratio
        self._nearness = 0.25 ** np.abs(places[:, None] - places)
        np.fill_diagonal(self._nearness, 0.0)
        # by rows: the weight of measurements, and the mean of the logarithms of their corrections
        self._weights, self._means = np.zeros(len(table)), np.zeros(len(table))

    @property
    def costs(self) -> tuple[float, ...]:
        if self._costs is None:
            self._costs = self._corrected()
        return self._costs

    def observe_plain(self, elapsed_s: float) -> None:
        self._n_plain, self.n_since_plain = self._n_plain + 1, 0
        if self._n_plain % _FORGET_EVERY == 0:  # else drafts that were dear once would never be tried again
            self._weights *= _MEMORY**_FORGET_EVERY
            self._costs = None
        weight = max(1.0 / self._n_plain, _PLAIN_WEIGHT)
        self.plain_s = smoothed(self.plain_s, max(elapsed_s, 1e-9), weight, _LEAST_FALL)

    def observe_drafts(self, n_drafts: int, elapsed_s: float) -> None:
        self.n_since_plain += 1
        if self.plain_s is None:
            return
        if elapsed_s < self.plain_s / 2:  # it is the plain step that was too long
            self.n_since_plain = _PLAIN_EVERY
            return
        n, n_rows = len(self.costs), self._n_tokens + n_drafts
        row, more = min(n_rows, n) - 1, max(n_rows / n, 1.0)
        costs, first = self.costs, self._n_tokens - 1
        measured = max(elapsed_s, 1e-9) / (self.plain_s * more)
        measured = log(min(measured, costs[row] / costs[first] * exp(_MOST_EXCESS)))
        self._weights *= _MEMORY
        self._weights[row] += 1.0
        excess = measured - (self._table[row] - self._table[first]) - self._means[row]
        self._means[row] += excess / self._weights[row]
        self._costs = None

    def _corrected(self) -> tuple[float, ...]:
        """Measured rows count by their own weight, others by at most one measurement each."""
        shared = self._weights / (self._weights + 1.0)
        sums = self._weights * self._means + self._nearness @ (shared * self._means)
        weights = self._weights + self._nearness @ shared + _TABLE_WEIGHT
        corrections = sums / weights
        corrections[: self._n_tokens] = 0.0
        return tuple(accumulate(np.exp(self._table + corrections).tolist(), max))  # more rows cost no less


class MakingCost:
    """The cost of a model's draft, in steps of one token of the larger model: by its size, later as measured.

    Attributes: of_one, the cost of one draft.
    """

    def __init__(self, of_one: float) -> None:
        self.of_one = of_one

    def observe(self, expected: float, measured: float) -> None:
        """Note the measured cost of drafts, and the cost that was expected."""
        if expected > 0.0:
            self.of_one = smoothed(self.of_one, self.of_one * measured / expected, _MAKING_WEIGHT)
