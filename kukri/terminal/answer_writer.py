"""An answer on its way to a terminal: reasoning dim, text as Markdown if that is asked for."""

from __future__ import annotations

import sys

from kukri.calls.results import Chunk
from kukri.terminal.markdown import MarkdownStream, has_colours
from kukri.terminal.output import write_text

_DIM, _OFF = "\x1b[2m", "\x1b[0m"


class AnswerWriter:
    """Writes the chunks of one answer to stdout.

    Reasoning is for people, so it is written to terminals alone, and only if `shows_reasoning`: dim, or
    between two lines that name it where there are no colours.
    """

    def __init__(self, *, shows_reasoning: bool, has_markdown: bool = False) -> None:
        self._shows_reasoning = shows_reasoning and sys.stdout.isatty()
        self._has_colours = has_colours()
        self._markdown = MarkdownStream() if has_markdown and self._has_colours else None
        self._reasons, self._written = False, ""

    def push(self, chunk: Chunk) -> None:
        """Writes what a chunk adds to the answer."""
        if chunk.reasoning and self._shows_reasoning:
            if not self._reasons:
                self._reasons = True
                self._mark(_DIM, "(reasoning)\n")
            self._write(chunk.reasoning)
        if chunk.text:
            self._end_reasoning()
            self._write(chunk.text, self._markdown)

    def end(self, n_lines: int) -> None:
        """Ends the answer, with the line that it ended itself as one of `n_lines` line ends."""
        self._end_reasoning()
        if self._markdown is not None:
            sys.stdout.write(self._markdown.flush())
        write_text("\n" * (n_lines - self._written.endswith("\n")))

    def _write(self, text: str, markdown: MarkdownStream | None = None) -> None:
        write_text(text, markdown)
        self._written = text

    def _end_reasoning(self) -> None:
        if not self._reasons:
            return
        self._reasons = False
        self._write("\n" if self._written.endswith("\n") else "\n\n")
        self._mark(_OFF, "(answer)\n")

    def _mark(self, style: str, line: str) -> None:
        sys.stdout.write(style if self._has_colours else line)
