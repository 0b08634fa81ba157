"""The vocabulary of a GGUF file: texts, types, special ids and the bytes each token stands for."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import SupportsIndex

from tokenizers import AddedToken

from kukri.dataclass import dataclass, field
from kukri.errors import RequestError, UnsupportedError, brief
from kukri.tokenizer.gguf_keys import TokenizerKeys

# tokenizer.ggml.token_type, numbered as in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE_MARK = "▁"  # SentencePiece's spelling of a space
CONTINUATION = "##"  # WordPiece's mark of a piece that continues a word

# Tokens that end a turn or a document, whatever the metadata calls them: llama.cpp, src/llama-vocab.cpp at
# commit 00ad355e. The last three lines end a piece of code in fill-in-the-middle and repository formats.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eom_id|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "<|file_sep|>",
)
GEMMA4 = "gemma4"  # SentencePiece with merges, as tokenizer.json has them, and no scores that count
# How added tokens are found in a text, as tokenizer.json has it. GGUF has no keys for this: each of these
# keys is kukri's own, and lists the tokens that have the flag.
FLAG_KEYS = {name: f"kukri.{name}" for name in ("single_word", "lstrip", "rstrip", "normalized")}
# whether decoding drops a leading space, if that does not follow from whether encoding adds one
DROPS_SPACE = "kukri.drops_leading_space"
PREPENDS_ONCE = "kukri.prepends_once"  # a space is put before a text, and not again after a special token
_END_KEYS = ("eos", "eot", "eom")
_DEFAULT_IDS = {
    "llama": {"unknown": 0, "bos": 1, "eos": 2},
    "bert": {"unknown": 100, "bos": 101, "eos": 102},
    "t5": {"unknown": 2, "eos": 1},
}


def _byte_alphabet() -> dict[int, int]:
    """Code point of each letter of GPT-2's byte alphabet -> the byte it spells."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
_BYTE_TEXTS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens.

    `kind` is "gpt2" (byte-level BPE), "llama" (SentencePiece BPE), "bert" (WordPiece) or "t5" (SentencePiece
    unigram).

    special_ids are control and unknown tokens: text becomes one only when asked to, and decoding can skip
    them.
    """

    kind: str
    tokens: list[str]
    id_of: dict[str, int]
    types: list[int]  # empty if the file does not say it, and all are normal
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    mask_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    flags: Mapping[str, frozenset[int]] = field(default_factory=dict)  # name in FLAG_KEYS -> tokens

    def added_token(self, i: int, normalized: bool = False) -> AddedToken:
        """Return a special or user-defined token as `tokenizers` looks for it.

        With `normalized`, user-defined tokens are all looked for in normalized text.
        """
        special = i in self.special_ids
        flags = {name: i in ids for name, ids in self.flags.items()}
        flags["normalized"] = (normalized or flags.get("normalized", False)) and not special
        return AddedToken(self.tokens[i], special=special, **flags)

    @property
    def user_defined(self) -> list[str]:
        """Tokens that are matched in a text before anything else. Tokens that end a text are not among
        them.
        """
        found = {i for i, kind in enumerate(self.types) if kind == USER_DEFINED and self.tokens[i]}
        return [self.tokens[i] for i in sorted(found - self.special_ids)]

    def text_ids(self) -> dict[str, int]:
        """Token -> id, of tokens that plain text can become."""
        ids = dict(self.id_of)
        hidden = self.special_ids.union(i for i, kind in enumerate(self.types) if kind == UNUSED)
        for i in hidden:
            ids.pop(self.tokens[i], None)
        return ids

    def bytes_of(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token stands for; raises RequestError for an id outside the vocabulary."""
        i = self.checked(token_id)
        text, kind = self.tokens[i], self.types[i] if self.types else NORMAL
        if self.kind == "bert":  # words, and pieces that continue one
            return text[2:].encode() if text.startswith(CONTINUATION) else f" {text}".encode()
        if self.kind in ("llama", "t5"):
            if text in _BYTE_TEXTS and (kind == BYTE or not self.types):
                return _BYTE_TEXTS[text]
            return text.replace(SPACE_MARK, " ").encode()
        if kind in (NORMAL, BYTE) and i not in self.special_ids:
            try:
                return bytes(map(_BYTE_OF_LETTER.__getitem__, map(ord, text)))
            except KeyError:
                pass  # not spelled in the byte alphabet: an added token of a careless converter
        return text.encode()

    def checked(self, token_id: SupportsIndex) -> int:
        """The id as an int; raises RequestError when the vocabulary has no such id."""
        try:
            i = operator.index(token_id)
        except TypeError:
            raise RequestError(f"a token id must be an integer, not {type(token_id).__name__}") from None
        if not 0 <= i < len(self.tokens):
            raise RequestError(
                f"the token id {i} must be below {len(self.tokens)}, the size of the vocabulary"
            )
        return i


