"""Parses the reasoning that a model writes between <think> and </think> out of its answer as it grows."""

from __future__ import annotations

from kukri.tokenizer import n_partial

OPEN, CLOSE = "<think>", "</think>"
_WHITE = " \t\r\n"


class ReasoningParser:
    """Splits a text that may begin with reasoning. White space around the tags is in neither part.

    `inside` says that the prompt itself ended in <think>. Only at the beginning of a text is <think> a tag.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state = "inside" if inside else "start"  # then "after" the reasoning, then "answer"
        self._held = ""  # perhaps the beginning of a tag, or white space before one
        self._has_reasoning = False
        self._n_pushed = 0  # characters
        self.reasoning_end: int | None = None  # characters, up to </think>; None while there is none
        self.answer_start: int | None = None  # characters before the answer; None while there is none

    @property
    def is_inside(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._state == "inside"

    def push(self, text: str) -> tuple[str, str]:
        """The new (reasoning, answer)."""
        self._n_pushed += len(text)
        if self._state == "answer":
            return "", text
        self._held += text
        if self._state == "start":
            self._find_open()
        reasoning = self._reasoning() if self._state == "inside" else ""
        return reasoning, self._answer()

    def flush(self) -> tuple[str, str]:
        """(reasoning, answer) held back, when no more text comes."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return held.rstrip(_WHITE), ""
        if self._state == "start":
            self.answer_start = 0
        return "", "" if self._state == "after" else held

    def _find_open(self) -> None:
        begun = self._held.lstrip(_WHITE)
        if begun.startswith(OPEN):
            self._state, self._held = "inside", begun[len(OPEN) :]
        elif not OPEN.startswith(begun):
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._state, self.answer_start = "answer", self._n_pushed - len(self._held)

    def _reasoning(self) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip(_WHITE)
        reasoning, close, rest = self._held.partition(CLOSE)
        if close:
            self._state, self._held = "after", rest
            self.reasoning_end = self._n_pushed - len(rest) - len(CLOSE)
            return reasoning.rstrip(_WHITE)
        n_safe = len(reasoning[: len(reasoning) - n_partial(reasoning, (CLOSE,))].rstrip(_WHITE))
        self._has_reasoning |= n_safe > 0
        self._held = reasoning[n_safe:]
        return reasoning[:n_safe]

    def _answer(self) -> str:
        if self._state == "after":
            self._held = self._held.lstrip(_WHITE)
            if self._held:
                self._begin_answer()
        if self._state != "answer":
            return ""
        text, self._held = self._held, ""
        return text
