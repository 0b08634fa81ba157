"""`ThoughtParser`: splits the reasoning that a model writes between marks off its answer as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kukri.dataclass import dataclass
from kukri.dialects.feed import Feed, Marks, Reading

_WHITE = " \t\r\n"


@dataclass(frozen=True)
class Thoughts:
    """How a family marks its reasoning: (opener, closer), and marks around the answer after it.

    `recurs`: the marks are control tokens, which open and close reasoning anywhere, and not only before the
    answer. `also` are further openers; `prompts` are ends of a prompt, besides the opener, that have begun
    the reasoning.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    answer: tuple[str, str] = ("", "")
    recurs: bool = False
    also: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()

    @property
    def openers(self) -> tuple[str, ...]:
        """Every text that begins the reasoning, longer ones first."""
        return tuple(sorted({self.opener, *self.also}, key=len, reverse=True))

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens and have to be seen."""
        return (self.token, *self.openers, self.closer, *filter(None, self.answer))

    @property
    def token(self) -> str:
        """The opener, or the part of it that is a token."""
        return self.opener[: self.opener.find(">") + 1] if self.opener.startswith("<") else self.opener

    def has_begun(self, prompt: str) -> bool:
        """True if a prompt ends within the reasoning."""
        return prompt.rstrip().endswith((self.opener.rstrip(), *self.prompts))


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


class ThoughtParser:
    """Splits a text into reasoning and answer. White space around the marks is in neither part.

    `thoughts` are the places of the reasoning in the text, from its opener to before its closer; the end of
    an unfinished last place is None. `answers` are the places of the answer, in the same form. The part of
    each character before `n_settled` is known.
    """

    def __init__(self, form: Thoughts, *, inside: bool = False) -> None:
        """`inside`: the prompt has begun the reasoning."""
        self.thoughts: list[tuple[int, int | None]] = [(0, None)] if inside else []
        self.answers: list[tuple[int, int | None]] = []
        self._form, self._inside = form, inside
        self._feed = Feed()
        self._close = Marks([form.closer])
        ends = [*(form.openers if form.recurs else ()), *filter(None, form.answer[1:])]
        self._ends = Marks(ends) if ends else None
        self._held: list[str] = []  # white space, which belongs to a part only if more of the part follows
        self._has_reasoned = False
        self._is_plain = False  # nothing but the answer follows
        self._events: list[Thought | str] = []
        self._run: Iterator[None] = self._read()

    @property
    def n_settled(self) -> int:
        """Characters whose part is known."""
        return self._feed.n_read

    def push(self, text: str) -> list[Thought | str]:
        """The new reasoning and answer, in order."""
        self._feed.add(text)
        if self._is_plain:
            return [self._feed.take(len(text))] if text else []
        return self._advance()

    def flush(self) -> list[Thought | str]:
        """Return the text that was held back, once no more text comes."""
        self._feed.is_last = True
        return self._advance()

    def _advance(self) -> list[Thought | str]:
        next(self._run, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        feed, form = self._feed, self._form
        marks = (*form.openers, form.closer, *filter(None, form.answer[:1]))
        is_marked = self._inside
        if self._inside:
            yield from self._reason()
        while True:
            begin = feed.n_read
            space = yield from feed.space()
            while mark := (yield from feed.takes(marks)):
                is_marked = True
                if mark in form.openers:
                    self.thoughts.append((feed.n_read - len(mark), None))
                    yield from self._reason()
                yield from feed.space()
            if is_marked:
                begin, space = feed.n_read, ""
                if not (yield from feed.peek()):
                    return
            self.answers.append((begin, None))
            self._write_answer(space)
            if self._ends is None:
                self._is_plain = True
                self._write_answer(feed.take_all())
                self._events += self._held
                return
            end = yield from feed.until(self._ends, self._write_answer)
            if not end:
                self._events += self._held
                return
            self._held.clear()
            self.answers[-1] = begin, feed.n_read
            is_marked = True
            if end not in form.openers:
                feed.take(len(end))

    def _reason(self) -> Reading[None]:
        """The reasoning after its opener, and its closer."""
        feed = self._feed
        yield from feed.space()
        if self._has_reasoned:
            self._held.append("\n\n")
        end = yield from feed.until(self._close, self._write_thought)
        self._held.clear()
        if end:
            self.thoughts[-1] = self.thoughts[-1][0], feed.n_read
            feed.take(len(end))

    def _write_thought(self, text: str) -> None:
        self._write(text, Thought)

    def _write_answer(self, text: str) -> None:
        self._write(text, str)

    def _write(self, text: str, part: Callable[[str], Thought | str]) -> None:
        """Emit text, and hold white space at its end until more text comes."""
        solid = text.rstrip(_WHITE)
        if solid:
            self._events.append(part("".join((*self._held, solid))))
            self._held.clear()
            self._has_reasoned |= part is Thought
        if len(text) > len(solid):
            self._held.append(text[len(solid) :])
