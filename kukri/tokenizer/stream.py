"""Text that grows token by token: in whole characters (`TextStream`), up to a stop string (`StopStrings`)."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import SupportsIndex

from kukri.errors import RequestError
from kukri.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Turns one request's token ids into text as they come.

    What `push` and `flush` return adds up to `tokenizer.decode` of the same ids, with the same `skip_special`
    and `continues`. Cost per token does not depend on how many came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are special tokens that are not skipped with the others."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset()
        self._pending = b""  # the beginning of a character
        self._drop_space = tokenizer.drops_leading_space and not continues

    @property
    def is_complete(self) -> bool:
        """False within a character, of which the last tokens had the first bytes."""
        return not self._pending

    def push(self, token_id: SupportsIndex) -> str:
        """The characters this token completes, often "" within an emoji.

        Raises RequestError for an id outside the vocabulary.
        """
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, n_used = utf_8_decode(data, "replace", False)
        self._pending = data[n_used:]
        return text

    def flush(self) -> str:
        """U+FFFD for a character that never became whole, else ""; call it when no more tokens come."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may be the beginning of a stop string.

    The stop string that is complete first wins. If several end at the same character, the longest wins, so
    the outcome does not depend on how the text is chopped. Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError.of("stop", "must be a list of strings that are not empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to emit, and the stop string that ended it, or None.

        Push no more after a stop string.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            self._held = ""
            return text[:at], stop
        n_safe = len(text) - n_partial(text, self._stops)
        self._held = text[n_safe:]
        return text[:n_safe], None

    def flush(self) -> str:
        """The text still held back; call it when no more text comes."""
        text, self._held = self._held, ""
        return text


def n_partial(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of the marks begins; 0 for none.

    Marks are not empty, and no complete mark is in `text`.
    """
    n = max(map(len, marks), default=1) - 1
    tail = text[-n:] if n else ""
    longest = 0
    for mark in marks:
        at = tail.find(mark[0])
        while at >= 0:
            if mark.startswith(tail[at:]):
                longest = max(longest, len(tail) - at)
                break
            at = tail.find(mark[0], at + 1)
    return longest
