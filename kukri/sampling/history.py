"""Token history of a request, for its next token: penalties, DRY, banned phrases, the reasoning budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import IntArray
from kukri.sampling.params import ReasoningLimit, SamplingParams, TokenSet

Phrase = tuple[int, ...]

_MOST_WORK = 16  # comparisons for each token of a prompt, before all matches are found by one scan
_ROUND = 64  # comparisons that take the time of NumPy's calls for one more length
_LOG_OF_LARGEST_FLOAT = 88.7228391  # as llama.cpp clamps DRY's powers


class Tokens:
    """The token ids of a prompt and of its answer so far."""

    def __init__(self, prompt_ids: npt.ArrayLike) -> None:
        prompt = np.asarray(prompt_ids, np.int32)
        self.n = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(256, np.int32)])

    @property
    def ids(self) -> IntArray:
        """All of them, read-only."""
        view = self._ids[: self.n]
        view.flags.writeable = False
        return view

    def add(self, token_id: int) -> None:
        """Adds a generated token."""
        if self.n == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(self.n, np.int32)])
        self._ids[self.n] = token_id
        self.n += 1

    def end_with(self, phrase: Phrase, n: int) -> bool:
        """True if the first `n` tokens end with a phrase."""
        return len(phrase) <= n and self._ids[n - len(phrase) : n].tolist() == list(phrase)


class BadPhrases:
    """Banned sequences of two tokens or more."""

    def __init__(self, phrases: Sequence[Phrase]) -> None:
        self._by_last_but_one: dict[int, list[Phrase]] = {}
        for phrase in phrases:
            self._by_last_but_one.setdefault(phrase[-2], []).append(phrase)

    def next_ids(self, tokens: Tokens) -> list[int]:
        """The tokens that would complete a phrase."""
        if not tokens.n:
            return []
        phrases = self._by_last_but_one.get(int(tokens.ids[-1]), ())
        return [phrase[-1] for phrase in phrases if tokens.end_with(phrase[:-1], tokens.n)]


class ReasoningTokens:
    """The tokens that a request has spent on reasoning."""

    def __init__(self, limit: ReasoningLimit) -> None:
        self.limit = limit
        self._is_open, self._n_tokens = limit.is_open, 0

    @property
    def is_over(self) -> bool:
        """True if the budget is spent and the reasoning is still open."""
        return self._is_open and self._n_tokens >= self.limit.n_tokens

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        if self._is_open:
            self._n_tokens += 1
            self._is_open = token_id != self.limit.close_id
        else:
            self._is_open = token_id == self.limit.open_id


class SeenTokens:
    """The distinct tokens that penalties look back on: how often each came, and how often generated.

    The prompt counts only for the repetition penalty.
    """

    def __init__(self, params: SamplingParams, prompt_ids: npt.ArrayLike) -> None:
        self._limit = params.repeat_last_n
        prompt = (
            np.asarray(prompt_ids, np.int32) if params.repetition_penalty != 1.0 else np.zeros(0, np.int32)
        )
        if self._limit >= 0:
            prompt = prompt[max(len(prompt) - self._limit, 0) :]
        ids, counts = np.unique(prompt, return_counts=True)
        self._place = {token_id: i for i, token_id in enumerate(ids.tolist())}
        room = np.zeros(64, np.int32)
        self._ids = np.concatenate([ids, room])
        self._counts = np.concatenate([counts.astype(np.int32), room])
        self._generated = np.zeros(len(self._ids), np.int32)
        # tokens within the limit, in order; a prompt's as -1 - id
        self._recent = deque((-1 - prompt).tolist()) if self._limit >= 0 else None

    def add(self, token_id: int) -> None:
        """Counts a generated token, and drops the one that left the window."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            room = np.zeros(place, np.int32)
            self._ids, self._counts, self._generated = (
                np.concatenate([a, room]) for a in (self._ids, self._counts, self._generated)
            )
        self._ids[place] = token_id
        self._counts[place] += 1
        self._generated[place] += 1
        if self._recent is not None:
            self._recent.append(token_id)
            if len(self._recent) > self._limit:
                self._forget(self._recent.popleft())

    def _forget(self, entry: int) -> None:
        if entry < 0:
            self._counts[self._place[-1 - entry]] -= 1
        else:
            self._counts[self._place[entry]] -= 1
            self._generated[self._place[entry]] -= 1

    def table(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, how often each was seen, and how often generated: int32 [n] each, views."""
        n = len(self._place)
        return self._ids[:n], self._counts[:n], self._generated[:n]


class DryRepetitions:
    """Earlier occurrences of the last tokens, and the penalty on continuing them again (DRY, by p-e-w).

    As llama.cpp has it: a token that would prolong a repetition of `length` tokens, `dry_allowed_length` or
    more, loses dry_multiplier * dry_base ^ (length - dry_allowed_length). A repetition does not reach back
    over a sequence breaker, and a token that is one by itself loses nothing.
    """

    def __init__(self, params: SamplingParams, tokens: Tokens, breakers: Sequence[Phrase | TokenSet]) -> None:
        self._params, self._tokens = params, tokens
        singles = {i for one in breakers if isinstance(one, TokenSet) or len(one) == 1 for i in one}
        self._is_breaker = np.zeros(max(singles, default=-1) + 1, bool)
        self._is_breaker[list(singles)] = True
        self._long_breakers: dict[int, list[Phrase]] = {}  # by their last token
        for one in breakers:
            if not isinstance(one, TokenSet) and len(one) > 1:
                self._long_breakers.setdefault(one[-1], []).append(one)
        exponent = _LOG_OF_LARGEST_FLOAT / math.log(params.dry_base) if params.dry_base > 1.000001 else 1000.0
        self._longest = params.dry_allowed_length + int(exponent)  # beyond it nothing grows
        self._start = self._last_break()
        # [j + 1]: how many tokens up to place j equal the last ones
        self._lengths = np.zeros(tokens.n + 256, np.int32)
        most = min(tokens.n - self._start, self._longest)
        self._lengths[1 : tokens.n] = _match_lengths(tokens.ids, most)[:-1]
        self._places = np.flatnonzero(self._lengths)  # j + 1, where those are not 0

    def update(self) -> None:
        """Extends the matches by the last token."""
        n = self._tokens.n
        if self._breaks_at(n):
            self._start = n
        self._extend(n)

    def table(self) -> tuple[npt.NDArray[np.float64], IntArray]:
        """DRY's penalties on logits, float64 [n], and their tokens, int32 [n]."""
        found, lengths = self._continuations()
        by_id = np.zeros(int(found.max(initial=-1)) + 1, np.int32)
        np.maximum.at(by_id, found, lengths)
        ids = np.flatnonzero(by_id).astype(np.int32)
        longest = by_id[ids].astype(np.int64)
        is_free = ~self._are_breakers(ids)
        excess = np.minimum(longest[is_free], self._longest) - self._params.dry_allowed_length
        losses = self._params.dry_multiplier * self._params.dry_base ** excess.astype(np.float64)
        return losses, ids[is_free]

    def _continuations(self) -> tuple[IntArray, IntArray]:
        """The tokens that followed earlier copies of the last tokens, and the lengths of these copies."""
        n, reach = self._tokens.n, self._params.dry_penalty_last_n
        first = max(n - reach, 0) if reach >= 0 else 0
        places = self._places[np.searchsorted(self._places, first + 1) :]
        lengths = np.minimum(
            self._lengths[places], np.minimum(places - first, n - self._start).astype(np.int32)
        )
        is_long = lengths >= self._params.dry_allowed_length
        return self._tokens.ids[places[is_long]], lengths[is_long]

    def _extend(self, n: int) -> None:
        """Brings the lengths up to the n-th token."""
        ids = self._tokens.ids
        if n >= len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(len(self._lengths), np.int32)])
        places = np.flatnonzero(ids[: n - 1] == ids[n - 1])
        lengths = self._lengths[places] + 1
        self._lengths[self._places] = 0
        self._places = places + 1
        self._lengths[self._places] = lengths

    def _are_breakers(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """For each token, true if it is a breaker by itself."""
        are = ids < len(self._is_breaker)
        are[are] = self._is_breaker[ids[are]]
        return are

    def _breaks_at(self, n: int) -> bool:
        """True if the first `n` tokens end with a sequence breaker."""
        last = int(self._tokens.ids[n - 1])
        if last < len(self._is_breaker) and self._is_breaker[last]:
            return True
        return any(self._tokens.end_with(phrase, n) for phrase in self._long_breakers.get(last, ()))

    def _last_break(self) -> int:
        """The number of tokens up to the end of the last breaker; 0 without one."""
        ids = self._tokens.ids
        after = int(np.flatnonzero(self._are_breakers(ids)).max(initial=-1)) + 1
        # as text, which is searched in linear time whatever it holds; backwards, for the last place first
        backwards = _as_text(ids[::-1])
        phrases = (phrase for some in self._long_breakers.values() for phrase in some)
        found = [at for phrase in phrases if (at := backwards.find(_as_text(phrase[::-1]))) >= 0]
        return max(after, len(ids) - min(found, default=len(ids)))


def _match_lengths(ids: IntArray, most: int) -> IntArray:
    """For each place, how many tokens up to it equal the last ones: at most `most`, int32 [n].

    Takes time linear in n: in a text few places still match, and if they are many a scan finds all lengths.
    """
    n, n_matched, work = len(ids), 0, 0
    lengths = np.zeros(n, np.int32)
    lengths[-1:] = most  # the last place matches itself, which takes no search
    places = np.flatnonzero(ids[:-1] == ids[-1]) if n else lengths
    while len(places) and n_matched < most:
        lengths[places] += 1
        n_matched, work = n_matched + 1, work + _ROUND + len(places)
        if work > _MOST_WORK * n:
            return np.minimum(_prefix_lengths(ids[::-1].tolist())[::-1], most)
        places = places[places >= n_matched]
        places = places[ids[places - n_matched] == ids[n - 1 - n_matched]]
    return lengths


def _prefix_lengths(ids: list[int]) -> IntArray:
    """For each place, how many tokens from it on equal the first ones: the Z algorithm. int32 [n]."""
    n, left, right = len(ids), 0, 0  # the match that reaches furthest
    lengths = [n] * n
    for i in range(1, n):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < n and ids[length] == ids[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.array(lengths, np.int32)


def _as_text(ids: npt.ArrayLike) -> str:
    """A character for each token id, which is below 2^20."""
    return np.asarray(ids, "<u4").tobytes().decode("utf-32-le", "surrogatepass")
