"""GGUF keys of a tokenizer.json: tokens, their types, scores and merges, special tokens, chat template."""

from __future__ import annotations

from base64 import b64decode
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import tokenizers

from kukri.errors import UnsupportedError, reading
from kukri.formats.huggingface.directory import TokenizerFiles
from kukri.tokenizer.gguf_keys import TokenizerKeys
from kukri.tokenizer.huggingface_reader import Parts, load_tokenizer, steps_of
from kukri.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from kukri.tokenizer.tokenizer import Tokenizer, merges_from_scores
from kukri.tokenizer.unigram import unigram
from kukri.tokenizer.vocabulary import (
    DROPS_SPACE,
    FLAG_KEYS,
    GEMMA4,
    PREPENDS_ONCE,
    SPACE_MARK,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    ends_by_text,
    stored_piece,
)

# Text that every two pre-tokenizers cut differently: contractions in both cases, digits, scripts, line ends.
_PROBES = (
    "I'm SURE'LL we'Ve it's 1 12 123 1234 12345 3rd x2y\t tab  two   three    ",
    "line\nfeed\r\n\r\nhi \n  indented\n\n\n(a)b[c]{d}; e=f+g <|x|> $5.00 ~^`!!... 'quoted' \"s\" /path/\n",
    "Ünïcödé naïve cafe\u0301 日本語テスト Привет мир שלום हिन्दी ١٢٣ ④ ½ 🙂👍🏽",
    "a\u200db İstanbul ǅ CamelCaseWORDS",
    " leading, trailing ",
)


def tokenizer_metadata(files: TokenizerFiles) -> dict[str, Any]:
    """The keys `tokenizer.*`. Raises UnsupportedError for settings that GGUF has no key for."""
    with reading(files.path):
        return _metadata(files)


def _metadata(files: TokenizerFiles) -> dict[str, Any]:
    parts = Parts(files)
    text = parts.build()
    vocabulary = parts.vocabulary
    adds_bos, adds_eos = parts.adds(text)
    keys: dict[str, Any] = {
        "model": vocabulary.kind,
        "tokens": [_stored_text(vocabulary, i) for i in range(len(vocabulary.tokens))],
        "token_type": np.array(vocabulary.types, np.int32),
    }
    merges = parts.merges()
    if vocabulary.kind == "bert":
        keys |= _word_piece_keys(text, vocabulary, files)
    elif vocabulary.kind == "t5":
        keys |= _unigram_keys(text, parts, files) | {"add_sep_token": adds_eos and parts.adds_separator(text)}
    elif vocabulary.kind == "llama":
        keys |= _sentencepiece_keys(text, vocabulary, merges, files)
    else:
        keys |= {"pre": _pre_tokenizer(text, parts, files), "merges": [" ".join(pair) for pair in merges]}
    keys |= {
        **_special_ids(vocabulary, files),
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
    }
    keys |= _flags(vocabulary, among_marks=vocabulary.kind == "llama" and not keys["add_space_prefix"])
    adds_space = keys.get("add_space_prefix", vocabulary.kind == "bert")
    if parts.drops_leading_space != adds_space:
        keys[DROPS_SPACE] = parts.drops_leading_space
    if parts.build_later(text) is not None:
        keys[PREPENDS_ONCE] = True
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    if files.chat_template is not None:
        metadata["tokenizer.chat_template"] = files.chat_template
    _check_added_tokens(files, metadata)
    return metadata


def _flags(vocabulary: Vocabulary, *, among_marks: bool) -> dict[str, Any]:
    """Return the lists of added tokens by their flags.

    With `among_marks` the flag `normalized` is left out, because readers look among the marks for
    user-defined tokens in any case.
    """
    found = {name: sorted(ids) for name, ids in vocabulary.flags.items()}
    if among_marks:
        found.pop("normalized", None)
    return {FLAG_KEYS[name]: np.array(ids, np.int32) for name, ids in found.items() if ids}


