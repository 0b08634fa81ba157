"""What models with a head do with texts: spans that answer a question, labels, embeddings.

Scores are computed as transformers' pipelines compute them. Offsets count characters of the caller's text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kukri.config import HeadConfig
from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.kernels.types import FloatArray
from kukri.models import KVCache, Model
from kukri.tokenizer import Tokenizer

Pooling = Literal["mean", "last", "cls"]
_PIECE_TOKENS = 64  # of a text or several, computed at a time when they are embedded
_ROWS, _ROW_TOKENS = 16, 256  # short texts that are embedded together, and how short they are


@dataclass(frozen=True)
class Span:
    """A piece of the context, `context[start:stop]`, and how probable it is as the answer, 0 to 1."""

    text: str
    score: float
    start: int
    stop: int


@dataclass(frozen=True)
class Label:
    """A label of a text, and its score: a probability, or for a regression the number itself."""

    label: str
    score: float


@dataclass(frozen=True)
class TokenLabel:
    """The most probable label of a token, `text[start:stop]` of what was classified."""

    text: str
    label: str
    score: float
    start: int
    stop: int


def answer(
    model: Model, tokenizer: Tokenizer, question: str, context: str, *, top_k: int, max_answer_tokens: int
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
    outputs = _outputs(model, ids)[inside]
    starts, ends = _probabilities(outputs[:, 0]), _probabilities(outputs[:, 1])
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


def classify(model: Model, tokenizer: Tokenizer, text: str) -> list[Label]:
    """Every label with its score, the best first."""
    head = _require(model, "sequence_classification")
    ids = tokenizer.encode(text, add_special=True)
    logits = _outputs(model, ids)[last_token(ids, head.pad_id)]
    if head.problem_type == "regression":
        scores: npt.NDArray[np.float64] = logits.astype(np.float64)
    elif head.problem_type == "multi_label_classification" or len(logits) == 1:
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    else:
        scores = _probabilities(logits)
    best_first = np.argsort(-scores, kind="stable")
    return [Label(head.labels[i], float(scores[i])) for i in best_first]


def classify_tokens(model: Model, tokenizer: Tokenizer, text: str) -> list[TokenLabel]:
    """A label for each token of the text; tokens that the model wants around it are left out."""
    head = _require(model, "token_classification")
    ids, spans = tokenizer.encode_spans(text)
    labels: list[TokenLabel] = []
    for logits, span in zip(_outputs(model, ids), spans, strict=True):
        if span is not None:
            scores = _probabilities(logits)
            best, (start, stop) = int(scores.argmax()), _without_spaces(text, *span)
            labels.append(TokenLabel(text[start:stop], head.labels[best], float(scores[best]), start, stop))
    return labels


class Embedder:
    """Makes vectors of texts, a piece at a time. For one thread, and for one `run` after another.

    It keeps the caches that the texts are read into, and what is compiled for them.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._short: KVCache | None = None  # for several texts
        self._long: KVCache | None = None  # for one

    def groups(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The indices of the texts as they are best run: short ones of like length together, long ones alone.

        Raises RequestError for a text without tokens and for ids outside the vocabulary, ContextLengthError
        for a text that is too long.
        """
        n_vocab = self.model.config.n_vocab
        for ids in texts:
            _check_length(self.model, ids)
            wrong = next((i for i in ids if not 0 <= i < n_vocab), None)
            if wrong is not None:
                raise RequestError(
                    f"token id {str(wrong)[:30]} is outside the vocabulary: ids go from 0 to {n_vocab - 1}",
                    param="texts",
                )
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        n_short = sum(len(ids) <= _ROW_TOKENS for ids in texts)
        short, long = by_length[:n_short], by_length[n_short:]
        return [short[i : i + _ROWS] for i in range(0, n_short, _ROWS)] + [[i] for i in long]

    def run(self, texts: Sequence[Sequence[int]], pooling: Pooling) -> Generator[None, None, FloatArray]:
        """Pools the texts of a group: yields after each piece of work, returns float32 [n, D].

        A text's vector is the same to the bit whatever is beside it.
        """
        cache, longest = self._cache_for(texts), max(map(len, texts))
        padded = np.zeros((cache.batch_size, longest), np.int64)
        mask = np.zeros((cache.batch_size, longest), np.bool_)
        for row, ids in enumerate(texts):
            padded[row, : len(ids)], mask[row, : len(ids)] = ids, True
        hidden = np.empty((len(texts), longest, self.model.config.d_model), np.float32)
        n_columns = max(_PIECE_TOKENS // len(texts), 1)
        for start in range(0, longest, n_columns):
            stop = min(start + n_columns, longest)
            rows = self.model.bound(
                padded[:, start:stop], mask[:, :stop], cache=cache, program=self.model.hidden
            )
            hidden[:, start:stop] = rows[: len(texts)]
            yield
        return np.stack([_pooled(hidden[row, : len(ids)], pooling) for row, ids in enumerate(texts)])

    def _cache_for(self, texts: Sequence[Sequence[int]]) -> KVCache:
        """An empty cache with room for a group."""
        limit, longest = self.model.config.max_context, max(map(len, texts))
        if longest <= _ROW_TOKENS:
            cache = self._short = self._short or self.model.new_cache(_ROWS, min(_ROW_TOKENS, limit))
        else:
            if self._long is not None and self._long.max_tokens < longest:
                self._long = None  # its memory is free before the next is taken
            size = min(limit, 1 << (longest - 1).bit_length())
            cache = self._long = self._long or self.model.new_cache(1, size)
        cache.crop(0)
        return cache


def check_pooling(pooling: str) -> None:
    """Raises RequestError unless it is one of `Pooling`."""
    if pooling not in get_args(Pooling):
        raise RequestError(f"pooling must be one of {', '.join(get_args(Pooling))}", param="pooling")


def normalized(vectors: FloatArray) -> FloatArray:
    """The vectors [n, D] with length 1; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: FloatArray = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)
    return scaled


def embed(
    embedder: Embedder, tokenizer: Tokenizer, texts: Sequence[str], *, pooling: Pooling, normalize: bool
) -> FloatArray:
    """A vector for each text, float32 [n, D]: the last norm's output at one token, or its mean over all."""
    check_pooling(pooling)
    ids = [tokenizer.encode(text, add_special=True) for text in texts]
    vectors = np.empty((len(texts), embedder.model.config.d_model), np.float32)
    for group in embedder.groups(ids):
        vectors[group] = _result(embedder.run([ids[i] for i in group], pooling))
    return normalized(vectors) if normalize else vectors


def _pooled(hidden: FloatArray, pooling: Pooling) -> FloatArray:
    """One row of [T, D], or the mean of all."""
    pooled: FloatArray = {"mean": hidden.mean(axis=0), "last": hidden[-1], "cls": hidden[0]}[pooling]
    return pooled


def _result(pieces: Generator[None, None, FloatArray]) -> FloatArray:
    """What work in pieces returns, all of it done."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def last_token(ids: Sequence[int], pad_id: int | None) -> int:
    """The index of the last token that is no pad, as transformers' classifiers take it."""
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


def _outputs(model: Model, ids: list[int]) -> FloatArray:
    """The model's outputs for each token of a text: float32 [T, width]."""
    _check_length(model, ids)
    outputs: FloatArray = model.bound(ids)[0]
    return outputs


def _check_length(model: Model, ids: Sequence[int]) -> None:
    """Raises RequestError for a text without tokens, ContextLengthError for one that is too long."""
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