def read_vocabulary(keys: TokenizerKeys) -> Vocabulary:
    """The vocabulary of a GGUF file.

    Raises FormatError if keys are missing or contradict each other, and UnsupportedError for tokenizers of
    another kind.
    """
    kind = keys.get("model")
    kind = "llama" if kind == GEMMA4 else kind
    if kind not in ("gpt2", "llama", "bert", "t5"):
        raise UnsupportedError(
            f"the tokenizer {brief(kind)} is not supported: use 'gpt2' (byte-level BPE), 'llama' and "
            "'gemma4' (SentencePiece), 'bert' (WordPiece) or 't5' (SentencePiece unigram)"
        )
    tokens = keys.texts("tokens")
    if not tokens:
        raise keys.error("tokenizer.ggml.tokens is missing or empty")
    types = keys.types(len(tokens))
    if kind == "bert":
        tokens = [
            token if types and types[i] == CONTROL else word_piece(token) for i, token in enumerate(tokens)
        ]
    id_of = {token: i for i, token in enumerate(tokens) if token}
    if len(id_of) + tokens.count("") != len(tokens):
        again = next(token for i, token in enumerate(tokens) if token and id_of[token] != i)
        raise keys.error(f"the token {again!r} appears twice in tokenizer.ggml.tokens")

    # SentencePiece's own defaults, and BERT's; a byte-level file without the key has no such token
    defaults = _DEFAULT_IDS.get(kind, {})
    if kind == "bert":  # readers find its end tokens by other names
        found = {"bos": keys.token_id("cls", None, len(tokens))}
        found["eos"] = keys.token_id("seperator", None, len(tokens))  # spelled like this in GGUF
        defaults = defaults | {name: i for name, i in found.items() if i is not None}
    ids = {
        name: keys.token_id(name, defaults.get(name), len(tokens)) for name in ("bos", "unknown", *_END_KEYS)
    }
    ends = _end_ids(id_of, [ids[name] for name in _END_KEYS])
    specials = {i for i, type_ in enumerate(types) if type_ in (CONTROL, UNKNOWN)}
    specials.update(ends)
    specials.update(i for i in (ids["bos"], ids["unknown"] if kind != "gpt2" else None) if i is not None)
    return Vocabulary(
        kind=kind,
        tokens=tokens,
        id_of=id_of,
        types=types,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unknown"],
        mask_id=keys.token_id("mask", None, len(tokens)),
        eos_ids=ends,
        special_ids=frozenset(specials),
        flags={name: keys.token_ids(key, len(tokens)) for name, key in FLAG_KEYS.items()},
    )


def word_piece(stored: str) -> str:
    """Return a WordPiece token as BERT spells it: BERT marks continuations, GGUF marks beginnings of
    words.
    """
    return stored[len(SPACE_MARK) :] if stored.startswith(SPACE_MARK) else CONTINUATION + stored


def stored_piece(token: str) -> str:
    """The opposite of `word_piece`."""
    return token[len(CONTINUATION) :] if token.startswith(CONTINUATION) else SPACE_MARK + token


def ends_by_text(id_of: Mapping[str, int]) -> set[int]:
    """Tokens that end a turn or a document whatever a file's keys say."""
    return {id_of[text] for text in _END_TEXTS if text in id_of}


def _end_ids(id_of: Mapping[str, int], stated: list[int | None]) -> frozenset[int]:
    ends = ends_by_text(id_of)
    ends.update(i for i in stated if i is not None)
    if "<|return|>" in id_of and "<|call|>" in id_of and "<|end|>" in id_of:
        ends.discard(id_of["<|end|>"])  # there <|end|> only ends a message within the turn
    return frozenset(ends)
