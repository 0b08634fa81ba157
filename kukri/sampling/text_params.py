"""Texts in sampling parameters, converted to token ids if there is a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from kukri.sampling.grammar import Grammar, GrammarTokenizer, compiled
from kukri.sampling.params import SamplingParams

_VOCABULARIES: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()


def resolve_texts(params: SamplingParams, tokenizer: GrammarTokenizer) -> SamplingParams:
    """`params` with ids for texts in bad_words, dry_sequence_breakers and prediction, and the grammar
    compiled.

    A bad word is banned as it is tokenized at the start of a text and after a space. A breaker stands for
    all tokens that contain it; if none does, for the tokens that it is encoded as. Raises RequestError on
    a grammar that cannot be served.
    """
    changes: dict[str, Any] = {}
    if any(isinstance(word, str) for word in params.bad_words):
        changes["bad_words"] = list(_encoded(params.bad_words, tokenizer))
    if "dry" in params.active_stages and any(isinstance(text, str) for text in params.dry_sequence_breakers):
        changes["dry_sequence_breakers"] = list(_containing(params.dry_sequence_breakers, tokenizer))
    if isinstance(params.prediction, str):
        changes["prediction"] = tokenizer.encode_inside(params.prediction)
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


def _containing(breakers: Iterable[Any], tokenizer: GrammarTokenizer) -> Iterable[tuple[int, ...]]:
    vocabulary = _VOCABULARIES.get(tokenizer)
    if vocabulary is None:
        vocabulary = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        _VOCABULARIES[tokenizer] = vocabulary
    for breaker in breakers:
        if isinstance(breaker, str):
            text = breaker.encode("utf-8", "replace")  # JSON can spell half a character
            found: list[tuple[int, ...]] = [(i,) for i, token in enumerate(vocabulary) if text in token]
            yield from found or [tuple(tokenizer.encode_inside(breaker))]
        else:
            yield breaker
