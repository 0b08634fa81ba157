"""Decisions: how probable each of several texts is as the answer to a prompt, exactly, from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kukri.calls.image_prompts import extended
from kukri.dataclass import dataclass
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import SpanPrompt
from kukri.tokenizer import Tokenizer

Normalization = Literal["sequence", "token", "byte"]
YES_OR_NO = ("yes", "no")
MAX_CHOICES = 256
MAX_CHOICE_TOKENS = 4096  # all choices together
_MAX_ROWS_BYTES = 256 << 20  # logits at a time


@dataclass(frozen=True)
class Decision:
    """The probabilities of choices, which add up to 1.

    `logprobs` (nats) are the model's own: that its answer begins with the choice's tokens, and with
    those of no longer choice that begins with it. `mass` is the sum of their probabilities: the share of all
    answers that begin with one of the choices. `expected` is the mean of choices that are numbers, else None.
    """

    choice: str  # the most probable one
    probabilities: dict[str, float]
    logprobs: dict[str, float]
    mass: float
    expected: float | None
    n_prompt_tokens: int

    def __str__(self) -> str:
        return self.choice


def checked_choices(choices: Any, scores: Any) -> list[str]:
    """The texts to decide among: `choices`, the integers from `scores[0]` to `scores[1]`, or yes and no.

    Raises RequestError if both are given, or they are not different texts, two at least.
    """
    if choices is not None and scores is not None:
        raise RequestError("'choices' cannot be combined with 'scores': give one", param="scores")
    if scores is not None:
        if not isinstance(scores, tuple | list) or [type(one) for one in scores] != [int, int]:
            raise RequestError.of("scores", "must be two integers, the lowest and the highest")
        if not 1 <= scores[1] - scores[0] < MAX_CHOICES:
            raise RequestError.of("scores", f"must be 2 to {MAX_CHOICES} integers")
        return [str(score) for score in range(scores[0], scores[1] + 1)]
    texts = list(YES_OR_NO if choices is None else choices) if not isinstance(choices, str) else []
    if not all(isinstance(text, str) and text for text in texts) or len(set(texts)) < len(texts):
        raise RequestError.of("choices", "must be different texts that are not empty")
    if not 2 <= len(texts) <= MAX_CHOICES:
        raise RequestError.of("choices", f"must be 2 to {MAX_CHOICES} texts")
    return texts


class Question:
    """One prompt and its choices: the `texts` of tokens to compute, then the `logprobs` from their logits.

    Logits are wanted of each text's tokens from `first_row` on. What begins a longer text is not computed
    apart: choices of one token each take the prompt alone.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] | SpanPrompt, choices: Sequence[str]
    ) -> None:
        """Raises RequestError for choices of the same tokens, or of very many."""
        if not len(prompt):
            raise RequestError.of("prompt", "must have at least one token")
        self._ids = [tuple(tokenizer.encode_inside(text)) for text in choices]
        if not all(self._ids) or len(set(self._ids)) < len(self._ids):
            raise RequestError.of("choices", "must have at least one token each, and different ones")
        if sum(map(len, self._ids)) > MAX_CHOICE_TOKENS:
            raise RequestError.of("choices", f"must have at most {MAX_CHOICE_TOKENS} tokens")
        self.n_prompt = len(prompt)
        self.first_row = self.n_prompt - 1
        inputs = {ids[:-1] for ids in self._ids}
        begun = {ids[:i] for ids in inputs for i in range(len(ids))}
        self._inputs = sorted(inputs - begun)
        self.texts = [extended(prompt, ids) for ids in self._inputs]

    def batches(self, n_vocab: int) -> list[slice]:
        """The texts in batches whose logits do not take too much memory; nearly always one."""
        most = max(_MAX_ROWS_BYTES // (4 * n_vocab), 1)
        found, n_rows, start = [], 0, 0
        for i, ids in enumerate(self._inputs):
            if n_rows and n_rows + len(ids) + 1 > most:
                found.append(slice(start, i))
                n_rows, start = 0, i
            n_rows += len(ids) + 1
        return [*found, slice(start, len(self._inputs))]

    def token_logprobs(self, part: slice, rows: Sequence[FloatArray]) -> dict[tuple[int, ...], float]:
        """What a batch tells: log P(last token | prompt and the tokens before), by all these tokens.

        `rows` are the logits [n, V] of each text of the batch.
        """
        found: dict[tuple[int, ...], float] = {}
        for ids, logits in zip(self._inputs[part], rows, strict=True):
            wanted = [one for one in self._ids if begins(one[:-1], ids)]
            beginnings = [ids[:i] for i in range(1, len(ids) + 1)]
            for text in {*wanted, *beginnings} - found.keys():
                row = logits[len(text) - 1].astype(np.float64)
                top = row.max()
                found[text] = float(row[text[-1]] - top - np.log(np.exp(row - top).sum()))
        return found

    def logprobs(self, token_logprobs: dict[tuple[int, ...], float]) -> npt.NDArray[np.float64]:
        """log P of each choice: all its tokens follow the prompt. Float64 [choices], nats."""
        return np.array(
            [sum(token_logprobs[ids[: i + 1]] for i in range(len(ids))) for ids in self._ids], np.float64
        )

    def exclusive(self, logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """log P that the answer begins with a choice and not with a longer one that begins with it."""
        found = logprobs.copy()
        for i, ids in enumerate(self._ids):
            longer = [j for j, one in enumerate(self._ids) if j != i and begins(ids, one)]
            between = [self._ids[j] for j in longer]
            nearest = [j for j in longer if sum(begins(one, self._ids[j]) for one in between) == 1]  # itself
            if nearest:
                share = 1.0 - np.exp(logprobs[nearest] - logprobs[i]).sum()
                found[i] += np.log(max(share, np.finfo(np.float64).tiny))
        return found

    def scores(
        self, logprobs: npt.NDArray[np.float64], choices: Sequence[str], normalization: str
    ) -> npt.NDArray[np.float64]:
        """The logarithms of what is compared: the probabilities, or these by length. Float64 [choices]."""
        if normalization not in get_args(Normalization):
            names = ", ".join(get_args(Normalization))
            raise RequestError.of("normalization", f"must be one of {names}")
        if normalization == "sequence":
            return self.exclusive(logprobs)
        if normalization == "token":
            return logprobs / [len(ids) for ids in self._ids]
        return logprobs / [len(text.encode()) for text in choices]


def begins(beginning: tuple[int, ...], text: tuple[int, ...]) -> bool:
    """True if a text of tokens begins with the other, or is the same."""
    return text[: len(beginning)] == beginning


def decision(
    question: Question,
    choices: Sequence[str],
    logprobs: npt.NDArray[np.float64],
    normalization: str = "sequence",
    content_free: tuple[Question, npt.NDArray[np.float64]] | None = None,
) -> Decision:
    """The decision from log P of each choice, `Question.logprobs`.

    With `content_free`, the same of a prompt that says nothing, each probability is divided by the one there
    before they are made to add up to 1.
    """
    scores = question.scores(logprobs, choices, normalization)
    if content_free is not None:
        scores = scores - content_free[0].scores(content_free[1], choices, normalization)
    weights = np.exp(scores - scores.max())
    probabilities = weights / weights.sum()
    own = question.exclusive(logprobs)
    numbers = _numbers(choices)
    return Decision(
        choice=choices[int(probabilities.argmax())],
        probabilities=dict(zip(choices, probabilities.tolist(), strict=True)),
        logprobs=dict(zip(choices, own.tolist(), strict=True)),
        mass=min(float(np.exp(own).sum()), 1.0),
        expected=None if numbers is None else float(probabilities @ numbers),
        n_prompt_tokens=question.n_prompt,
    )


def _numbers(choices: Sequence[str]) -> list[int] | None:
    """The choices as integers, if all are."""
    plain = [text.strip() for text in choices]
    if not all(text.removeprefix("-").isdecimal() and len(text) < 10 for text in plain):
        return None
    return [int(text) for text in plain]
