"""Spans of a prompt: runs of tokens that take rows in place of embeddings, and what rows are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from kukri.errors import RequestError


class SpanInput(Protocol):
    """What an encoder makes rows from, such as one image."""

    noun: ClassVar[str]  # its noun in errors; the plural ends in s

    @property
    def n_tokens(self) -> int:
        """Rows that it becomes, at least one."""

    @property
    def digest(self) -> bytes:
        """A hash of all that its rows depend on besides the model: equal digests mean equal rows."""


@runtime_checkable
class SpanPrompt(Protocol):
    """A prompt some of whose tokens only hold places for rows: it goes wherever a prompt of ids goes.

    A span is a run of such tokens: (index of the first, number of tokens, number of the input whose next rows
    they take). Implementations are dataclasses that call `check_spans`.
    """

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of the whole prompt."""

    @property
    def inputs(self) -> Sequence[SpanInput]:
        """The inputs, in the order of their rows."""

    @property
    def spans(self) -> Sequence[tuple[int, int, int]]:
        """The spans, in order."""

    def __len__(self) -> int:
        """Tokens of the prompt, placeholders included."""


def check_spans(prompt: SpanPrompt) -> None:
    """Raise RequestError unless spans are in order, do not overlap, name the inputs in order, and give each
    as many tokens as it has rows.
    """
    stop, last, n_rows = 0, 0, [0] * len(prompt.inputs)
    for start, n_tokens, number in prompt.spans:
        if start < stop or n_tokens < 1 or not last <= number < len(n_rows):
            raise RequestError("the spans of a prompt must be in order", param="spans")
        stop, last = start + n_tokens, number
        n_rows[number] += n_tokens
    if stop > len(prompt.token_ids):
        raise RequestError("the spans of a prompt must end within its tokens", param="spans")
    for i, own in enumerate(prompt.inputs):
        if n_rows[i] != own.n_tokens:
            raise RequestError(
                f"{own.noun} {i} must have {own.n_tokens} tokens in the prompt, not {n_rows[i]}",
                param=f"{own.noun}s",
            )
