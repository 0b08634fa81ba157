"""What Whisper may write next (Radford et al. 2022): timestamps in order, no suppressed tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass, field
from kukri.kernels.arrays import FloatArray, IntArray

_NEVER = np.float32(-np.inf)


@dataclass
class TextRules:
    """A logits processor for one answer, whose prompt has `n_prompt` tokens.

    Tokens of `suppressed` never come, and tokens of `not_first` do not come first. From `first_time` on they
    are timestamps, a fiftieth of a second from one to the next; the token before it says that there are none.
    With `writes_times` the first token is one, up to `latest_start`.
    """

    n_prompt: int
    suppressed: Collection[int]
    not_first: Collection[int]
    end_id: int
    first_time: int
    latest_start: int | None
    writes_times: bool
    _logprobs: list[float] = field(default_factory=list)
    _allowed: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # logarithms [V]

    def __call__(self, token_ids: IntArray, logits: FloatArray) -> FloatArray:
        """The logits [V] after the prompt and the answer so far, -inf for what may not come."""
        written = token_ids[self.n_prompt :].tolist()
        self._note(written)
        if not written:
            logits[list(self.not_first)] = _NEVER
        logits[list(self.suppressed)] = _NEVER
        if self.writes_times:
            self._limit_times(written, logits)
        top = logits.max()
        self._allowed = logits - (top + np.log(np.exp(logits - top).sum()))
        return logits

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability (natural) of each token of the finished answer, among allowed tokens."""
        self._note(token_ids)
        return self._logprobs

    def _note(self, written: Sequence[int]) -> None:
        """Note how likely the last token was, which was chosen after the last call."""
        if written:
            self._logprobs[len(written) - 1 :] = [float(self._allowed[written[-1]])]

    def _limit_times(self, written: list[int], logits: FloatArray) -> None:
        first = self.first_time
        texts, times = logits[:first], logits[first:]
        texts[-1] = _NEVER
        is_time = [token >= first for token in written]
        ends_by_time = is_time[-1:] == [True]
        if ends_by_time and len(written) > 1 and not is_time[-2]:
            logits[: self.end_id] = _NEVER  # a segment has ended: the next begins, or the answer ends
        elif ends_by_time:
            times[:] = _NEVER
        if any(is_time):
            last = [token for token in written if token >= first][-1] - first
            is_open = ends_by_time and len(written) > 1 and not is_time[-2]
            times[: last if is_open else last + 1] = _NEVER
        if not written:
            texts[:] = _NEVER
            if self.latest_start is not None:
                times[self.latest_start + 1 :] = _NEVER
        top = logits.max()
        if top > _NEVER and np.exp(times - top).sum() > np.exp(texts.max() - top):
            texts[:] = _NEVER  # all timestamps together are likelier than any text


class FirstLook:
    """A logits processor for the one token after the beginning: the language, of `languages`.

    Attribute: no_speech, the probability of the token `no_speech_id`, once it was called.
    """

    def __init__(self, languages: Collection[int], no_speech_id: int | None) -> None:
        self._languages, self._no_speech_id = list(languages), no_speech_id
        self.no_speech = 0.0

    def __call__(self, token_ids: Any, logits: FloatArray) -> FloatArray:
        """The logits [V], -inf for all but the languages, if there are any."""
        if self._no_speech_id is not None:
            shares = np.exp(logits - logits.max())
            self.no_speech = float(shares[self._no_speech_id] / shares.sum())
        if not self._languages:
            return logits
        kept = np.full_like(logits, _NEVER)
        kept[self._languages] = logits[self._languages]
        return kept
