"""Guesses at the tokens to come, which a step computes beside the newest one and keeps where they come true.

A guess changes no token: each is drawn as ever, from logits that do not depend on how tokens are cut into
steps, and a guess that is another token is forgotten with all after it. So what matters is what it costs: how
many guesses a step takes follows from how often guesses of their kind came true in this answer, and from what
a step costs with more tokens.

`LookupDrafts` guesses that a text goes on as it did before (prompt lookup decoding, A. Saxena 2023): it
follows the place that the last tokens repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import log
from typing import Protocol

import numpy as np

from kukri.kernels.types import IntArray

_END = (1 << 32) - 1  # between a given text and the prompt: no token
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2^64 over the golden ratio: spreads pairs over keys
# how often a guess that was looked up comes true after 0, 1, 2, 4, 8, 16 tokens that did
_EXPECTED = (0.2, 0.4, 0.4, 0.6, 0.8, 0.9)
_EXPECTED_WEIGHT = 4.0  # tokens that this counts for
_MEMORY = 0.98  # what is left of a token's weight at the next of its kind
_HOPELESS = 0.05  # a guess of less chance is worth no time, nor are those after it
_GAIN = 1.03  # the least gain that is worth a guess, as odds and costs are guesses too
# the time of a step of 1, 2, ... tokens, and of each beyond, in those of a step of one: see docs/log.md
# for one machine; others differ by how steeply it grows, which `StepCosts` learns
_COST = (1.0, 1.15, 1.27, 1.37, 1.5, 1.6, 1.7, 1.75, 2.1)
_COST_BEYOND = 0.19
_MEMORY_OF_STEPS = 0.1  # what the newest step counts, once there are some
_BEND, _DAMPING = 0.1, 0.02  # how fast the steepness follows; where steps are alike, it stays
_N_FIRST = 8  # steps that tell the time of one token alone
_MAX_ERROR = 0.3  # a factor of 1.35: what is off by more was held up by something else
_FLATTEST, _STEEPEST = 0.3, 6.0
_DEPTHS = (1, 2, 3, 5, 7, 11, 15, 31, 63)  # guesses of one request: costs bend at 8 tokens, then grow evenly


class Odds:
    """How often guesses come true in one answer, by how many tokens before them did."""

    def __init__(self, expected: Sequence[float]) -> None:
        """`expected`: what is taken for true after 0, 1, 2, 4, 8, 16 tokens, before an answer shows it."""
        self._n_true = [share * _EXPECTED_WEIGHT for share in expected]
        self._n = [_EXPECTED_WEIGHT] * len(_EXPECTED)

    def chance(self, n_before: int) -> float:
        """The probability that a guess comes true, after `n_before` that did."""
        kind = min(n_before.bit_length(), len(_EXPECTED) - 1)
        return self._n_true[kind] / self._n[kind]

    def learn(self, n_before: int, came_true: bool) -> None:
        """Books a guess."""
        kind = min(n_before.bit_length(), len(_EXPECTED) - 1)
        self._n_true[kind] = self._n_true[kind] * _MEMORY + came_true
        self._n[kind] = self._n[kind] * _MEMORY + 1.0


class StepCosts:
    """What steps of more tokens cost on this machine, learned from those that ran.

    A step of n tokens takes `one * (1 + steepness * x)`, where x is what the table says it costs beyond one
    token: less where memory is slow, more where arithmetic is. Both factors follow the times of steps.
    """

    def __init__(self) -> None:
        self.steepness = 1.0
        self._log_one_s = 0.0  # of a step of one token
        self._usual_slope = 0.0
        self._n_seen = 0

    def of(self, n_tokens: int) -> float:
        """The time of a step of `n_tokens`, as a multiple of that of a step of one."""
        n_beyond = n_tokens - len(_COST)
        cost = _COST[n_tokens - 1] if n_beyond <= 0 else _COST[-1] + n_beyond * _COST_BEYOND
        return 1.0 + self.steepness * (cost - 1.0)

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Books a step of requests that generate. One that was held up counts little."""
        cost = self.of(n_tokens)
        slope = (1.0 - 1.0 / cost) / self.steepness  # of the logarithm of its time, by the steepness
        error = log(max(seconds, 1e-9) / cost) - self._log_one_s
        self._n_seen += 1
        share = max(1.0 / self._n_seen, _MEMORY_OF_STEPS)
        self._usual_slope += share * (slope - self._usual_slope)
        if self._n_seen > _N_FIRST:
            error = min(max(error, -_MAX_ERROR), _MAX_ERROR)
            self._bend(error, slope - self._usual_slope)
        self._log_one_s += share * error

    def _bend(self, error: float, slope: float) -> None:
        """Moves the steepness by an error, and the time of one so that that of usual steps stays."""
        moved = self.steepness + _BEND * error * slope / (slope * slope + _DAMPING)
        moved = min(max(moved, _FLATTEST), _STEEPEST)
        self._log_one_s -= (moved - self.steepness) * self._usual_slope
        self.steepness = moved


