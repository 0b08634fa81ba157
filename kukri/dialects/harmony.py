"""`HarmonyParser`: the channels of gpt-oss.

A turn is messages, each with a header: <|channel|>analysis<|message|>…<|end|> is reasoning, final is the
answer, commentary with a recipient (to=functions.name) is a call, and without one part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kukri.dialects.calls import Call, CallDelta, merged, read_arguments
from kukri.dialects.feed import EndOfText, Feed, Marks, Reading
from kukri.dialects.signatures import Signatures
from kukri.dialects.thoughts import Thought
from kukri.dialects.values import Malformed, ignore

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEADER_MARKS = ("<|start|>", "<|channel|>")
_END_MARKS = tuple(mark for mark in MARKS if mark != "<|message|>")
_MESSAGE, _ENDS = Marks(["<|message|>"]), Marks(_END_MARKS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")


class HarmonyParser:
    """Splits the text of a turn into reasoning, answer and calls, the same ones however it is cut.

    `thoughts`, `answers` and `n_settled` are as in `ThoughtParser`; `missed` as in `ToolParser`.
    """

    def __init__(self, tools: Signatures | None, prompt: str) -> None:
        """`tools` are None for an answer without calls; `prompt` is the end of the prompt's text."""
        self.thoughts: list[tuple[int, int | None]] = []
        self.answers: list[tuple[int, int | None]] = []
        self.missed: list[str] = []
        self._tools = tools
        self._feed = Feed()
        self._is_cut = False
        self._n_calls = 0
        self._events: list[Thought | CallDelta | str] = []
        begun = prompt.rpartition("<|start|>")[2]
        self._header = begun.partition("<|message|>")[0] if "<|message|>" in begun else None
        if self._header is not None and self._channel(self._header)[0] == "analysis":
            self.thoughts.append((0, None))
        self._run: Iterator[None] = self._read()

    @property
    def n_settled(self) -> int:
        """Characters whose part is known."""
        return self._feed.n_read

    def push(self, text: str) -> list[Thought | CallDelta | str]:
        """The new reasoning, answer and calls, in order."""
        self._feed.add(text)
        return self._advance()

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[Thought | CallDelta | str]:
        """See AnswerParser.flush."""
        self._feed.is_last, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Thought | CallDelta | str]:
        next(self._run, None)
        events, self._events = self._events, []
        return merged(events)

    def _tell(self, delta: CallDelta) -> None:
        self._events.append(delta)

    @staticmethod
    def _channel(header: str) -> tuple[str, str]:
        """(channel, recipient) of a header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        return channel[1] if channel else "final", recipient[1] if recipient else ""

    def _read(self) -> Reading[None]:
        feed, header = self._feed, self._header
        while True:
            begin = feed.n_read
            if header is None:
                header = yield from self._read_header()
                if header is None:
                    return
            channel, recipient = self._channel(header)
            header = None
            if recipient and channel != "analysis" and self._tools is not None:
                yield from self._call(recipient, self._tools)
            elif channel == "analysis":
                if not self.thoughts or self.thoughts[-1][1] is not None:
                    self.thoughts.append((begin, None))
                yield from self._message(self.thoughts, Thought)
            else:
                self.answers.append((feed.n_read, None))
                yield from self._message(self.answers, str)
            if not (yield from feed.peek()):
                return
            yield from feed.takes(("<|end|>", "<|call|>", "<|return|>"))

    def _read_header(self) -> Reading[str | None]:
        """A header with its marks; "" if a text comes without one, None if the turn ends within it."""
        feed = self._feed
        yield from feed.space()
        if not (yield from feed.starts(_HEADER_MARKS)):
            return ""
        pieces: list[str] = []
        try:
            yield from feed.through(_MESSAGE, pieces.append)
        except EndOfText:
            return None
        return "".join(pieces)

    def _message(
        self, spans: list[tuple[int, int | None]], part: Callable[[str], Thought | str]
    ) -> Reading[None]:
        """A message up to its end; an empty line comes between two of the same part."""
        gap = "\n\n" if len(spans) > 1 else ""

        def write(text: str) -> None:
            nonlocal gap
            self._events.append(part(gap + text))
            gap = ""

        if (yield from self._feed.until(_ENDS, write)):
            spans[-1] = spans[-1][0], self._feed.n_read

    def _call(self, recipient: str, tools: Signatures) -> Reading[None]:
        """The arguments of a call."""
        feed = self._feed
        feed.keep()
        call = Call(feed, self._n_calls, tools, self._tell, is_own=True)
        try:
            call.begin(recipient)
            yield from feed.space()
            if not (yield from feed.starts(MARKS)):
                yield from read_arguments(feed, call, ends=_END_MARKS)
        except (EndOfText, Malformed):
            if not call.is_told:
                self.missed.append("<|call|>")
        mark = yield from feed.until(_ENDS, ignore)
        if call.is_told and (mark or not self._is_cut):
            left = call.complete()
            self._events += [left] * any(map(str.isalnum, left))
        self._n_calls += call.is_told
        feed.kept()
