"""Drafts by look-up: an answer is expected to continue as a text did after the longest match of its end.

That is the suffix decoding of Oliaro et al. 2024 (SuffixDecoding) for a chain of drafts, with an index of
2- and 4-grams in the place of a suffix tree: a match is looked up only where all those followed so far have
failed, and the longest one is found by comparing a few places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kukri.engine.drafts import AcceptanceRate, Drafts
from kukri.kernels.arrays import IntArray

_END = (1 << 31) - 1  # between two texts: no token
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2^64 over the golden ratio: spreads n-grams over keys
_POSITION = (1 << 24) - 1  # the bits of a position; the other bits are the key's
_SIZES = (2, 4)  # tokens of the n-grams that are looked up
_MOST_PLACES = 4  # places that are followed at a time
_MOST_EARLIER, _MOST_CLIENTS = 4096, 64  # tokens of a client's answers that are kept, and clients
_LONGEST = 16  # tokens of a match that are compared, because rates are alike for longer matches
# chance of a draft after 0, 1, 2, 4, 8, 16 matching tokens, before an answer shows its own: for places that
# disagree about it, for one place, and for several that agree; at most rates in code and prose of two models
_PRIORS = (
    (0.1, 0.3, 0.3, 0.35, 0.5, 0.7),
    (0.1, 0.4, 0.4, 0.6, 0.8, 0.95),
    (0.1, 0.5, 0.6, 0.8, 0.9, 0.97),
)


class EarlierAnswers:
    """The last answers to each client, which later ones may repeat: some thousand tokens of some clients.

    A client's answers are never drafted for another, because the time of a draft would reveal its text. One
    thread adds, and any may read.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[IntArray, ...]] = {}  # by client; the longest silent first

    def add(self, client: str, answer: IntArray) -> None:
        """Keep an answer, or the end of a long answer."""
        if len(answer) < _LONGEST:
            return
        newest = answer[-_MOST_EARLIER:].copy()
        kept = [other for other in self._answers.pop(client, ()) if not np.array_equal(other, newest)]
        kept.append(newest)
        while sum(map(len, kept)) > _MOST_EARLIER:
            kept.pop(0)
        self._answers[client] = tuple(kept)
        if len(self._answers) > _MOST_CLIENTS:
            del self._answers[next(iter(self._answers))]

    def of(self, client: str) -> tuple[IntArray, ...]:
        """The last answers to a client, the newest last."""
        return self._answers.get(client, ())

    def forget(self) -> None:
        """Forget the answers to all clients."""
        self._answers = {}


class TextIndex:
    """Texts that an answer may repeat, the prompt last, and where their 2- and 4-grams are.

    It takes 28 to 36 bytes a token, and is made by the thread that makes a request, so that no step waits for
    it. The answers to one prompt share it.
    """

    def __init__(self, texts: Sequence[Sequence[int] | IntArray]) -> None:
        self.n_prompt = len(texts[-1])
        parts = [np.append(np.asarray(text, np.int32), np.int32(_END)) for text in texts]
        self.tokens: IntArray = np.concatenate(parts)[:-1]
        tokens = self.tokens.astype(np.uint64)
        pairs = _pair_key(tokens[:-1], tokens[1:])
        self._places = {2: _sorted(pairs), 4: _sorted(_four_key(pairs[:-2], pairs[2:]))}
        # most pairs of an answer are in no text, and a byte tells so of most of these
        self._shift = 64 - len(tokens).bit_length() - 3
        known = np.zeros(1 << 64 - self._shift, np.uint8)
        known[pairs >> self._shift] = 1
        self._known = known.tobytes()

    def may_have(self, pair: int) -> bool:
        """False if a pair of tokens, by its key, is nowhere in the texts."""
        return self._known[pair >> self._shift] > 0

    def places(self, size: int, key: int) -> list[int]:
        """The positions after the last occurrences of an n-gram, the newest last; a few may be another's."""
        table = self._places[size]
        stop = int(table.searchsorted(np.uint64(key | _POSITION), side="right"))
        found: list[int] = table[max(stop - _MOST_PLACES, 0) : stop].tolist()
        return [(entry & _POSITION) + size for entry in found if entry | _POSITION == key | _POSITION]