class StepLoad:
    """What a step is about to do: the tokens it computes, and those it is expected to give."""

    def __init__(self, n_computed: int, n_given: int, costs: StepCosts) -> None:
        self._cost = costs.of
        self._n_computed, self._n_given, self._time_beside = n_computed, float(n_given), 0.0
        self._least: dict[float, float] = {}  # by price: see _least_chance

    def add(self, chances: Iterable[float], price: float = 0.0) -> int:
        """How many of a request's guesses are worth their time; the step then has them.

        `chances`: the probability that each comes true, given that those before it do. `price`: the time that
        it takes to make a guess, in steps of one token.
        """
        best, best_rate = 0, _GAIN * self._n_given / (self._cost(self._n_computed) + self._time_beside)
        best_given = given = self._n_given
        all_true = 1.0
        for depth, chance in enumerate(chances, 1):
            all_true *= chance
            if all_true < _HOPELESS or (depth == 1 and chance < self._least_chance(price)):
                break
            given += all_true
            rate = given / (self._cost(self._n_computed + depth) + self._time_beside + depth * price)
            if rate > best_rate:
                best, best_rate, best_given = depth, rate, given
        if best:
            self._least.clear()
        self._n_computed += best
        self._n_given = best_given
        self._time_beside += best * price
        return best

    def _least_chance(self, price: float) -> float:
        """What a first guess must have for any number to be worth its time, if those after it are sure.

        A step of many requests asks this once for all of them, and takes none further.
        """
        least = self._least.get(price)
        if least is None:
            rate = _GAIN * self._n_given / (self._cost(self._n_computed) + self._time_beside)
            times = ((n, self._cost(self._n_computed + n) + self._time_beside + n * price) for n in _DEPTHS)
            least = self._least[price] = min((rate * time - self._n_given) / n for n, time in times)
        return least


class Drafts(Protocol):
    """Where one request's guesses come from."""

    price: float  # of a guess: see StepLoad.add

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Takes in a request's tokens that came since the last time."""

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` guesses comes true, given that those before it do."""

    def guess(self, n: int) -> list[int]:
        """The next `n` tokens, or fewer."""


class Drafter(Protocol):
    """What makes the guesses of several requests at a time (draft_model.py)."""

    def compute(self, wanted: Sequence[tuple[Drafts, int]]) -> None:
        """Makes so many guesses for each request, those whose guesses are its own."""

    def release(self, drafts: Drafts) -> None:
        """Forgets what was read of a request that lost its turn, or ended."""

    def check_integrity(self, running: Sequence[Drafts]) -> None:
        """Asserts that pages are held by the requests that run."""


class LookupDrafts:
    """Where one request's text has been before, and the place that it follows now.

    Every token tells whether the place would have been right, guesses taken or not: so odds are known without
    trying. `given` is a text that the answer may resemble.
    """

    price = 0.0

    def __init__(self, given: Sequence[int] = ()) -> None:
        self._tokens: list[int] = [*given, _END] if given else []
        self._n_followed = 0  # tokens of the request
        self._after_pair: dict[int, int] = {}  # two tokens -> the place after them, where they came last
        self._after_four: dict[int, int] = {}
        self._place: int | None = 0 if given else None  # of the next guess
        self._n_true = 0  # tokens before it that were as guessed
        self._odds = Odds(_EXPECTED)

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Takes in a request's tokens that came since the last time."""
        new: list[int] = tokens[self._n_followed : n_tokens].tolist()
        if self._n_followed:
            for token in new:
                self._check(token)
                self._tokens.append(token)
                self._look_up()
        else:
            self._tokens += new
            self._index()
            self._look_up()
        self._n_followed = n_tokens

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` guesses comes true, given that those before it do."""
        if self._place is not None:
            for n_true in range(self._n_true, self._n_true + n):
                yield self._odds.chance(n_true)

    def guess(self, n: int) -> list[int]:
        """The next `n` tokens, or fewer: those after the place, over and over where it is near the end."""
        if self._place is None:
            return []
        guesses = self._tokens[self._place : self._place + n]
        if _END in guesses:
            return guesses[: guesses.index(_END)]
        period = len(self._tokens) - self._place
        while len(guesses) < n:
            guesses.append(guesses[-period])
        return guesses

    def _check(self, token: int) -> None:
        """Moves on by a token: where it was not the one guessed, it may be there in the place of that."""
        if self._place is None:
            return
        came_true = self._tokens[self._place] == token
        self._odds.learn(self._n_true, came_true)
        self._n_true = self._n_true + 1 if came_true else 0
        self._place = None if self._tokens[self._place] == _END else self._place + 1

    def _look_up(self) -> None:
        """Books where the last tokens lie, and goes to where they were before, if that is better."""
        tokens, place = self._tokens, len(self._tokens)
        if place < 2:
            return
        pair = tokens[-2] << 32 | tokens[-1]
        found, size = self._after_pair.get(pair), 2
        self._after_pair[pair] = place
        if place >= 4:
            four = ((tokens[-4] << 32 | tokens[-3]) * _FACTOR + pair) & _MASK
            found_four = self._after_four.get(four)
            self._after_four[four] = place
            if found_four is not None:
                found, size = found_four, 4
        if found is not None and (
            self._place is None or self._odds.chance(size) > self._odds.chance(self._n_true)
        ):
            self._place, self._n_true = found, size

    def _index(self) -> None:
        """Books all places but the last, which `_look_up` does."""
        tokens = np.array(self._tokens[:-1], np.uint64)
        pairs = tokens[:-1] << np.uint64(32) | tokens[1:]
        fours = pairs[:-2] * np.uint64(_FACTOR) + pairs[2:]
        self._after_pair.update(zip(pairs.tolist(), range(2, 2 + len(pairs)), strict=True))
        self._after_four.update(zip(fours.tolist(), range(4, 4 + len(fours)), strict=True))