def _check_added_tokens(files: TokenizerFiles, metadata: dict[str, Any]) -> None:
    """Raise UnsupportedError if readers of these keys would find an added token otherwise in a text."""
    theirs, ours = load_tokenizer(files), Tokenizer.from_metadata(metadata, path=files.path)
    for token in [*theirs.special_texts, *theirs.vocabulary.user_defined]:
        written = token.replace(SPACE_MARK, " ") if theirs.vocabulary.kind in ("llama", "t5") else token
        text = f"x {written}\n ab{written}y"
        ids = theirs.encode_marked(text)
        if ids != ours.encode_marked(text) or theirs.decode(ids) != ours.decode(ids):
            raise UnsupportedError(
                f"{files.path}: the added token {token!r} is not supported in GGUF, whose readers would "
                "split texts differently: keep the safetensors"
            )


def _sentencepiece_keys(
    text: tokenizers.Tokenizer, vocabulary: Vocabulary, merges: list[tuple[str, str]], files: TokenizerFiles
) -> dict[str, Any]:
    """The keys of a SentencePiece tokenizer: scores that imply its merges, or as Gemma 4's the merges."""
    # readers match user-defined tokens in the text before anything merges
    defined = {*vocabulary.user_defined}
    learned = [pair for pair in merges if defined.isdisjoint((*pair, "".join(pair)))]
    scores = _scores(vocabulary, learned)
    stored = TokenizerKeys({"tokenizer.ggml.scores": scores}, files.path)
    adds_space = text.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE_MARK)
    keys = {"pre": "default", "scores": scores, "add_space_prefix": adds_space}
    if set(merges_from_scores(vocabulary, stored)) == set(learned):
        return keys
    # readers of merges cut text at runs of line ends first, and put no space before it
    crosses = any(0 < "".join(pair).count("\n") < len("".join(pair)) for pair in learned)
    if adds_space or crosses:
        raise UnsupportedError(
            f"{files.path}: these merges are not supported in GGUF, which requires a SentencePiece model's"
        )
    return keys | {"model": GEMMA4, "merges": [" ".join(pair) for pair in learned]}


def _word_piece_keys(
    text: tokenizers.Tokenizer, vocabulary: Vocabulary, files: TokenizerFiles
) -> dict[str, Any]:
    """The keys of a WordPiece tokenizer, which readers take for one of lower case without accents."""
    if text.normalizer is None or text.normalizer.normalize_str("ÄB") != "ab":
        raise UnsupportedError(
            f"{files.path}: this tokenizer is not supported in GGUF, whose readers turn WordPiece's text "
            "into lower case without accents"
        )
    tokens = [
        token if i in vocabulary.special_ids else stored_piece(token or f"[PAD{i}]")
        for i, token in enumerate(vocabulary.tokens)
    ]
    ends = {"cls_token_id": vocabulary.bos_id, "seperator_token_id": vocabulary.eos_id}  # GGUF's spelling
    return {"pre": "default", "tokens": tokens, **{key: i for key, i in ends.items() if i is not None}}


