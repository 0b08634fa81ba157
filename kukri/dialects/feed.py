"""`Feed`: a text that comes in pieces, read by generators that wait for more of it.

A reader is written as if the whole text were there. Wherever it needs characters that have not come yet it
yields, and continues when they are there. So its result does not depend on where a piece ends, and each
character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a reader: it yields where it needs more text

_SPACE = re.compile(r"\s*")


class EndOfText(Exception):
    """The text has ended while a reader needed more."""


class Marks:
    """Texts to look for. None of them is the beginning of another."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._whole, self._first = _patterns(self.texts)
        self._n_most = max(map(len, texts)) - 1

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """(where a mark begins, the mark), or (where one may begin that is not whole yet, None)."""
        if match := self._whole.search(text, start):
            return match.start(), match[0]
        for match in self._first.finditer(text, max(start, len(text) - self._n_most)):
            rest = text[match.start() :]
            if any(mark.startswith(rest) for mark in self.texts):
                return match.start(), None
        return len(text), None


@lru_cache(256)  # a parser looks for the same marks in each answer
def _patterns(texts: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds a whole mark, and the first character of a mark."""
    first = "".join(map(re.escape, {text[0] for text in texts}))
    return re.compile("|".join(map(re.escape, texts))), re.compile(f"[{first}]")


@lru_cache(256)
def _first_characters(marks: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark[0] for mark in marks)


class Feed:
    """The text not yet read. `is_last`: no more will come. `n_read` counts the characters taken so far."""

    def __init__(self, text: str = "", *, is_last: bool = False) -> None:
        self._text, self._at = text, 0
        self.is_last = is_last
        self._n_dropped = 0
        self._kept: list[str] | None = None

    @property
    def n_read(self) -> int:
        """Characters taken so far."""
        return self._n_dropped + self._at

    def add(self, text: str) -> None:
        """Appends a piece."""
        self._n_dropped += self._at
        self._text, self._at = self._text[self._at :] + text, 0

    def keep(self) -> None:
        """Keep the text that is taken from now on, for `kept`."""
        self._kept = []

    def kept(self) -> str:
        """Return the text taken since `keep`, which ends here."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def since(self, n_read: int) -> str:
        """Return what was taken after the first `n_read` characters, if that was kept."""
        kept = "".join(self._kept or ())
        return kept[len(kept) - (self.n_read - n_read) :]

    def take(self, n: int) -> str:
        """Takes the next `n` characters, or as many as have come."""
        taken = self._text[self._at : self._at + n]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def take_all(self) -> str:
        """Takes everything that has come."""
        return self.take(len(self._text) - self._at)

    def peek(self) -> Reading[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self.is_last:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, n: int) -> Reading[str]:
        """The next `n` characters; fewer at the end of the text."""
        while len(self._text) - self._at < n and not self.is_last:
            yield
        return self._text[self._at : self._at + n]

    def starts(self, marks: tuple[str, ...]) -> Reading[str]:
        """The first of the marks that comes next; "" for none. It is not taken."""
        if self._at < len(self._text) and self._text[self._at] not in _first_characters(marks):
            return ""  # nearly always
        for mark in marks:
            while mark.startswith(begun := self._text[self._at : self._at + len(mark)]):
                if begun == mark:
                    return mark
                if self.is_last:
                    break
                yield
        return ""

    def takes(self, marks: tuple[str, ...]) -> Reading[str]:
        """The first of the marks that comes next, which is taken; "" for none."""
        if mark := (yield from self.starts(marks)):
            self.take(len(mark))
        return mark

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes all characters that a pattern like [a-z]* matches."""
        pieces: list[str] = []
        yield from self.run_into(pattern, pieces.append)
        return "".join(pieces)

    def run_into(self, pattern: re.Pattern[str], write: Callable[[str], None]) -> Reading[None]:
        """Takes all characters that a pattern like [a-z]* matches, and writes them as they come."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "the pattern matches nothing too"
            if match.end() > self._at:
                write(self.take(match.end() - self._at))
            if self._at < len(self._text) or self.is_last:
                return
            yield

    def space(self) -> Reading[str]:
        """Takes white space."""
        if self._at < len(self._text) and not self._text[self._at].isspace():
            return ""
        return (yield from self.run(_SPACE))

    def until(self, marks: Marks, write: Callable[[str], None]) -> Reading[str]:
        """Takes text up to the first of the marks and writes it as it comes; the mark is not taken.

        Returns the mark, or "" if the text ends first.
        """
        mark = yield from self._up_to(marks, write)
        if not mark and (rest := self.take_all()):
            write(rest)
        return mark

    def through(
        self, marks: Marks, write: Callable[[str], None], leaving: Container[str] = ()
    ) -> Reading[None]:
        """Takes text through the first of the marks, and writes it as it comes, without the mark.

        A mark of `leaving` is not taken. Raises EndOfText if the text ends first; a possible beginning
        of a mark at the end is not written.
        """
        mark = yield from self._up_to(marks, write)
        if not mark:
            raise EndOfText
        if mark not in leaving:
            self.take(len(mark))

    def _up_to(self, marks: Marks, write: Callable[[str], None]) -> Reading[str]:
        while True:
            at, mark = marks.find(self._text, self._at)
            if at > self._at:
                write(self.take(at - self._at))
            if mark is not None or self.is_last:
                return mark or ""
            yield


def whole(reader: Callable[[Feed], Reading[T]], text: str) -> tuple[T, str]:
    """Read a complete text, and return (the reader's result, the rest of the text)."""
    feed = Feed(text, is_last=True)
    try:
        next(reading := reader(feed))
    except StopIteration as stop:
        value: T = stop.value
        return value, feed.take(len(text))
    reading.close()
    raise AssertionError("a reader waits for more of a text that is all there")
