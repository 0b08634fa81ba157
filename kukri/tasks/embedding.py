"""Texts to vectors, and queries and documents to scores, according to the model's files.

The hidden states come from requests to the engine (`Request.output`); prompts, lengths, pooling, dense layers
and the length of vectors follow sentence-transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from kukri.config import EmbeddingConfig, HeadConfig, Pooling
from kukri.dataclass import dataclass, field
from kukri.engine import Request, RequestMaker
from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.formats.sentence_transformers import PAIR_INSTRUCTION, DenseLayer
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models import Model
from kukri.tasks.late_interaction import LateEncoder
from kukri.tokenizer import Tokenizer
from kukri.tokenizer.tokenizer import as_text

logger = logging.getLogger("kukri.tasks.embedding")


@dataclass(frozen=True)
class Ranked:
    """A document by its place in the list that was given, its text, and its score: the higher, the closer."""

    index: int
    document: str
    score: float


@dataclass
class Encoded:
    """Texts as token ids; `truncated` has the indices of texts that were cut."""

    ids: list[list[int]] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    is_query: bool = False  # True for queries of a model with late interaction
    n_unseen: list[int] = field(default_factory=list)  # tokens at each one's end that no other sees


class PairJudge:
    """A prompt of a query and a document, to which a language model answers yes or no."""

    def __init__(self, tokenizer: Tokenizer, template: str, head: HeadConfig) -> None:
        """Raises UnsupportedError for a vocabulary without one token for either answer."""
        self.tokenizer, self.template = tokenizer, template
        self.after = tokenizer.encode_marked(template.partition("{document}")[2])
        self.after = self.after[int(self.after[:1] == [tokenizer.bos_id] and tokenizer.add_bos) :]
        names = {label.lower(): i for i, label in enumerate(head.labels)}
        self.columns: list[int] = [names[word] for word in ("yes", "no") if word in names]
        if head.kind == "language_model":
            ids = [tokenizer.encode_inside(word) for word in ("yes", "no")]
            if any(len(each) != 1 for each in ids):
                raise UnsupportedError('ranking requires a vocabulary with the tokens "yes" and "no"')
            self.columns = [each[0] for each in ids]

    def encode(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """The ids of the prompt; control tokens written in any of the texts stay text."""
        texts = {"{query}": query, "{document}": document, PAIR_INSTRUCTION: instruction or PAIR_INSTRUCTION}
        texts = {part: as_text(text, self.tokenizer.special_texts) for part, text in texts.items()}
        parts = re.split(rf"(\{{query\}}|\{{document\}}|{PAIR_INSTRUCTION})", self.template)
        return self.tokenizer.encode_marked("".join(texts.get(part, part) for part in parts))

    def cut(self, ids: list[int], n_tokens: int) -> list[int]:
        """The prompt with tokens taken from the document's end, so that `n_tokens` are left."""
        if len(ids) <= n_tokens:
            return ids
        return ids[: max(n_tokens - len(self.after), 0)] + self.after[-n_tokens:]

    def score(self, logits: FloatArray) -> float:
        """The probability of yes against no, by the logits [V] or [labels] of the prompt's last token."""
        yes, no = logits[self.columns] if len(self.columns) == 2 else (logits[0], 0.0)
        return float(1 / (1 + np.exp(np.float64(no) - np.float64(yes))))


