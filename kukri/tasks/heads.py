"""Tasks other than generation: extractive question answering and classification.

Scores are computed as transformers' pipelines compute them. Offsets count characters of the caller's text.
A text is read to token ids, whose outputs come from a request to the engine (`Request.output`); then they are
made into answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kukri.config import HeadConfig, ModelConfig
from kukri.dataclass import dataclass
from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.tokenizer import Tokenizer


@dataclass(frozen=True)
class Span:
    """A piece of the context, `context[start:stop]`, and how probable it is as the answer, 0 to 1."""

    text: str
    score: float
    start: int
    stop: int


@dataclass(frozen=True)
class Label:
    """A label of a sequence, and its score: a probability, or for a regression the number itself."""

    label: str
    score: float


@dataclass(frozen=True)
class TokenLabel:
    """The most probable label of a token, `text[start:stop]` of the classified text."""

    text: str
    label: str
    score: float
    start: int
    stop: int


@dataclass(frozen=True)
class Passage:
    """A text as token ids, and for each the characters of `text` that it has: None for others' tokens."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int] | None]


def read_question(config: ModelConfig, tokenizer: Tokenizer, question: str, context: str) -> Passage:
    """The context after the question. Raises UnsupportedError for a model without a head for answers,
    RequestError for an empty context, ContextLengthError for one that is too long.
    """
    _require(config, "question_answering")
    passage = Passage(context, *tokenizer.encode_spans(context, before=question))
    if not any(passage.spans):
        raise RequestError.of("context", "must not be empty")
    _check_length(config, passage.ids)
    return passage


def answers(passage: Passage, outputs: FloatArray, *, top_k: int, max_answer_tokens: int) -> list[Span]:
    """The `top_k` most probable spans of the context by the head's outputs [T, 2], the best first.

    A span's score is the probability that it starts at its first token times the probability that it ends at
    its last.
    """
    for name, value in (("top_k", top_k), ("max_answer_tokens", max_answer_tokens)):
        if value < 1:
            raise RequestError.of(name, f"must be at least 1, not {value}")
    inside = [i for i, span in enumerate(passage.spans) if span is not None]
    logits = outputs[inside]
    starts, ends = probabilities(logits[:, 0]), probabilities(logits[:, 1])
    n_tokens, n_longest = len(inside), min(max_answer_tokens, len(inside))
    scores = np.zeros((n_tokens, n_longest))  # [first token, tokens after it]
    for n_more in range(n_longest):
        scores[: n_tokens - n_more, n_more] = starts[: n_tokens - n_more] * ends[n_more:]
    found: list[Span] = []
    for index in np.argsort(-scores, axis=None, kind="stable"):
        first, n_more = divmod(int(index), n_longest)
        if len(found) == min(top_k, scores.size) or first + n_more >= n_tokens:
            break
        begin, end = passage.spans[inside[first]], passage.spans[inside[first + n_more]]
        assert begin is not None, "the tokens inside have spans"
        assert end is not None, "the tokens inside have spans"
        start, stop = _without_spaces(passage.text, begin[0], end[1])
        found.append(Span(passage.text[start:stop], float(scores[first, n_more]), start, stop))
    return found


def read_text(config: ModelConfig, tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to classify. Raises as `read_question` does."""
    _require(config, "sequence_classification")
    ids = tokenizer.encode(text, add_special=True)
    _check_length(config, ids)
    return ids


def classified_row(config: ModelConfig, ids: Sequence[int]) -> int:
    """Return the index of the token whose outputs are the text's: the first of an encoder, else the last."""
    return last_token(ids, config.head.pad_id) % len(ids) if config.is_causal else 0


def label_scores(head: HeadConfig, outputs: FloatArray) -> npt.NDArray[np.float64]:
    """The score of each label, in the order of the head's, by its outputs [labels] for a text."""
    if head.problem_type == "regression":
        return outputs.astype(np.float64)
    if head.problem_type == "multi_label_classification" or len(outputs) == 1:
        scores: npt.NDArray[np.float64] = 1 / (1 + np.exp(-outputs.astype(np.float64)))
        return scores
    return probabilities(outputs)


def labels(head: HeadConfig, outputs: FloatArray) -> list[Label]:
    """Every label with its score, the best first."""
    scores = label_scores(head, outputs)
    return [Label(head.labels[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")]


def read_tokens(config: ModelConfig, tokenizer: Tokenizer, text: str) -> Passage:
    """A text whose tokens are to be classified. Raises as `read_question` does."""
    _require(config, "token_classification")
    passage = Passage(text, *tokenizer.encode_spans(text))
    _check_length(config, passage.ids)
    return passage


def token_labels(head: HeadConfig, passage: Passage, outputs: FloatArray) -> list[TokenLabel]:
    """A label for each token of the text by the head's outputs [T, labels]; tokens that the model wants
    around it are left out.
    """
    found: list[TokenLabel] = []
    for logits, span in zip(outputs, passage.spans, strict=True):
        if span is not None:
            scores = probabilities(logits)
            best, (start, stop) = int(scores.argmax()), _without_spaces(passage.text, *span)
            label = head.labels[best]
            found.append(TokenLabel(passage.text[start:stop], label, float(scores[best]), start, stop))
    return found


def last_token(ids: Sequence[int], pad_id: int | None) -> int:
    """Index of the last non-padding token, as transformers' classifiers take it."""
    return max((i for i, token in enumerate(ids) if token != pad_id), default=0 if pad_id is not None else -1)


def _require(config: ModelConfig, kind: str) -> HeadConfig:
    head = config.head
    if head.kind != kind:
        raise UnsupportedError(
            f"this requires a model for {purpose_of(kind)}; this is a model for {purpose_of(head.kind)}"
        )
    return head


def purpose_of(kind: str) -> str:
    """Return what a model with a head of this kind is for, in words."""
    return "language modeling" if kind == "language_model" else kind.replace("_", " ")


def _check_length(config: ModelConfig, ids: Sequence[int]) -> None:
    """Raises RequestError for a sequence without tokens, ContextLengthError for one that is too long."""
    if not ids:
        raise RequestError(
            "a text must not be empty, because the model adds no tokens of its own", param="texts"
        )
    if len(ids) > config.max_context:
        raise ContextLengthError(len(ids), config.max_context)


def probabilities(logits: FloatArray) -> npt.NDArray[np.float64]:
    """The softmax of each row [..., n]."""
    weights: npt.NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _without_spaces(text: str, start: int, stop: int) -> tuple[int, int]:
    """The piece without spaces at its ends, which belong to tokens and to no answer."""
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())
