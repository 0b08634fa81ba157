"""One answer split into reasoning, content and tool calls as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kukri.calls.answer import Answer
from kukri.dialects.answer_parser import AnswerParser, Piece, parser_of
from kukri.dialects.calls import CallDelta
from kukri.dialects.families import GENERIC
from kukri.dialects.thoughts import Thought
from kukri.dialects.toolbox import Toolbox
from kukri.sampling import SampledToken


class Choice:
    """One answer, split into reasoning, content and, with a toolbox, calls."""

    def __init__(
        self,
        answer: Answer,
        parser: AnswerParser | None = None,
        *,
        toolbox: Toolbox | None = None,
        on_missed: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """`parser` splits the text; None finds reasoning between <think> and </think> and no calls.

        `on_missed` gets the marks of what looked like calls and was not taken.
        """
        self.answer = answer
        self.tokens: list[SampledToken] = []  # of the content, with log-probabilities, not yet taken
        self.calls: list[CallDelta] = []  # those not yet taken
        self._toolbox, self._on_missed = toolbox, on_missed
        self._parser = parser_of(GENERIC, None) if parser is None else parser
        self._unsplit: list[tuple[int, SampledToken]] = []  # perhaps of the reasoning; start of their text
        self._has_called = self._is_flushed = False

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

    def new_call_id(self) -> str:
        """An id for a tool call."""
        assert self._toolbox is not None, "calls come of tools"
        return self._toolbox.new_id()

    def advance(self) -> tuple[str, str]:
        """(reasoning, content) that came since the last time; calls are in `calls`."""
        reasoning, pieces = self.pieces()
        self.calls += [piece for piece in pieces if isinstance(piece, CallDelta)]
        return reasoning, "".join(piece for piece in pieces if isinstance(piece, str))

    def pieces(self) -> tuple[str, list[str | CallDelta]]:
        """(reasoning, content and calls in their order) that came since the last time."""
        answer = self.answer
        found: list[Piece] = self._parser.push(answer.take_text())
        if answer.finish_reason is not None and not self._is_flushed:
            self._is_flushed = True
            found += self._parser.flush(is_cut=answer.finish_reason != "stop")
            if self._parser.missed and self._on_missed is not None:
                self._on_missed(self._parser.missed)
        if answer.has_logprobs:
            self._take_tokens()
        reasoning = "".join(piece.text for piece in found if isinstance(piece, Thought))
        return reasoning, [piece for piece in found if not isinstance(piece, Thought) and self._allows(piece)]

    def _allows(self, piece: str | CallDelta) -> bool:
        """False for calls after the first, if only one is allowed."""
        if isinstance(piece, str):
            return True
        assert self._toolbox is not None, "calls come of tools"
        self._has_called = True
        return self._toolbox.many or piece.place == 0

    def _take_tokens(self) -> None:
        """Takes the tokens that are known to be of the answer, and drops those that are known not to be."""
        self._unsplit += self.answer.take_tokens()
        answers, n_settled = self._parser.answers, self._parser.n_settled
        if self._is_flushed:
            n_settled = 1 << 62
        left = []
        for place, token in self._unsplit:
            if any(begin <= place and (end is None or place < end) for begin, end in answers):
                self.tokens.append(token)
            elif place >= n_settled:
                left.append((place, token))
        self._unsplit = left
