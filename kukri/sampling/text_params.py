"""Texts in sampling parameters, converted to token ids if there is a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kukri.sampling.fields import MAX_STOPS
from kukri.sampling.grammar import Grammar, GrammarTokenizer, compiled
from kukri.sampling.params import SamplingParams, TokenSet

_MOST_PREDICTED = 2**17  # characters of a prediction that drafts are looked up in: no answer is longer
_MOST_KEPT = 2 * MAX_STOPS  # texts of breakers whose tokens are remembered: the texts of two requests
_VOCABULARIES: WeakKeyDictionary[Any, _TokenTexts] = WeakKeyDictionary()


def resolve_texts(params: SamplingParams, tokenizer: GrammarTokenizer) -> SamplingParams:
    """`params` with ids for texts in bad_words, dry_sequence_breakers and prediction, and the grammar
    compiled.

    A bad word is banned as it is tokenized at the start of a text and after a space. A breaker stands for
    all tokens that contain it; if none does, for the tokens that it is encoded as. Of a prediction the first
    2^17 characters count. Raises RequestError on
    a grammar that cannot be served.
    """
    changes: dict[str, Any] = {}
    if any(isinstance(word, str) for word in params.bad_words):
        changes["bad_words"] = list(_encoded(params.bad_words, tokenizer))
    if "dry" in params.active_stages and any(isinstance(text, str) for text in params.dry_sequence_breakers):
        changes["dry_sequence_breakers"] = list(_breakers(params.dry_sequence_breakers, tokenizer))
    if isinstance(params.prediction, str):
        changes["prediction"] = tokenizer.encode_inside(params.prediction[:_MOST_PREDICTED])
    if isinstance(params.grammar, Grammar):
        changes["grammar"] = compiled(params.grammar, tokenizer)
    return replace(params, **changes) if changes else params


def _encoded(words: Iterable[Any], tokenizer: GrammarTokenizer) -> Iterable[tuple[int, ...]]:
    for word in words:
        if isinstance(word, str):
            yield tuple(tokenizer.encode_inside(word))
            yield tuple(tokenizer.encode_inside(" " + word))
        else:
            yield word


def _breakers(breakers: Iterable[Any], tokenizer: GrammarTokenizer) -> Iterable[Sequence[int] | TokenSet]:
    texts = _VOCABULARIES.get(tokenizer)
    if texts is None:
        texts = _VOCABULARIES[tokenizer] = _TokenTexts(tokenizer)
    for breaker in breakers:
        if isinstance(breaker, str):
            yield texts.holding(breaker) or tuple(tokenizer.encode_inside(breaker))
        else:
            yield breaker


class _TokenTexts:
    """The bytes of all tokens of a vocabulary, to find the tokens that hold a text."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self._ends = np.cumsum([len(token) + 1 for token in tokens])
        self._text = b"\xff".join([*tokens, b""])  # text has no such byte
        self._bytes = np.frombuffer(self._text, np.uint8)
        self._found: dict[bytes, TokenSet] = {}  # a few texts at most: most requests have the default ones

    def holding(self, text: str) -> TokenSet:
        """The ids of the tokens that contain a text."""
        wanted = text.encode("utf-8", "replace")  # JSON can spell half a character
        found = self._found.get(wanted)
        if found is None:
            found = TokenSet(self._search(wanted) if wanted in self._text else ())
            if len(self._found) >= _MOST_KEPT:
                del self._found[next(iter(self._found))]
            self._found[wanted] = found
        return found

    def _search(self, wanted: bytes) -> list[int]:
        places = np.flatnonzero(self._bytes[: len(self._bytes) - len(wanted)] == wanted[0])
        for i, byte in enumerate(wanted):
            places = places[self._bytes[places + i] == byte]
        found: list[int] = np.searchsorted(self._ends, places, "right").tolist()
        return found