def _unigram_keys(text: tokenizers.Tokenizer, parts: Parts, files: TokenizerFiles) -> dict[str, Any]:
    """Return the keys of a unigram tokenizer: scores, normalization, and how it treats spaces."""
    steps = steps_of(files.tokenizer.get("normalizer"), "normalizers")
    compiled = (step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled")
    charsmap = b64decode(next(compiled, None) or "")
    scores = np.array(parts.scores, np.float32)
    if text.pre_tokenizer is not None:
        cut = _cut(text.pre_tokenizer, text.normalizer)
        for adds, joins in product((True, False), repeat=2):
            made = unigram(parts.vocabulary, scores, charsmap, adds_space=adds, joins_spaces=joins)
            if cut == _cut(made.pre_tokenizer, made.normalizer):
                return {
                    "pre": "default",
                    "scores": scores,
                    "token_type": np.array(_types(parts.vocabulary), np.int32),
                    "precompiled_charsmap": np.frombuffer(charsmap, np.uint8) if charsmap else None,
                    "add_space_prefix": adds,
                    "remove_extra_whitespaces": joins,
                }
    raise UnsupportedError(f"{files.path}: this tokenizer's treatment of spaces is not supported in GGUF")


def _types(vocabulary: Vocabulary) -> list[int]:
    """Return the type of each token. The token for unknown text has a type of its own."""
    return [UNKNOWN if i == vocabulary.unk_id else kind for i, kind in enumerate(vocabulary.types)]


def _pre_tokenizer(text: tokenizers.Tokenizer, parts: Parts, files: TokenizerFiles) -> str:
    """The name of the pre-tokenizer that cuts text as this tokenizer does."""
    ignores_merges = parts.model.get("ignore_merges") is True
    if text.pre_tokenizer is not None:
        cut = _cut(text.pre_tokenizer, text.normalizer)
        named: dict[bool, str] = {}
        for name, known in PRE_TOKENIZERS.items():
            if known.ignore_merges not in named and cut == _known_cut(known):
                named[known.ignore_merges] = name
        if ignores_merges in named:
            return named[ignores_merges]
        if named and _merges_reach_all(parts):
            return named[not ignores_merges]
    raise UnsupportedError(
        f"{files.path}: this tokenizer's way of splitting text into words is not supported in GGUF, only "
        f"{', '.join(PRE_TOKENIZERS)}"
    )


def _merges_reach_all(parts: Parts) -> bool:
    """Return True if merges reach every token, so that looking up whole words first changes nothing."""
    ids = parts.text_ids()
    model = tokenizers.models.BPE(vocab=ids, merges=parts.merges())
    words = ((token, i) for token, i in ids.items() if token not in parts.added)
    return all([found.id for found in model.tokenize(token)] == [i] for token, i in words)


def _cut(pre_tokenizer: Any, normalizer: Any) -> list[list[str]]:
    """Return the words of each probe."""
    texts = _PROBES if normalizer is None else map(normalizer.normalize_str, _PROBES)
    return [[word for word, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]


@cache
def _known_cut(known: PreTokenizer) -> list[list[str]]:
    return _cut(known.build(), tokenizers.normalizers.NFC() if known.nfc else None)


def _stored_text(vocabulary: Vocabulary, i: int) -> str:
    """A token's text in GGUF, where a user-defined one of SentencePiece has the spaces that texts have."""
    text = vocabulary.tokens[i]
    if vocabulary.kind in ("llama", "t5") and vocabulary.types[i] == USER_DEFINED:
        text = text.replace(SPACE_MARK, " ")
    return text or f"[PAD{i}]"


def _scores(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return scores that imply the merges, as in SentencePiece: the first merge scores highest."""
    scores = np.zeros(len(vocabulary.tokens), np.float32)
    for rank in range(len(merges) - 1, -1, -1):
        scores[vocabulary.id_of["".join(merges[rank])]] = -rank
    return scores


def _special_ids(vocabulary: Vocabulary, files: TokenizerFiles) -> dict[str, int]:
    """Return the ids of special tokens. Keys name three that may end an answer; readers know others by
    text.
    """
    stated = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
    known = ends_by_text(vocabulary.id_of)
    others = [i for i in sorted(vocabulary.eos_ids) if i not in stated]
    # keys that readers do not need come last
    ends = stated + sorted(others, key=lambda i: i in known)
    if len(ends) > 3 and not set(ends[3:]) <= known:
        raise UnsupportedError(
            f"{files.path}: {len(ends)} tokens that end a text are not supported in GGUF, only three"
        )
    for i in ends:
        if i not in vocabulary.special_ids:
            raise UnsupportedError(
                f"{files.path}: {vocabulary.tokens[i]!r} must not end a text and be an ordinary word too"
            )
    ids = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends))
    named = {"bos": vocabulary.bos_id, "unknown": vocabulary.unk_id, "padding": _padding(vocabulary, files)}
    named["mask"] = vocabulary.mask_id
    return ids | {f"{name}_token_id": i for name, i in named.items() if i is not None}


def _padding(vocabulary: Vocabulary, files: TokenizerFiles) -> int | None:
    stated = files.settings.get("pad_token")
    text = stated.get("content") if isinstance(stated, dict) else stated
    return vocabulary.id_of.get(text) if isinstance(text, str) else None
