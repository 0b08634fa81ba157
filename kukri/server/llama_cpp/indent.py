"""The end of an answer by its indent, as llama.cpp's `n_indent` has it."""

from __future__ import annotations


class IndentLimit:
    """Passes text on up to a line, not its first, whose words come after fewer than `n` spaces or tabs.

    Holds back white space at the end, which may be the beginning of such a line. Attributes: is_over, True
    once that line has begun.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self.is_over = False
        self._held = ""  # white space that the line begins with, if it has no words yet
        self._is_first, self._has_words = True, False  # in the line so far

    def push(self, text: str) -> str:
        """The part of the text that can be shown now."""
        if not self._n or self.is_over:
            return "" if self.is_over else text
        shown = []
        text, self._held = self._held + text, ""
        for line in text.splitlines(keepends=True):
            words = line.lstrip(" \t")
            if not self._has_words:
                if not words:
                    self._held = line
                    break
                if not self._is_first and words.strip() and len(line) - len(words) < self._n:
                    self.is_over = True
                    break
            shown.append(line)
            self._has_words = line.splitlines()[0] == line  # it has no end yet
            self._is_first = self._is_first and self._has_words
        return "".join(shown)