class TextEncoder:
    """A model's way from texts to vectors and scores. Attributes: config, max_tokens of a text."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EmbeddingConfig,
        dense: Sequence[DenseLayer] = (),
        max_context: int | None = None,
    ) -> None:
        """`max_context` is the user's limit, which overrides the limit in the files."""
        self.model, self.tokenizer, self.config, self._dense = model, tokenizer, config, tuple(dense)
        limit = model.config.max_context
        self.max_tokens = min(limit, max_context or config.max_tokens or limit)
        width = model.config.d_vector or model.config.d_model
        for layer in self._dense:
            if layer.weight.shape[1] != width:
                raise UnsupportedError(
                    f"a dense layer must take {width} numbers, not {layer.weight.shape[1]}"
                )
            width = len(layer.weight)
        self.width = width  # numbers per vector
        self.late: LateEncoder | None = None
        if config.late is not None:
            self.late = LateEncoder(tokenizer, config.late, model.config, max_context)
            self.max_tokens = min(limit, max_context or limit)
        self.judge: PairJudge | None = None
        if config.pair_template and self.model.config.is_causal:
            self.judge = PairJudge(tokenizer, config.pair_template, self.model.config.head)

    @property
    def is_cross_encoder(self) -> bool:
        """True if the model scores a query and a document together."""
        is_classifier = self.model.config.head.kind == "sequence_classification"
        return self.judge is not None or (is_classifier and not self.model.config.is_causal)

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Encoded:
        """The token ids of texts, each after the prompt.

        A text beyond the limit is cut with `truncate`, which is logged as a warning, and raises
        ContextLengthError without. Raises RequestError for a prompt name that the model does not have.
        """
        return self._encoded(texts, self._prompt(prompt, prompt_name), self.max_tokens, truncate)

    def encode_tokens(
        self, texts: Sequence[str], *, prompt_name: str | None = None, truncate: bool = False
    ) -> Encoded:
        """The token ids of texts that get a vector for each token.

        With late interaction they are queries if `prompt_name` is "query", else documents; the rest is as
        `encode` says.
        """
        if self.late is None:
            return self.encode(texts, prompt_name=prompt_name, truncate=truncate)
        if prompt_name not in (None, "query", "document"):
            raise RequestError.of("prompt_name", f"must be query or document, not {prompt_name!r}")
        is_query = prompt_name == "query"
        found = self._encoded(texts, "", self.late.room(is_query), truncate)
        marked = [self.late.marked(ids, is_query) for ids in found.ids]
        return Encoded([ids for ids, _ in marked], found.truncated, is_query, [n for _, n in marked])

    def _encoded(self, texts: Sequence[str], before: str, n_most: int, truncate: bool) -> Encoded:
        """The token ids of texts after a prompt, `n_most` of each; see `encode`."""
        found = Encoded()
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise RequestError(f"a text must be a string, not {type(text).__name__}", param="texts")
            most = None if truncate else n_most
            ids = self.tokenizer.encode(before + text, add_special=True, max_tokens=most)
            if len(ids) > n_most:
                if not truncate:
                    raise ContextLengthError(len(ids), n_most)
                found.truncated.append(i)
                ids = self._cut(ids, n_most)
            found.ids.append(ids)
        self._report(found, n_most)
        return found

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        instruction: str | None = None,
    ) -> Encoded:
        """The token ids of the query and each document: BOS, query, EOS, document, EOS, with one EOS more
        before the document for models that want it.

        Of a language model it is a prompt with both, and the instruction in place of the usual one. With
        `truncate` the longer of the two is cut until both fit, of a prompt the document; else as `encode`.
        """
        found = Encoded()
        if self.judge is not None:
            return self._encode_prompts(self.judge, query, documents, truncate, instruction)
        first = self.tokenizer.encode(query, add_special=True)
        for i, document in enumerate(documents):
            second = self._second(document)
            n_tokens = len(first) + len(second)
            if n_tokens > self.max_tokens:
                if not truncate:
                    raise ContextLengthError(n_tokens, self.max_tokens)
                found.truncated.append(i)
            n_first, n_second = _fit(len(first), len(second), self.max_tokens)
            found.ids.append(self._cut(first, n_first) + self._cut(second, n_second))
        self._report(found)
        return found

    def _encode_prompts(
        self,
        judge: PairJudge,
        query: str,
        documents: Sequence[str],
        truncate: bool,
        instruction: str | None,
    ) -> Encoded:
        found = Encoded()
        for i, document in enumerate(documents):
            ids = judge.encode(query, document, instruction)
            if len(ids) > self.max_tokens:
                if not truncate:
                    raise ContextLengthError(len(ids), self.max_tokens)
                found.truncated.append(i)
            found.ids.append(judge.cut(ids, self.max_tokens))
        self._report(found)
        return found

    def requests(
        self,
        maker: RequestMaker,
        texts: Sequence[Sequence[int]],
        pooling: Pooling | None = None,
        *,
        priority: int = 0,
        client: str = "",
        prefix_scope: str = "",
        adapter: str | None = None,
    ) -> list[Request]:
        """The requests whose `rows` are the pooled states [D] of texts when they have ended; not queued.

        `priority`, `client` and `prefix_scope` are as in `RequestMaker.make_requests`. Raises RequestError
        for a sequence without tokens and for ids outside the vocabulary, ContextLengthError for one that is
        too long.
        """
        if self.late is not None:
            raise RequestError(
                "a vector for a text is not supported: the model has one for each token, so use "
                "embed_tokens(), /v1/embeddings or /pooling",
                param="model",
            )
        self.check(texts)
        pooling = pooling or self.config.pooling
        made: list[Request] = []
        for ids in texts:
            first_row, stop_row = 0, None
            if pooling == "cls" and self.model.config.is_causal:
                ids = ids[:1]  # no later token changes the state of the first
            elif pooling == "cls":
                stop_row = 1
            elif pooling == "last":
                first_row = len(ids) - 1
            made.append(
                maker.make_output_request(
                    ids,
                    "pooled",
                    first_row=first_row,
                    stop_row=stop_row,
                    priority=priority,
                    client=client,
                    prefix_scope=prefix_scope,
                    adapter=adapter,
                )
            )
        return made

    def token_requests(self, maker: RequestMaker, texts: Encoded, **options: Any) -> list[Request]:
        """The requests whose `rows` are the states [T, D] of the tokens of texts; else as `requests`."""
        self.check(texts.ids)
        n_unseen = texts.n_unseen or [0] * len(texts.ids)
        return [
            maker.make_output_request(ids, "hidden", n_unseen=n, **options)
            for ids, n in zip(texts.ids, n_unseen, strict=True)
        ]

    def pair_requests(
        self, maker: RequestMaker, pairs: Sequence[Sequence[int]], **options: Any
    ) -> list[Request]:
        """The requests whose `rows` are the outputs [1, labels or V] for pairs; else as `requests`."""
        self.check(pairs)
        return [
            maker.make_output_request(
                ids,
                "logits",
                first_row=0 if self.judge is None else len(ids) - 1,
                stop_row=1 if self.judge is None else None,
                token_types=self.token_types(ids),
                **options,
            )
            for ids in pairs
        ]

    def token_types(self, ids: Sequence[int]) -> IntArray | None:
        """0 for the first of a pair of texts and 1 for the second, int32 [T]; None if the model has none."""
        if self.model.config.n_token_types < 2:
            return None
        is_end = np.asarray(ids) == self.tokenizer.vocabulary.eos_id
        is_end[-1:] = False
        return np.concatenate([[0], np.minimum(np.cumsum(is_end[:-1]), 1)]).astype(np.int32)

    def vectors(
        self, pooled: Iterable[FloatArray], normalize: bool | None = None, dimensions: int | None = None
    ) -> FloatArray:
        """The vectors float32 [n, width] of pooled states: dense layers applied, cut and normalized."""
        rows = list(pooled)
        for layer in self._dense:
            rows = [layer(row) for row in rows]
        vectors = np.array(rows, np.float32).reshape(-1, self.width)
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
        return (
            normalized(vectors) if (self.config.normalizes if normalize is None else normalize) else vectors
        )

    def token_vectors(
        self, texts: Encoded, states: Sequence[FloatArray], *, normalize: bool = True
    ) -> list[FloatArray]:
        """The vectors float32 [T, width] of the tokens of each text by their states [T, D].

        Dense layers are applied. With late interaction, skipped tokens of documents have none.
        """
        found = []
        for ids, vectors in zip(texts.ids, states, strict=True):
            for layer in self._dense:
                vectors = layer(vectors)
            if self.late is not None:
                vectors = self.late.kept(ids, vectors, texts.is_query)
            found.append(normalized(vectors) if normalize else vectors)
        return found

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises RequestError for a number of dimensions that vectors cannot be cut to."""
        if dimensions is None or dimensions == self.width:
            return
        if self.model.config.is_causal:
            raise RequestError.of(
                "dimensions",
                f"must be {self.width}: the model was not trained for shorter vectors",
                code="unsupported_parameter",
            )
        if not 1 <= dimensions <= self.width:
            raise RequestError.of("dimensions", f"must be from 1 to {self.width}, not {dimensions}")

    def check_ranks(self, instruction: str | None = None) -> None:
        """Raises UnsupportedError for a model that cannot rank documents, RequestError for an instruction to
        one that has no place for it.
        """
        head = self.model.config.head
        if instruction is not None and (self.judge is None or PAIR_INSTRUCTION not in self.judge.template):
            raise RequestError.of("instruction", "is not supported by this model, only by Qwen3-Reranker")
        if self.judge is not None:
            return
        if head.kind not in ("none", "language_model") and not (
            self.is_cross_encoder and len(head.labels) == 1
        ):
            kind = head.kind.replace("_", " ")
            raise UnsupportedError(
                f"ranking is not supported by this model ({kind}): use a cross-encoder with one label, or "
                "an embedding model"
            )

    def scores(self, rows: Sequence[FloatArray]) -> list[float]:
        """Return the scores of a cross-encoder's outputs: a sigmoid, unless the files say otherwise.

        A language model's score is the probability of yes against no.
        """
        if self.judge is not None:
            return [self.judge.score(row[0]) for row in rows]
        raw = np.array([row[0, 0] for row in rows], np.float64)
        scores: list[float] = (1 / (1 + np.exp(-raw)) if self.config.score == "sigmoid" else raw).tolist()
        return scores

    def rank_prompts(self) -> tuple[str | None, str | None]:
        """The names of the prompts for queries and for documents, if the model has them."""
        names = self.config.prompts
        document = next((name for name in ("document", "passage") if name in names), None)
        return "query" if "query" in names else None, document

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        if prompt is not None:
            return prompt
        name = self.config.default_prompt if name is None else name
        if name is not None and name not in self.config.prompts:
            known = ", ".join(self.config.prompts) or "none"
            raise RequestError(
                f"the prompt {name!r} was not found: the model has {known}", param="prompt_name"
            )
        return "" if name is None else self.config.prompts[name]

    def _second(self, text: str) -> list[int]:
        """A text's ids as the second of a pair: without BOS, or after EOS for models that want it."""
        ids = self.tokenizer.encode(text, add_special=True)
        ids = ids[1:] if self.tokenizer.add_bos else ids
        return ids[-1:] + ids if self.tokenizer.add_separator else ids

    def _cut(self, ids: list[int], n_tokens: int | None = None) -> list[int]:
        """The first tokens of a text, and its EOS."""
        n_tokens = self.max_tokens if n_tokens is None else n_tokens
        n_last = int(self.tokenizer.add_eos and len(ids) > n_tokens)
        return ids[: max(n_tokens - n_last, 0)] + ids[len(ids) - n_last :] if n_last else ids[:n_tokens]

    def _report(self, found: Encoded, n_most: int | None = None) -> None:
        if found.truncated:
            logger.warning(
                "%d of %d texts were truncated to %d tokens",
                len(found.truncated), len(found.ids), n_most or self.max_tokens,
            )  # fmt: skip

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Raises RequestError for a text without tokens or with ids outside the vocabulary, and
        ContextLengthError for one that is too long.
        """
        n_vocab = self.model.config.n_vocab
        for ids in texts:
            if not ids:
                raise RequestError(
                    "a text must not be empty, because the model adds no tokens of its own", param="texts"
                )
            if len(ids) > self.max_tokens:
                raise ContextLengthError(len(ids), self.max_tokens)
            wrong = next((i for i in ids if not 0 <= i < n_vocab), None)
            if wrong is not None:
                raise RequestError(
                    f"the token id {str(wrong)[:30]} must be from 0 to {n_vocab - 1}",
                    param="texts",
                )


def _fit(n_first: int, n_second: int, n_most: int) -> tuple[int, int]:
    """The lengths of two texts after tokens are taken from the longer one until both fit."""
    shorter = min(n_first, n_second, n_most // 2)
    if n_first + n_second <= n_most:
        return n_first, n_second
    return (shorter, n_most - shorter) if n_first <= n_second else (n_most - shorter, shorter)


def check_pooling(pooling: str | None) -> None:
    """Raises RequestError unless it is one of `Pooling`, or None."""
    if pooling is not None and pooling not in get_args(Pooling):
        raise RequestError.of("pooling", f"must be one of {', '.join(get_args(Pooling))}")


def normalized(vectors: FloatArray) -> FloatArray:
    """Return the vectors [n, D] scaled to length 1; vectors of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: FloatArray = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)
    return scaled


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    """Return the `top_n` documents with the best scores, best first; equal scores keep their order."""
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    return [Ranked(i, documents[i], scores[i]) for i in order[:top_n]]
