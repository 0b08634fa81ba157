"""One answer as parts: reasoning, texts and tool calls, each of which opens, grows and closes.

The writers of all APIs render the events of parts, or the parts of an answer that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kukri.calls.answer import Answer
from kukri.dialects.answer_parser import AnswerParser, Piece
from kukri.dialects.calls import CallDelta
from kukri.dialects.thoughts import Thought
from kukri.dialects.toolbox import Toolbox
from kukri.sampling import SampledToken

Kind = Literal["reasoning", "text", "call"]
PlacedToken = tuple[int, SampledToken]  # where its text starts in the answer's, in characters


class Part:
    """A part of an answer. `text` is reasoning, content, or a call's arguments, which are JSON.

    Attributes: index, its place among the answer's parts; kind; place among its calls, name and call_id of a
    call; pieces of the text; tokens of a text or a call, if they have log-probabilities; is_closed, True if
    it grows no more.
    """

    __slots__ = ("call_id", "index", "is_closed", "kind", "name", "pieces", "place", "tokens")

    def __init__(self, index: int, kind: Kind, place: int = 0, name: str = "", call_id: str = "") -> None:
        self.index, self.kind, self.place, self.name, self.call_id = index, kind, place, name, call_id
        self.tokens: list[PlacedToken] = []
        self.is_closed = False
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class PartEvent(NamedTuple):
    """What has become of a part; `text` and `tokens` are those by which it has grown."""

    what: Literal["opened", "grown", "closed"]
    part: Part
    text: str = ""
    tokens: Sequence[PlacedToken] = ()


class Choice:
    """One answer and its parts, of which the last grows."""

    def __init__(
        self,
        answer: Answer,
        parser: AnswerParser,
        *,
        toolbox: Toolbox | None = None,
        on_missed: Callable[[Sequence[str]], None] | None = None,
        on_called: Callable[[], None] | None = None,
    ) -> None:
        """`parser` splits the text; with a toolbox there may be calls in it.

        `on_missed` gets the marks of what looked like calls and was not taken, `on_called` is called once the
        answer has ended with calls.
        """
        self.answer = answer
        self.parts: list[Part] = []
        self._parser, self._toolbox = parser, toolbox
        self._on_missed, self._on_called = on_missed, on_called
        self._unsplit: list[PlacedToken] = []  # perhaps of the reasoning
        self._settled: list[PlacedToken] = []  # not of the reasoning
        self._has_called = False
        self.is_over = False  # it has ended, and no more comes from it

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        answer = self.answer
        n = 0
        for begin, end in self._parser.thoughts:
            n += answer.n_tokens if end is None else answer.n_tokens_within(end)
            n -= answer.n_tokens_within(begin) if begin else 0
        return n

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None while it has not."""
        reason = self.answer.finish_reason
        return "tool_calls" if reason == "stop" and self._has_called else reason

    @property
    def calls(self) -> list[Part]:
        """The calls so far."""
        return [part for part in self.parts if part.kind == "call"]

    @property
    def tokens(self) -> list[PlacedToken]:
        """The content's tokens with log-probabilities so far."""
        return [token for part in self.parts for token in part.tokens]

    def text(self, kind: Kind = "text") -> str:
        """The content so far, or all parts of another kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    def advance(self) -> list[PartEvent]:
        """What has become of the parts since the last time."""
        answer = self.answer
        events: list[PartEvent] = []
        pieces: list[Piece] = self._parser.push(answer.take_text())
        has_ended = answer.finish_reason is not None and not self.is_over
        if has_ended:
            self.is_over = True
            pieces += self._parser.flush(
                is_cut=answer.finish_reason != "stop", is_stopped=answer.stop_string is not None
            )
            if self._parser.missed and self._on_missed is not None:
                self._on_missed(self._parser.missed)
        tokens = self._new_tokens() if answer.has_logprobs else []
        for piece in pieces:
            if isinstance(piece, str):
                self._grow(events, "text", piece, tokens)
                tokens = []
            elif isinstance(piece, Thought):
                self._grow(events, "reasoning", piece.text)
            else:
                self._grow_call(events, piece)
        if tokens:  # their text is held back, or belongs to a call
            self._grow_tokens(events, tokens)
        if self.is_over:
            self._close(events)
            if has_ended and self.finish_reason == "tool_calls" and self._on_called is not None:
                self._on_called()
        return events

    def add_empty(self) -> list[PartEvent]:
        """Gives an answer that ended without any part an empty text."""
        events: list[PartEvent] = []
        if not self.parts:
            self._open(events, Part(0, "text"))
            self._close(events)
        return events

    def _grow(
        self, events: list[PartEvent], kind: Kind, text: str, tokens: Sequence[PlacedToken] = ()
    ) -> None:
        """Adds to the last part, or to a new one if that is of another kind."""
        if not (text or tokens):
            return
        part = self.parts[-1] if self.parts else None
        if part is None or part.kind != kind:
            part = Part(len(self.parts), kind)
            self._open(events, part)
        part.pieces.append(text)
        if tokens:
            part.tokens += tokens
        if events and events[-1].what == "grown":  # it is this part: another would have been opened
            last = events.pop()
            text, tokens = last.text + text, [*last.tokens, *tokens]
        events.append(PartEvent("grown", part, text, tokens))

    def _grow_tokens(self, events: list[PartEvent], tokens: list[PlacedToken]) -> None:
        """Adds tokens of the answer to a text or a call; without one they wait for the next."""
        last = self.parts[-1].kind if self.parts else "reasoning"
        if last != "reasoning":
            self._grow(events, last, "", tokens)
        elif self.is_over:
            self._grow(events, "text", "", tokens)
        else:
            self._settled = tokens

    def _grow_call(self, events: list[PartEvent], delta: CallDelta) -> None:
        """Opens a call or adds to it; those after the first are left out if only one is allowed."""
        assert self._toolbox is not None, "calls come of tools"
        self._has_called = True
        if delta.place and not self._toolbox.many:
            return
        if delta.name is not None:
            part = Part(len(self.parts), "call", delta.place, delta.name, self._toolbox.new_id())
            self._open(events, part)
        self._grow(events, "call", delta.arguments)

    def _open(self, events: list[PartEvent], part: Part) -> None:
        self._close(events)
        self.parts.append(part)
        events.append(PartEvent("opened", part))

    def _close(self, events: list[PartEvent]) -> None:
        if self.parts and not self.parts[-1].is_closed:
            self.parts[-1].is_closed = True
            events.append(PartEvent("closed", self.parts[-1]))

    def _new_tokens(self) -> list[PlacedToken]:
        """Takes the tokens that are known to be of the answer, and drops the others that are known."""
        self._unsplit += self.answer.take_tokens()
        answers, n_settled = self._parser.answers, self._parser.n_settled
        if self.is_over:
            n_settled = 1 << 62
        taken, self._settled, left = self._settled, [], []
        for place, token in self._unsplit:
            if any(begin <= place and (end is None or place < end) for begin, end in answers):
                taken.append((place, token))
            elif place >= n_settled:
                left.append((place, token))
        self._unsplit = left
        return taken