class LookupDrafts(Drafts):
    """The drafts of one answer.

    Up to 4 places whose tokens match the last ones equally long are followed for as long as they are right,
    and vote for each draft. After a mismatch without another match the newest counts as one with a token
    replaced. Every token shows whether a draft would have been right, even if none was computed, so the
    acceptance rate is known without trying.
    """

    relative_cost = 0.0

    def __init__(
        self,
        index: TextIndex,
        first: int | None = None,
        learn: Callable[[IntArray], None] = lambda answer: None,
    ) -> None:
        """`first` is the position in the texts that the answer is expected to begin with, if any. `learn` is
        called with the answer once it is complete.
        """
        self._index, self._learn = index, learn
        self._first = max(len(index.tokens) - _LONGEST, 0)  # the position of the first of `_tail`
        self._tail: list[int] = index.tokens[self._first :].tolist()  # the end of the prompt, and the answer
        self._n_read = index.n_prompt  # tokens of the request
        self._pairs: tuple[int, ...] = tuple(map(_pair_key, self._tail[-3:-1], self._tail[-2:]))  # last keys
        self._newest: dict[int, int] = {}  # n-gram of the answer -> the position after its last occurrence
        self._places: list[int] = []  # where the next draft is, the newest last
        self._votes: list[int] = []  # the tokens there
        self._n_matched = 0  # tokens before each that match
        if first is not None:
            self._go_to([first])
        self._rates = [AcceptanceRate(prior) for prior in _PRIORS]

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        for token in tokens[self._n_read : n_tokens].tolist():
            self._take(token)
        self._n_read = max(self._n_read, n_tokens)

    def chances(self, n: int) -> Iterator[float]:
        for n_before, (_, kind) in enumerate(self._drafts(n), self._n_matched):
            yield self._rates[kind].chance(n_before)

    def propose(self, n: int) -> list[int]:
        """Return the next `n` drafts, or fewer: the token at most places. At a text's end its span from a
        place is repeated.
        """
        return [draft for draft, _ in self._drafts(n)]

    def learn(self, answer: IntArray) -> None:
        self._learn(answer)

    def _drafts(self, n: int) -> Iterator[tuple[int, int]]:
        """Each of the next drafts, and which of `_PRIORS` it belongs to."""
        if not self._votes or n < 1:
            return
        draft, kind = _elected(self._votes)
        yield draft, kind
        agreeing = [place for place, vote in zip(self._places, self._votes) if vote == draft]
        ways = [self._after(place, n) for place in agreeing]
        for i in range(1, n):
            ways = [way for way in ways if len(way) > i]
            if not ways:
                return
            draft, kind = _elected([way[i] for way in ways])
            yield draft, kind
            ways = [way for way in ways if way[i] == draft]

    def _take(self, token: int) -> None:
        """Reads a token: follows the places that were right, or looks for others."""
        if self._votes:
            draft, kind = _elected(self._votes)
            self._rates[kind].update(self._n_matched, draft == token)
        places = [place + 1 for place, vote in zip(self._places, self._votes) if vote == token]
        replaced = [place + 1 for place in self._places[-1:]]
        self._tail.append(token)
        keys = self._keys()
        if places:
            self._n_matched += 1
        else:
            places, self._n_matched = self._look_up(keys)
        self._go_to(places or replaced)
        for key in keys:
            self._newest[key] = self._first + len(self._tail)

    def _go_to(self, places: list[int]) -> None:
        """Follows some places, but for those at the end of a text."""
        votes = [self._token(place) for place in places]
        if _END in votes:
            places = [place for place, vote in zip(places, votes) if vote != _END]
            votes = [vote for vote in votes if vote != _END]
        self._places, self._votes = places, votes

    def _keys(self) -> list[int]:
        """The keys of the last 2- and 4-gram, as far as there are any."""
        if len(self._tail) < 2:
            return []
        pair = _pair_key(self._tail[-2], self._tail[-1])
        self._pairs = (*self._pairs[-2:], pair)
        return [pair] if len(self._tail) < 4 else [pair, _four_key(self._pairs[0], pair)]

    def _look_up(self, keys: list[int]) -> tuple[list[int], int]:
        """The places after the longest match of the last tokens, and its length."""
        found: list[int] = []
        if keys and (keys[0] in self._newest or self._index.may_have(keys[0])):
            for size, key in zip(_SIZES, keys):
                places = self._index.places(size, key)
                if key in self._newest:
                    places.append(self._newest[key])
                if not places:
                    break
                found = places
        if not found:
            return [], 0
        matched = [self._n_equal(place) for place in found]
        longest = max(matched)
        return [place for place, n in zip(found, matched) if n == longest][-_MOST_PLACES:], longest

    def _n_equal(self, place: int) -> int:
        """Return how many tokens before a place are equal to the last tokens."""
        n = 0
        for one, other in zip(reversed(self._tokens(max(place - _LONGEST, 0), place)), reversed(self._tail)):
            if one != other:
                break
            n += 1
        return n

    def _token(self, place: int) -> int:
        """The token at a position of the texts or the answer."""
        if place >= self._first:
            return self._tail[place - self._first]
        return int(self._index.tokens[place])

    def _after(self, place: int, n: int) -> list[int]:
        """The `n` tokens that would follow if all continued as at a place; fewer at the end of a text."""
        found = self._tokens(place, place + n)
        if _END in found:
            return found[: found.index(_END)]
        period = self._first + len(self._tail) - place
        while len(found) < n:
            found.append(found[-period])
        return found

    def _tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` - 1 of the texts and the answer, as far as there are any."""
        if start >= self._first:
            return self._tail[start - self._first : stop - self._first]
        found: list[int] = self._index.tokens[start:stop].tolist()
        missing = stop - len(self._index.tokens)
        return found + self._tail[_LONGEST : _LONGEST + missing] if missing > 0 else found


def _elected(tokens: list[int]) -> tuple[int, int]:
    """The most frequent token, and which of `_PRIORS` it belongs to."""
    draft = tokens[-1]
    if len(tokens) == 1:
        return draft, 1
    if tokens.count(draft) == len(tokens):
        return draft, 2
    return max(reversed(tokens), key=tokens.count), 0  # the newest of equally frequent ones


def _pair_key(first: Any, second: Any) -> Any:
    """Return the key of two tokens, or of each pair in two arrays of tokens, uint64."""
    return (first << 32 | second) * _FACTOR & _MASK


def _four_key(before: Any, last: Any) -> Any:
    """Return the key of four tokens by the keys of the first and the last two; or of such arrays."""
    return (before ^ last >> 32) * _FACTOR & _MASK


def _sorted(keys: IntArray) -> IntArray:
    """The first bits of each key and its position, in order."""
    found: IntArray = keys & (_MASK - _POSITION) | np.arange(len(keys), dtype=np.uint64)
    found.sort()
    return found
