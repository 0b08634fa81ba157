"""`parser_of`: what splits the answers of a model into reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from typing import Protocol

from kukri.dialects.calls import CallDelta
from kukri.dialects.dialect import Dialect
from kukri.dialects.families import CLOSERS, INNER, OPENERS
from kukri.dialects.harmony import MARKS, HarmonyParser
from kukri.dialects.signatures import Signatures
from kukri.dialects.thoughts import Thought, ThoughtParser
from kukri.dialects.tool_parser import TAGS, CallMarks, ToolParser

Piece = Thought | CallDelta | str  # reasoning, a call, content
Spans = list[tuple[int, int | None]]  # places in a text, in characters; the end of the last may be open


class AnswerParser(Protocol):
    """Splits an answer as it grows, into the same pieces however the text is cut.

    `thoughts` are the places of the reasoning, `answers` the places of the answer with its calls. The part of
    each character before `n_settled` is known. `missed` are marks of text that was not taken for calls.
    """

    thoughts: Spans
    answers: Spans
    missed: list[str]

    @property
    def n_settled(self) -> int:
        """Characters whose part is known."""

    def push(self, text: str) -> list[Piece]:
        """The new pieces, in order."""

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[Piece]:
        """Return the parts that were held back, once no more text comes.

        `is_cut`: the answer was not complete; `is_stopped`: a stop string ended it.
        """


class PlainParser:
    """Splits nothing: all is the answer, as `shown` returns it; with None there is no answer."""

    n_settled = 1 << 62

    def __init__(self, shown: Callable[[str], str] | None = str) -> None:
        self.thoughts: Spans = []
        self.answers: Spans = [(0, None)] if shown else []
        self.missed: list[str] = []
        self._shown = shown

    def push(self, text: str) -> list[Piece]:
        """The text."""
        return [self._shown(text)] if self._shown else []

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[Piece]:
        """Nothing: no text was held back."""
        return []


class AnswerBeginning:
    """Finds where an answer begins after its reasoning, because stop strings count only from there on.

    In its reasoning a model may mention a stop string, such as the next "Question:" of a benchmark.
    """

    def __init__(self, parser: AnswerParser) -> None:
        """`parser` splits the same text, which it is given here."""
        self._parser = parser
        self._held, self._n_before = "", 0  # text whose part is not known yet, and its place
        self._has_begun = False

    def push(self, text: str) -> tuple[str, str]:
        """The text that comes before the answer and the text of the answer, as far as that is known."""
        if self._has_begun:
            return "", text
        self._parser.push(text)
        return self._divided(text)

    def flush(self) -> tuple[str, str]:
        """The text that was held back, divided likewise, when no more text comes."""
        if self._has_begun:
            return "", ""
        self._parser.flush()
        before, answer = self._divided("")
        rest, self._held = self._held, ""
        return before + rest, answer

    def _divided(self, text: str) -> tuple[str, str]:
        held = self._held + text
        self._has_begun = bool(self._parser.answers)
        place = self._parser.answers[0][0] if self._has_begun else self._parser.n_settled
        n = min(max(place - self._n_before, 0), len(held))
        self._n_before += n
        self._held = "" if self._has_begun else held[n:]
        return held[:n], held[n:] if self._has_begun else ""


class MarkParser(AnswerParser):
    """Splits by marks: first the reasoning, then the calls in the rest.

    Calls at the end of unclosed reasoning are calls too, because models forget the closer before them.
    """

    def __init__(self, dialect: Dialect, tools: Signatures | None, *, inside: bool) -> None:
        """`inside`: the prompt has begun the reasoning; `tools` are None if nothing is to be called."""
        self._reasoning = ThoughtParser(dialect.thoughts, inside=inside)
        self._dialect, self._tools = dialect, tools
        self._calls = None if tools is None else ToolParser(marks_of(dialect), tools)
        self._thought: list[str] = []  # the reasoning, if there are tools
        self.thoughts, self.answers = self._reasoning.thoughts, self._reasoning.answers
        self.missed: list[str] = [] if self._calls is None else self._calls.missed

    @property
    def n_settled(self) -> int:
        return self._reasoning.n_settled

    def push(self, text: str) -> list[Piece]:
        return self._split(self._reasoning.push(text))

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[Piece]:
        pieces = self._split(self._reasoning.flush())
        if self._calls is None:
            return pieces
        is_open = bool(self.thoughts) and self.thoughts[-1][1] is None
        calls = self._calls_in_thoughts() if is_open and not is_cut else []
        return [*pieces, *self._calls.flush(is_cut=is_cut, is_stopped=is_stopped), *calls]

    def _calls_in_thoughts(self) -> list[Piece]:
        """The calls that the reasoning ends with, after the last text in it."""
        thought = "".join(self._thought)
        if self._tools is None or not any(mark in thought for mark in self._dialect.openers):
            return []
        parser = ToolParser(marks_of(self._dialect), self._tools)
        found = [*parser.push(thought), *parser.flush()]
        calls = list(takewhile(lambda piece: isinstance(piece, CallDelta), reversed(found)))[::-1]
        first = calls[0].place if calls and isinstance(calls[0], CallDelta) else 0
        return [c._replace(place=c.place - first) for c in calls if isinstance(c, CallDelta)]

    def _split(self, pieces: list[Thought | str]) -> list[Piece]:
        split: list[Piece] = []
        for piece in pieces:
            if self._calls is None:
                split.append(piece)
            elif isinstance(piece, Thought):
                split.append(piece)
                self._thought.append(piece.text)
            else:
                split += self._calls.push(piece)
        return split


@lru_cache(maxsize=64)
def marks_of(dialect: Dialect) -> CallMarks:
    """The marks that answers in a dialect are searched for."""
    own = frozenset([*dialect.openers, *(TAGS if dialect.body == "tagged" else ())])
    return CallMarks(own, OPENERS, CLOSERS, begins_bare=dialect.begins_bare, reads_code=dialect.reads_code)


def shown_marks(dialect: Dialect, *, with_calls: bool) -> tuple[str, ...]:
    """The texts that a parser has to see, be they control tokens or not."""
    if dialect.body == "harmony":
        return MARKS
    return (*dialect.thoughts.marks, *((*OPENERS, *CLOSERS, *INNER) if with_calls else ()))


def parser_of(dialect: Dialect, tools: Signatures | None, prompt: str = "") -> AnswerParser:
    """A parser of one answer. `prompt` is the end of its prompt, as text with control tokens."""
    if dialect.body == "harmony":
        return HarmonyParser(tools, prompt)
    return MarkParser(dialect, tools, inside=dialect.thoughts.has_begun(prompt))
