"""Texts in sampling parameters become the token ids that they stand for."""

from __future__ import annotations

import pytest

from kukri.sampling import SamplingParams, resolve_texts, text_params
from kukri.sampling.fields import MAX_STOPS
from kukri.sampling.params import TokenSet

WORDS = [b"the", b"\n", b" cat", b"cat", b".\n", b"c", b"at", b" "]


class Words:
    """A tokenizer of a few words: the longest that fits."""

    n_vocab = len(WORDS)

    def encode_inside(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            word = max((w for w in WORDS if rest.startswith(w)), key=len)
            ids.append(WORDS.index(word))
            rest = rest[len(word) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id]


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    """Would catch a ban that a leading space escapes, and ids that are taken for text."""
    params = resolve_texts(SamplingParams(bad_words=["cat", [5, 6]]), Words())
    assert params.bad_words == ((3,), (2,), (5, 6))


def test_a_breaker_is_every_token_that_contains_it() -> None:
    """Would catch a line that ends inside of a token and does not end a repetition."""
    asked = SamplingParams(dry_multiplier=1, dry_sequence_breakers=["\n", "the c", [7]])
    assert resolve_texts(asked, Words()).dry_sequence_breakers == (
        TokenSet([1, 4]), (0, 7, 5), (7,)
    )  # fmt: skip


def test_of_a_prediction_its_beginning_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a megabyte of drafts that no answer is long enough for."""
    monkeypatch.setattr(text_params, "_MOST_PREDICTED", 4)
    assert resolve_texts(SamplingParams(prediction="cat\n\n\n"), Words()).prediction == (3, 1)


def test_parameters_without_texts_stay_as_they_are() -> None:
    """Would catch the vocabulary being read for a request that has no use for it."""
    params = SamplingParams(bad_words=[[1]])
    assert resolve_texts(params, Words()) is params


class Letters(Words):
    """A tokenizer of bytes."""

    n_vocab = 256

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_as_many_breakers_as_may_be_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a memory that holds fewer texts than one request has: each would search for all of them."""
    searched: list[bytes] = []
    search = text_params._TokenTexts._search

    def counted(texts: text_params._TokenTexts, wanted: bytes) -> list[int]:
        searched.append(wanted)
        return search(texts, wanted)

    monkeypatch.setattr(text_params._TokenTexts, "_search", counted)
    breakers = [chr(i) for i in range(33, 33 + MAX_STOPS)]
    params, tokenizer = SamplingParams(dry_multiplier=1, dry_sequence_breakers=breakers), Letters()
    first = resolve_texts(params, tokenizer)
    assert len(searched) == MAX_STOPS
    assert resolve_texts(params, tokenizer) == first
    assert len(searched) == MAX_STOPS
