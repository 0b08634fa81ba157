"""Tasks other than generation: extractive question answering and classification.

Scores are computed as transformers' pipelines compute them. Offsets count characters of the caller's text.
The model's outputs come from requests to the engine (`Request.output`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kukri.config import HeadConfig
from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.models import Model
from kukri.tokenizer import Tokenizer

Outputs = Callable[[list[int]], FloatArray]  # token ids -> the outputs of the model's head [T, width]


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


def answer(
    model: Model,
    outputs: Outputs,
    tokenizer: Tokenizer,
    question: str,
    context: str,
    *,
    top_k: int,
    max_answer_tokens: int,
) -> list[Span]:
    """The `top_k` most probable spans of the context, the best first.

    A span's score is the probability of its first token as a start times that of its last as an end.
    """
    _require(model, "question_answering")
    for name, value in (("top_k", top_k), ("max_answer_tokens", max_answer_tokens)):
        if value < 1:
            raise RequestError(f"{name} must be at least 1, not {value}", param=name)
    ids, spans = tokenizer.encode_spans(context, before=question)
    inside = np.array([i for i, span in enumerate(spans) if span is not None], np.int64)
    if not len(inside):
        raise RequestError("the context is empty: there is nothing to answer with", param="context")
    _check_length(model, ids)
    logits = outputs(ids)[inside]
    starts, ends = _probabilities(logits[:, 0]), _probabilities(logits[:, 1])
    n_tokens, n_longest = len(inside), min(max_answer_tokens, len(inside))
    scores = np.zeros((n_tokens, n_longest))  # [first token, tokens after it]
    for n_more in range(n_longest):
        scores[: n_tokens - n_more, n_more] = starts[: n_tokens - n_more] * ends[n_more:]
    found: list[Span] = []
    for index in np.argsort(-scores, axis=None, kind="stable"):
        first, n_more = divmod(int(index), n_longest)
        if len(found) == min(top_k, scores.size) or first + n_more >= n_tokens:
            break
        begin, end = spans[inside[first]], spans[inside[first + n_more]]
        assert begin is not None, "the tokens inside have spans"
        assert end is not None, "the tokens inside have spans"
        start, stop = _without_spaces(context, begin[0], end[1])
        found.append(Span(context[start:stop], float(scores[first, n_more]), start, stop))
    return found


def classify(model: Model, outputs: Outputs, tokenizer: Tokenizer, text: str) -> list[Label]:
    """Every label with its score, the best first."""
    head = _require(model, "sequence_classification")
    ids = tokenizer.encode(text, add_special=True)
    _check_length(model, ids)
    # an encoder's first token stands for the text, the last one in a model that sees only earlier tokens
    logits = outputs(ids)[last_token(ids, head.pad_id) if model.config.is_causal else 0]
    if head.problem_type == "regression":
        scores: npt.NDArray[np.float64] = logits.astype(np.float64)
    elif head.problem_type == "multi_label_classification" or len(logits) == 1:
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    else:
        scores = _probabilities(logits)
    best_first = np.argsort(-scores, kind="stable")
    return [Label(head.labels[i], float(scores[i])) for i in best_first]


def classify_tokens(model: Model, outputs: Outputs, tokenizer: Tokenizer, text: str) -> list[TokenLabel]:
    """A label for each token of the text; tokens that the model wants around it are left out."""
    head = _require(model, "token_classification")
    ids, spans = tokenizer.encode_spans(text)
    labels: list[TokenLabel] = []
    _check_length(model, ids)
    for logits, span in zip(outputs(ids), spans, strict=True):
        if span is not None:
            scores = _probabilities(logits)
            best, (start, stop) = int(scores.argmax()), _without_spaces(text, *span)
            labels.append(TokenLabel(text[start:stop], head.labels[best], float(scores[best]), start, stop))
    return labels


def last_token(ids: Sequence[int], pad_id: int | None) -> int:
    """Index of the last non-padding token, as transformers' classifiers take it."""
    return max((i for i, token in enumerate(ids) if token != pad_id), default=0 if pad_id is not None else -1)


def _require(model: Model, kind: str) -> HeadConfig:
    head = model.config.head
    if head.kind != kind:
        raise UnsupportedError(
            f"this checkpoint has a head for {_words(head.kind)}; this needs one for {_words(kind)}"
        )
    return head


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _check_length(model: Model, ids: Sequence[int]) -> None:
    """Raises RequestError for a sequence without tokens, ContextLengthError for one that is too long."""
    if not ids:
        raise RequestError("a text is empty, and the model adds no token of its own", param="texts")
    if len(ids) > model.config.max_context:
        raise ContextLengthError(len(ids), model.config.max_context)


def _probabilities(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Softmax."""
    weights: npt.NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    weights /= weights.sum()
    return weights


def _without_spaces(text: str, start: int, stop: int) -> tuple[int, int]:
    """The piece without spaces at its ends, which belong to tokens and to no answer."""
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())
