"""Draft tokens: candidates for the tokens to come, computed alongside the newest one and kept if accepted.

A draft changes no token: each token is drawn as ever, from logits that do not depend on how tokens are cut
into steps, and a draft that is another token is rejected with all after it. So only speed is at stake: how
many drafts a step computes follows from how often drafts of their kind were accepted in this answer, and from
what another row costs (`DraftBudget`).

`LookupDrafts` expects the sequence to continue as it did before (prompt lookup or n-gram decoding, A. Saxena
2023): it follows the position after an earlier occurrence of the last tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kukri.kernels.arrays import IntArray

_END = (1 << 32) - 1  # between a given text and the prompt: no token
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2^64 over the golden ratio: spreads pairs over keys
# acceptance of a looked-up draft after 0, 1, 2, 4, 8, 16 accepted ones, before an answer shows its own
_PRIOR = (0.2, 0.4, 0.4, 0.6, 0.8, 0.9)
_PRIOR_WEIGHT = 4.0  # drafts that the prior counts for
_DECAY = 0.98  # a draft's weight in the rate falls by this with each later draft of its kind
_PANEL_TOKENS = 8  # tokens that matrix kernels compute at a time: the rest of a panel costs little
# least chance of a draft in such a row, and what each decoding request adds
_MIN_CHANCE, _MIN_CHANCE_EACH = 0.2, 0.05
_INDEXED_AT_A_TIME = 2048  # tokens of a prompt
_SURE = 0.95  # the least chance of a draft that begins or extends another panel


class AcceptanceRate:
    """The share of drafts accepted in one answer, by the number of accepted drafts just before them."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: the share after 0, 1, 2, 4, 8, 16 accepted drafts, until an answer shows its own."""
        self._n_accepted = [share * _PRIOR_WEIGHT for share in prior]
        self._n = [_PRIOR_WEIGHT] * len(_PRIOR)

    def chance(self, n_before: int) -> float:
        """The probability that a draft is accepted after `n_before` accepted ones."""
        bucket = min(n_before.bit_length(), len(_PRIOR) - 1)
        return self._n_accepted[bucket] / self._n[bucket]

    def update(self, n_before: int, is_accepted: bool) -> None:
        """Counts a draft."""
        bucket = min(n_before.bit_length(), len(_PRIOR) - 1)
        self._n_accepted[bucket] = self._n_accepted[bucket] * _DECAY + is_accepted
        self._n[bucket] = self._n[bucket] * _DECAY + 1.0


class DraftBudget:
    """Decides how many drafts of each request a step computes.

    A row in a panel that is computed anyway costs a tenth of a step, and so does any row alongside a prompt;
    other rows cost twice that, in a step that serves many: these must be all but sure (docs/log).
    """

    def __init__(self, n_tokens: int, n_decoding: int, *, has_prompt: bool) -> None:
        """A step has `n_tokens` without drafts, `n_decoding` requests that decode, and a prompt or none."""
        self._min_chance = _MIN_CHANCE + _MIN_CHANCE_EACH * n_decoding
        self._n_cheap: float = float("inf") if has_prompt else max(_PANEL_TOKENS - n_tokens, 0)

    def take(self, chances: Iterable[float], relative_cost: float = 0.0) -> int:
        """Subtracts the number of drafts that a request may compute from the budget.

        `chances`: the probability that each is accepted, given that those before it are. `relative_cost`: the
        time that making a draft takes, in steps of one token.
        """
        n, chance_of_all = 0, 1.0
        for chance in chances:
            chance_of_all *= chance
            if chance_of_all < (self._min_chance if n < self._n_cheap else _SURE) + relative_cost:
                break
            n += 1
        self._n_cheap = max(self._n_cheap - n, 0)
        return n


