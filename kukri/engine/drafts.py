"""Draft tokens: candidates for the tokens to come, computed alongside the newest one and kept if accepted.

A draft changes no token: each token is drawn as ever, from logits that do not depend on how tokens are cut
into steps, and a draft that is another token is rejected with all after it. So only speed is at stake: how
many drafts a step computes follows from how often drafts of their kind were accepted in this answer, and from
what more rows cost (`DraftBudget`). Drafts come from texts (lookup_drafts.py) or a model (draft_model.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import log, log1p
from typing import NamedTuple, Protocol

from kukri.kernels.arrays import IntArray

_PRIOR_WEIGHT = 4.0  # drafts that the prior counts for
_DECAY = 0.98  # a draft's weight in the rate falls by this with each later draft of its kind
# least chance of a draft alongside a prompt, and what each decoding request adds
_MIN_CHANCE, _MIN_CHANCE_EACH = 0.2, 0.05
# least chance of a draft, as a part of the least cost of a row, because it may come with likelier drafts
_LEAST_PART = 0.5
_LEAST_GAIN = 1.06  # speed of a step with drafts, against one without: chances are guesses


class AcceptanceRate:
    """The share of drafts accepted in one answer, by the number of accepted drafts just before them."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: the share after 0, 1, 2, 4, 8, 16 accepted drafts, until an answer shows its own."""
        self._n_accepted = [share * _PRIOR_WEIGHT for share in prior]
        self._n = [_PRIOR_WEIGHT] * len(prior)

    def chance(self, n_before: int) -> float:
        """The probability that a draft is accepted after `n_before` accepted ones."""
        bucket = min(n_before.bit_length(), len(self._n) - 1)
        return self._n_accepted[bucket] / self._n[bucket]

    def update(self, n_before: int, is_accepted: bool) -> None:
        """Counts a draft."""
        bucket = min(n_before.bit_length(), len(self._n) - 1)
        self._n_accepted[bucket] = self._n_accepted[bucket] * _DECAY + is_accepted
        self._n[bucket] = self._n[bucket] * _DECAY + 1.0


class _Draft(NamedTuple):
    """A draft on offer."""

    chance: float  # it and those before it are accepted
    gain: float  # its contribution to the logarithm of its request's tokens
    cost: float  # time to make it, in steps of one token
    request: int


class DraftBudget:
    """Shares the rows of a step among drafts of its requests.

    Drafts are worth their rows if they give the most speed, in tokens of a request for the step's time.
    Speeds are compared by the geometric mean over requests, because a longer step delays requests without
    drafts, but by the sum while others wait for a place, because an earlier end lets the next one in.
    Alongside a prompt, whose many rows cost as much each, drafts are worth their rows if they are likely.
    """

    def __init__(
        self,
        row_costs: tuple[float, ...],
        n_tokens: int,
        n_decoding: int,
        *,
        has_prompt: bool,
        others_wait: bool = False,
        room: int,
    ) -> None:
        """A step has `n_tokens` without drafts, `n_decoding` requests that decode, a prompt or none, and room
        for `room` drafts. `row_costs`: see RowCosts.of.
        """
        self._costs, self._room, self._others_wait = row_costs, room, others_wait
        self._n_tokens, self._n_decoding, self._has_prompt = n_tokens, n_decoding, has_prompt
        self._least = 0.0 if has_prompt else _LEAST_PART * _row_price(row_costs, n_tokens)
        self._n_requests = 0
        self._drafts: list[_Draft] = []

    def offer(self, chances: Iterable[float], relative_cost: float = 0.0) -> None:
        """Add a request's drafts, of which `share` returns how many are computed.

        `chances`: the probability that each is accepted, given that those before it are. `relative_cost`: the
        time that making a draft takes, in steps of one token.
        """
        drafts: list[_Draft] = []
        chance_of_all, n_tokens = 1.0, 1.0
        for chance in chances:
            chance_of_all *= chance
            if chance_of_all < self._least:
                break
            drafts.append(
                _Draft(chance_of_all, log1p(chance_of_all / n_tokens), relative_cost, self._n_requests)
            )
            n_tokens += chance_of_all
        self._drafts += drafts
        self._n_requests += 1

    def share(self) -> list[int]:
        """Return how many drafts each request that made an offer computes: those with the largest gains."""
        n_drafts = [0] * self._n_requests
        by_sum = self._others_wait or self._has_prompt
        # drafts of a request stay in order, because each gains at most as much as the one before
        self._drafts.sort(key=lambda draft: -(draft.chance if by_sum else draft.gain))
        for draft in self._drafts[: self._n_worthwhile()]:
            n_drafts[draft.request] += 1
        return n_drafts

    def _n_worthwhile(self) -> int:
        drafts = self._drafts[: self._room]
        if self._has_prompt:
            least = _MIN_CHANCE + _MIN_CHANCE_EACH * self._n_decoding
            return sum(draft.chance >= least + draft.cost for draft in drafts)
        n_best, best = 0, log(_LEAST_GAIN)
        plain, n_tokens, gain, made = _cost(self._costs, self._n_tokens), float(self._n_tokens), 0.0, 0.0
        for n, draft in enumerate(drafts, 1):
            n_tokens, gain, made = n_tokens + draft.chance, gain + draft.gain, made + draft.cost
            more = log(n_tokens / self._n_tokens) if self._others_wait else gain / self._n_tokens
            speed = more - log((_cost(self._costs, self._n_tokens + n) + made) / plain)
            if speed > best:
                n_best, best = n, speed
        return n_best


def _cost(costs: tuple[float, ...], n_rows: int) -> float:
    n = len(costs)
    return costs[n_rows - 1] if n_rows <= n else costs[-1] * n_rows / n


@lru_cache(maxsize=64)
def _row_price(costs: tuple[float, ...], n_tokens: int) -> float:
    """What a further row of a step costs at least, in tokens that the time is worth."""
    before = _cost(costs, n_tokens)
    return n_tokens / before * min((_cost(costs, n_tokens + n) - before) / n for n in range(1, len(costs)))


class Drafts(Protocol):
    """The source of one request's draft tokens."""

    @property
    def relative_cost(self) -> float:
        """The cost of a draft: see DraftBudget.offer."""

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Reads the request's tokens that came since the last call, and counts which drafts they accept."""

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` drafts is accepted, given that those before it are."""

    def propose(self, n: int) -> list[int]:
        """The next `n` draft tokens, or fewer."""

    def learn(self, answer: IntArray) -> None:
        """Takes in the answer, which is complete, for drafts of later requests."""
        return

    def release(self) -> None:
        """Frees the draft model's state of the request, which was preempted or has ended."""
        return
