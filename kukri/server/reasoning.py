"""The thoughts that a model writes between <think> and </think>, told apart from its answer as both grow."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
_WHITE = " \t\r\n"


class ReasoningSplit:
    """Splits a text that may begin with thoughts. White space around the tags is in neither part.

    `inside` says that the prompt itself ended in <think>. Only at the beginning of a text is <think> a tag.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state = "thinking" if inside else "start"  # then "after" the thoughts, then "answer"
        self._held = ""  # what may become a tag, or white space that may be followed by one
        self._has_thoughts = False
        self._n_pushed = 0  # characters
        self.thoughts_end: int | None = None  # characters, up to </think>; None where there is none yet
        self.answer_start: int | None = None  # characters before the answer; None where there is none yet

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within the thoughts."""
        return self._state == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer): what is new of each."""
        self._n_pushed += len(text)
        if self._state == "answer":
            return "", text
        self._held += text
        if self._state == "start":
            self._find_open()
        thoughts = self._thoughts() if self._state == "thinking" else ""
        return thoughts, self._answer()

    def flush(self) -> tuple[str, str]:
        """(thoughts, answer) held back, when no more text comes."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return held.rstrip(_WHITE), ""
        if self._state == "start":
            self.answer_start = 0
        return "", "" if self._state == "after" else held

    def _find_open(self) -> None:
        begun = self._held.lstrip(_WHITE)
        if begun.startswith(OPEN):
            self._state, self._held = "thinking", begun[len(OPEN) :]
        elif not OPEN.startswith(begun):
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._state, self.answer_start = "answer", self._n_pushed - len(self._held)

    def _thoughts(self) -> str:
        if not self._has_thoughts:
            self._held = self._held.lstrip(_WHITE)
        thoughts, close, rest = self._held.partition(CLOSE)
        if close:
            self._state, self._held = "after", rest
            self.thoughts_end = self._n_pushed - len(rest) - len(CLOSE)
            return thoughts.rstrip(_WHITE)
        n = min(len(thoughts), len(CLOSE) - 1)
        while n and not CLOSE.startswith(thoughts[-n:]):
            n -= 1
        n_safe = len(thoughts[: len(thoughts) - n].rstrip(_WHITE))
        self._has_thoughts |= n_safe > 0
        self._held = thoughts[n_safe:]
        return thoughts[:n_safe]

    def _answer(self) -> str:
        if self._state == "after":
            self._held = self._held.lstrip(_WHITE)
            if self._held:
                self._begin_answer()
        if self._state != "answer":
            return ""
        text, self._held = self._held, ""
        return text
