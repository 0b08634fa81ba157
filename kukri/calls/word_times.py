"""When each word of a window was said, by the attention of its text to its sound.

The algorithm is openai-whisper's: some heads attend to the moment at which a token is said. Their patterns
are normalized over tokens, smoothed over time and averaged. The cheapest monotonic path through the result
(dynamic time warping) gives each token its time.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray
from kukri.kernels.taps import tap_name

_SMOOTHED = 7  # frames of the median
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_BEFORE, _AFTER = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the next or last word


@dataclass(frozen=True)
class Word:
    """A word with its space and punctuation, from `start_s` to `end_s`, in seconds of the sound."""

    text: str
    start_s: float
    end_s: float


class AlignmentListener:
    """The listener of a request of a sound and its text, which keeps queries and keys of some heads.

    `heads` are pairs of a layer and a head. The first `n_sound` of `n_places` belong to the sound.
    """

    edits = False

    def __init__(self, heads: Sequence[tuple[int, int]], d_head: int, n_sound: int, n_places: int) -> None:
        self._heads, self._d_head, self._n_sound, self._n_places = heads, d_head, n_sound, n_places
        self.names = frozenset(_tap(kind, layer) for kind in "qk" for layer, _ in heads)
        self._rows: dict[str, FloatArray] = {}  # [places, width]
        self._start = 0

    def begin(self, start: int, n_tokens: int) -> None:
        """See SequenceListener."""
        self._start = start

    def __call__(self, name: str, x: FloatArray) -> None:
        """Keep rows [T, width] of a tap, which are a piece of the prompt's."""
        rows = self._rows.setdefault(name, np.zeros((self._n_places, x.shape[1]), np.float32))
        rows[self._start : self._start + len(x)] = x

    def token_frames(self, n_before: int, n_frames: int) -> list[int]:
        """Return the frame, a fiftieth of a second, at which each token begins, and the end too.

        The first `n_before` tokens of the text, and its last, are no words. `n_frames` are sound.
        """
        patterns = np.stack([self._pattern(layer, head, n_frames) for layer, head in self._heads])
        deviation = np.maximum(patterns.std(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        patterns = smoothed((patterns - patterns.mean(axis=1, keepdims=True)) / deviation)
        return cheapest_path(-patterns.mean(axis=0)[n_before:-1])

    def _pattern(self, layer: int, head: int, n_frames: int) -> FloatArray:
        """How a head attends from each token to each frame, float32 [tokens, frames]."""
        own = slice(head * self._d_head, (head + 1) * self._d_head)
        queries = self._rows[_tap("q", layer)][self._n_sound :, own]
        keys = self._rows[_tap("k", layer)][:n_frames, own]
        scores = queries @ keys.T / np.sqrt(np.float32(self._d_head))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: FloatArray = weights / weights.sum(axis=1, keepdims=True)
        return found


def _tap(kind: str, layer: int) -> str:
    return tap_name(f"cross_attn.hook_{kind}", layer)


def smoothed(patterns: FloatArray) -> FloatArray:
    """The median of each frame and its neighbours, of patterns [..., frames]. Ends are mirrored."""
    side = _SMOOTHED // 2
    if patterns.shape[-1] <= side:
        return patterns
    padded = np.pad(patterns, [(0, 0)] * (patterns.ndim - 1) + [(side, side)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SMOOTHED, axis=-1)
    return np.sort(windows, axis=-1)[..., side]


def cheapest_path(prices: FloatArray) -> list[int]:
    """The first column of each row on the cheapest path through prices [N, M], by steps on, down, or both."""
    n, m = prices.shape
    costs = np.full((n + m + 1, n + 1), np.inf, np.float32)  # at [row + column, row]
    steps = np.zeros(costs.shape, np.int8)  # 0: on and down, 1: down, 2: on
    costs[0, 0] = 0
    for both in range(2, n + m + 1):
        row = np.arange(max(1, both - m), min(n, both - 1) + 1)
        across, down, on = costs[both - 2, row - 1], costs[both - 1, row - 1], costs[both - 1, row]
        step = np.where((across < down) & (across < on), 0, np.where((down < across) & (down < on), 1, 2))
        costs[both, row] = prices[row - 1, both - row - 1] + np.choose(step, (across, down, on))
        steps[both, row] = step
    found = [0] * n
    row, column = n, m
    while row and column:
        found[row - 1] = column - 1
        taken = int(steps[row + column, row])
        row, column = row - (taken != 2), column - (taken != 1)
    return found


def split_words(
    token_ids: Sequence[int], text_of: Callable[[Sequence[int]], str], language: str
) -> list[tuple[str, int]]:
    """The words of tokens, each with how many tokens it has: cut at spaces, if the language has them."""
    whole, n_read = text_of(token_ids), 0
    words: list[tuple[str, int]] = []
    begin = 0
    for end in range(1, len(token_ids) + 1):
        text = text_of(token_ids[begin:end])
        cut = text.find("\ufffd")
        if cut >= 0 and whole[n_read + cut : n_read + cut + 1] != "\ufffd" and end < len(token_ids):
            continue  # the character has further tokens
        n_read += len(text)
        is_new = text.startswith(" ") or text.strip() in string.punctuation or language in _WITHOUT_SPACES
        last, n_tokens = ("", 0) if is_new or not words else words.pop()
        words.append((last + text, n_tokens + end - begin))
        begin = end
    return words


def timed_words(words: Sequence[tuple[str, int]], times_s: Sequence[float]) -> list[Word]:
    """Words with their times, of words with numbers of tokens, and the times of all tokens and of the end.

    Punctuation belongs to the word before or after it, whose time stays.
    """
    timed: list[Word] = []
    end = 0
    for text, n_tokens in words:
        begin, end = end, end + n_tokens
        timed.append(Word(text, times_s[begin], times_s[end]))
    joined: list[Word] = []
    for word in reversed(timed):
        if joined and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            after = joined.pop()
            word = replace(after, text=word.text + after.text)
        joined.append(word)
    found: list[Word] = []
    for word in reversed(joined):
        if found and not found[-1].text.endswith(" ") and word.text in _AFTER:
            before = found.pop()
            word = replace(before, text=before.text + word.text)
        found.append(word)
    return found
