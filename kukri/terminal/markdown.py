"""Markdown in a terminal as it streams: marks become bold, italic and colours, nothing waits for a line."""

from __future__ import annotations

import os
import re
import sys

_BOLD, _ITALIC, _CODE, _HEAD, _QUOTE, _OFF = (
    "\x1b[1m",
    "\x1b[3m",
    "\x1b[36m",
    "\x1b[1;35m",
    "\x1b[2m",
    "\x1b[0m",
)
# beginnings of a line that may still become something else, and are held back
_UNSURE = re.compile(r" {0,3}(?:#{1,6}|`{1,2}|~{1,2}|>|[*+-]|\d{1,3}[.)]?)?")
_HEADING = re.compile(r" {0,3}#{1,6} ")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_QUOTED = re.compile(r" {0,3}> ?")
_BULLET = re.compile(r"( *)[*+-] ")


def has_colours() -> bool:
    """True if stdout is a terminal that shows colours, and nobody has set NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class MarkdownStream:
    """Turns pieces of Markdown into text with escape sequences. What `push` and `flush` return is the whole.

    The text itself must hold no control characters.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._held = ""
        self._at = (
            0  # how much of `_held` was shown: cutting each character off would copy the rest each time
        )
        self._before = "\n"  # the last character that was shown
        self._at_start = True  # at the start of a line
        self._fence = ""  # the marks that opened a block of code
        self._line = ""  # the style of the line
        self._inline: list[str] = []  # open marks, in order: `, ** or *

    def push(self, text: str) -> str:
        """The text as far as it is certain."""
        self._held += text
        return self._take(is_end=False)

    def flush(self) -> str:
        """Return the text that was held back, and the end of all styles."""
        shown = self._take(is_end=True)
        is_styled = bool(self._line or self._inline or self._fence)
        self._begin()
        return shown + (_OFF if is_styled else "")

    def _take(self, *, is_end: bool) -> str:
        shown: list[str] = []
        while self._at < len(self._held):
            if self._at_start:
                if not is_end and _UNSURE.fullmatch(self._held, self._at):
                    break
                if not is_end and _FENCE.match(self._held, self._at) and self._held.find("\n", self._at) < 0:
                    break
                shown.append(self._begin_line())
                continue
            mark = self._mark()
            if mark and not is_end and len(self._held) - self._at <= len(mark):
                break  # * may be **
            shown.append(self._step(mark))
        self._held, self._at = self._held[self._at :], 0
        return "".join(shown)

    def _begin_line(self) -> str:
        """The first part of a line, and the style that it has."""
        self._at_start = False
        fence = _FENCE.match(self._held, self._at)
        if fence is not None and self._fence in ("", fence[1]):
            end = self._held.find("\n", self._at)
            line = self._held[self._at : end if end >= 0 else None]
            self._at += len(line)
            opens = not self._fence
            self._fence = fence[1] if opens else ""
            return f"{_QUOTE}{line}{_OFF}{_CODE if opens else ''}"
        if self._fence:
            return ""
        for pattern, style in ((_HEADING, _HEAD), (_QUOTED, _QUOTE)):
            if pattern.match(self._held, self._at):
                self._line = style
                return style
        bullet = _BULLET.match(self._held, self._at)
        if bullet is not None:
            self._at = bullet.end()
            return f"{bullet[1]}• "
        return ""

    def _mark(self) -> str:
        """The mark that the text begins with, if marks count here."""
        if self._fence:
            return ""
        if self._inline and self._inline[-1] == "`":
            return "`" if self._held[self._at] == "`" else ""
        return next((mark for mark in ("`", "**", "*") if self._held.startswith(mark, self._at)), "")

    def _step(self, mark: str) -> str:
        """The next character, or the change of style that a mark stands for."""
        if not mark:
            character = self._before = self._held[self._at]
            self._at += 1
            if character != "\n":
                return character
            ended = bool(self._line or self._inline)
            self._line, self._at_start = "", True
            self._inline.clear()
            return f"{_OFF}\n" if ended and not self._fence else "\n"
        self._at += len(mark)
        if mark in self._inline:
            self._inline.remove(mark)
        elif mark != "`" and (self._before.isalnum() or self._held[self._at : self._at + 1].isspace()):
            return mark  # 2 * 3, 2**3
        else:
            self._inline.append(mark)
        styles = {"`": _CODE, "**": _BOLD, "*": _ITALIC}
        return _OFF + self._line + "".join(styles[one] for one in self._inline)