class Drafts(Protocol):
    """The source of one request's draft tokens."""

    relative_cost: float  # cost of a draft: see DraftBudget.take

    def read_prompt(self, tokens: IntArray, n_tokens: int) -> None:
        """Reads the request's first `n_tokens` tokens, as far as they are new, while a prompt is computed."""

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Reads the request's tokens that came since the last call, and counts which drafts they accept."""

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` drafts is accepted, given that those before it are."""

    def propose(self, n: int) -> list[int]:
        """The next `n` draft tokens, or fewer."""

    def release(self) -> None:
        """Frees the draft model's state of the request, which was preempted or has ended."""


class LookupDrafts:
    """N-gram drafts of one request: the tokens that followed an earlier occurrence of its last ones.

    Every token tells whether the position followed would have been right, drafts computed or not: so the
    acceptance rate is known without trying. `given` are tokens that the answer may resemble.
    """

    relative_cost = 0.0

    def __init__(self, given: Sequence[int] = ()) -> None:
        self._tokens: list[int] = [*given, _END] if given else []
        self._n_read = 0  # tokens of the request
        self._n_indexed = 0  # how many of `_tokens`: a long prompt is indexed in pieces
        self._has_caught_up = False  # from then on each token is looked up
        self._after_pair: dict[int, int] = {}  # 2-gram -> the position after its last occurrence
        self._after_four: dict[int, int] = {}
        self._position: int | None = 0 if given else None  # where the next draft is
        self._n_accepted = 0  # tokens before it that were as drafted
        self._rate = AcceptanceRate(_PRIOR)

    def read_prompt(self, tokens: IntArray, n_tokens: int) -> None:
        """Indexes tokens of a prompt in the step that computes them, rather than all in one."""
        if not self._has_caught_up and n_tokens > self._n_read:
            self._tokens += tokens[self._n_read : n_tokens].tolist()
            self._n_read = n_tokens
            self._index()

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        """Reads the request's tokens that came since the last call, and counts which drafts they accept."""
        new: list[int] = tokens[self._n_read : n_tokens].tolist()
        self._n_read = n_tokens
        if self._has_caught_up:
            for token in new:
                self._check(token)
                self._tokens.append(token)
                self._look_up()
            return
        self._tokens += new
        self._index()
        if self._n_indexed == len(self._tokens) - 1:
            self._has_caught_up = True
            self._look_up()

    def chances(self, n: int) -> Iterator[float]:
        """The probability that each of the next `n` drafts is accepted, given that those before it are."""
        if self._has_caught_up and self._position is not None:
            for n_before in range(self._n_accepted, self._n_accepted + n):
                yield self._rate.chance(n_before)

    def propose(self, n: int) -> list[int]:
        """Copies up to `n` tokens from the position followed, repeating the copied span at the end."""
        if self._position is None:
            return []
        drafts = self._tokens[self._position : self._position + n]
        if _END in drafts:
            return drafts[: drafts.index(_END)]
        period = len(self._tokens) - self._position
        while len(drafts) < n:
            drafts.append(drafts[-period])
        return drafts

    def release(self) -> None:
        """Does nothing: no draft model is involved."""

    def _check(self, token: int) -> None:
        """Advances the position by one token; a mismatch counts as a substitution."""
        if self._position is None:
            return
        is_accepted = self._tokens[self._position] == token
        self._rate.update(self._n_accepted, is_accepted)
        self._n_accepted = self._n_accepted + 1 if is_accepted else 0
        self._position = None if self._tokens[self._position] == _END else self._position + 1

    def _look_up(self) -> None:
        """Indexes the latest 2- and 4-gram and jumps to its last occurrence if that is likelier."""
        tokens, position = self._tokens, len(self._tokens)
        if position < 2:
            return
        pair = tokens[-2] << 32 | tokens[-1]
        found, size = self._after_pair.get(pair), 2
        self._after_pair[pair] = position
        if position >= 4:
            four = ((tokens[-4] << 32 | tokens[-3]) * _FACTOR + pair) & _MASK
            found_four = self._after_four.get(four)
            self._after_four[four] = position
            if found_four is not None:
                found, size = found_four, 4
        if found is not None and (
            self._position is None or self._rate.chance(size) > self._rate.chance(self._n_accepted)
        ):
            self._position, self._n_accepted = found, size

    def _index(self) -> None:
        """Indexes the next positions, but for the last, which `_look_up` does; at most a millisecond's worth.

        There are no drafts until all are indexed.
        """
        stop = min(len(self._tokens) - 1, self._n_indexed + _INDEXED_AT_A_TIME)
        start = max(self._n_indexed - 3, 0)  # start of the first n-gram that ends there
        tokens = np.array(self._tokens[start:stop], np.uint64)
        pairs = tokens[:-1] << np.uint64(32) | tokens[1:]
        fours = pairs[:-2] * np.uint64(_FACTOR) + pairs[2:]
        self._after_pair.update(zip(pairs.tolist(), range(start + 2, start + 2 + len(pairs)), strict=True))
        self._after_four.update(zip(fours.tolist(), range(start + 4, start + 4 + len(fours)), strict=True))
        self._n_indexed = max(stop, 0)
