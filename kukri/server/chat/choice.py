"""One answer split into reasoning, content and tool calls as it grows."""

from __future__ import annotations

from kukri.calls.answer import Answer
from kukri.sampling import SampledToken
from kukri.server.chat.reasoning_parser import ReasoningParser
from kukri.server.chat.tool_parser import CallDelta, ToolParser
from kukri.server.chat.tools import Toolbox


class Choice:
    """One answer, split into reasoning, content and, with a toolbox, calls."""

    def __init__(self, answer: Answer, *, inside: bool, toolbox: Toolbox | None = None) -> None:
        """`inside`: the prompt has begun the reasoning."""
        self.answer = answer
        self.tokens: list[SampledToken] = []  # of the content, with log-probabilities, not yet taken
        self.calls: list[CallDelta] = []  # those not yet taken
        self._toolbox = toolbox
        self._reasoning = ReasoningParser(inside=inside)
        self._unsplit: list[tuple[int, SampledToken]] = []  # perhaps of the reasoning; start of their text
        self._tools = None if toolbox is None else toolbox.parser()
        self._has_called = self._is_flushed = False

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        if self._reasoning.is_inside:
            return self.answer.n_tokens
        end = self._reasoning.reasoning_end
        return 0 if end is None else self.answer.n_tokens_within(end)

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
        if self._tools is None:
            reasoning, content, _ = self._split()
            return reasoning, content
        reasoning, pieces = self.pieces()
        self.calls += [piece for piece in pieces if isinstance(piece, CallDelta)]
        return reasoning, "".join(piece for piece in pieces if isinstance(piece, str))

    def pieces(self) -> tuple[str, list[str | CallDelta]]:
        """(reasoning, content and calls in their order) that came since the last time."""
        reasoning, content, is_last = self._split()
        if self._tools is None:
            return reasoning, [content]
        return reasoning, self._split_calls(self._tools, content, is_last)

    def _split(self) -> tuple[str, str, bool]:
        """(reasoning, content with calls, whether it is the last) that came since the last time."""
        answer, is_last = self.answer, False
        reasoning, content = self._reasoning.push(answer.take_text())
        if answer.finish_reason is not None and not self._is_flushed:
            self._is_flushed = is_last = True
            more_reasoning, more_content = self._reasoning.flush()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if answer.has_logprobs:
            self._take_tokens()
        return reasoning, content, is_last

    def _take_tokens(self) -> None:
        """Takes the tokens that are known to be no reasoning."""
        self._unsplit += self.answer.take_tokens()
        start = self._reasoning.answer_start
        if start is not None:
            self.tokens += [token for place, token in self._unsplit if place >= start]
            self._unsplit.clear()

    def _split_calls(self, tools: ToolParser, content: str, is_last: bool) -> list[str | CallDelta]:
        """Content and calls, without those after the first if only one is allowed."""
        assert self._toolbox is not None, "calls come of tools"
        pieces = tools.push(content) + (tools.flush() if is_last else [])
        self._has_called |= any(isinstance(piece, CallDelta) for piece in pieces)
        many = self._toolbox.many
        return [piece for piece in pieces if isinstance(piece, str) or many or piece.place == 0]
