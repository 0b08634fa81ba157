"""`Tokenizer` from tokenizer.json and its companions, as transformers saves them."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import tokenizers

from kukri.errors import FormatError, UnsupportedError, brief, reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.host.garbage import without_collections
from kukri.tokenizer.tokenizer import Tokenizer
from kukri.tokenizer.unigram import check_charsmap
from kukri.tokenizer.vocabulary import (
    BYTE,
    CONTINUATION,
    CONTROL,
    FLAG_KEYS,
    NORMAL,
    SPACE_MARK,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)

if TYPE_CHECKING:  # the files of a directory, which a GGUF file does not need
    from kukri.formats.huggingface.directory import TokenizerFiles

# The steps of decoders that `Vocabulary.bytes_of` and `drops_leading_space` stand for, with their settings
_DECODERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "ByteLevel": (),
    "ByteFallback": (),
    "Fuse": (),
    "Replace": (("pattern", {"String": SPACE_MARK}), ("content", " ")),
    "Strip": (("content", " "), ("start", 1), ("stop", 0)),
    "Metaspace": (("replacement", SPACE_MARK),),
    "WordPiece": (("prefix", CONTINUATION),),
}
_JOINING = ("Fuse", "ByteLevel")  # steps after these see the joined text
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SURROGATE = re.compile("[\ud800-\udfff]")


@without_collections()
def load_tokenizer(source: GGUFFile | TokenizerFiles) -> Tokenizer:
    """The tokenizer of an open checkpoint.

    Raises FormatError when its files are broken and UnsupportedError for kinds that kukri does not read.
    """
    with reading(source.path):
        return Tokenizer.from_gguf(source) if isinstance(source, GGUFFile) else _from_files(source)


def _from_files(files: TokenizerFiles) -> Tokenizer:
    parts = Parts(files)
    text = parts.build()
    tokenizer = Tokenizer(parts.vocabulary, text, parts.build_later(text))
    tokenizer.drops_leading_space = parts.drops_leading_space
    tokenizer.add_bos, tokenizer.add_eos = parts.adds(text)
    tokenizer.add_separator = tokenizer.add_eos and parts.adds_separator(text)
    tokenizer.chat_template = files.chat_template
    return tokenizer


class Parts:
    """tokenizer.json taken apart: a vocabulary, and a tokenizer of text that knows no special token.

    Added tokens take their ids from the model's vocabulary, so all but special ones are put there; a user's
    text can never become a token that is not there.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self.model = self._object("model")
        if (model_type := self.model.get("type", "BPE")) not in ("BPE", "WordPiece", "Unigram"):
            raise UnsupportedError(
                f"{files.path}: the tokenizer's model {brief(model_type)} is not supported: use BPE, "
                "WordPiece or Unigram"
            )
        self._pieces = self._scored() if model_type == "Unigram" else []
        self._unknown = self._unknown_piece() if self._pieces else self.model.get("unk_token")
        if self._unknown is not None and not isinstance(self._unknown, str):
            raise self._error(f"key 'unk_token' must be text, not {brief(self._unknown)}")
        self.id_of = self._ids()
        self.added = self._added_tokens()
        self.id_of |= {token: entry["id"] for token, entry in self.added.items()}
        self.named = {name: self._named_token(name) for name in _NAMED_TOKENS}
        for name, encoders_name in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
            self.named[name] = self.named[name] or self._named_token(encoders_name)
        decoders = steps_of(files.tokenizer.get("decoder"), "decoders")
        self._check_decoder(decoders)
        self.named["unk_token"] = self.named["unk_token"] or (self._unknown if self._pieces else None)
        self.kind = "gpt2" if any(part.get("type") == "ByteLevel" for part in decoders) else "llama"
        if model_type == "WordPiece":
            self.kind = "bert"
        if self._pieces:
            self.kind = "t5"
        if self.kind == "llama" and not decoders:
            raise UnsupportedError(f"{files.path}: the tokenizer's decoder is not supported")
        self.drops_leading_space = self.kind == "bert" or any(map(_drops_space, decoders))
        specials = {token for token, entry in self.added.items() if entry.get("special") is True}
        specials |= {token for token in self.named.values() if token is not None}
        self.tokens = self._tokens()
        # an ordinary word may end a text too, and must stay a word
        specials |= {self.tokens[i] for i in files.eos_ids if self.tokens[i] in self.added}
        self.special_texts = sorted(specials, key=self.id_of.__getitem__)
        self.vocabulary = self._vocabulary()

    def text_ids(self) -> dict[str, int]:
        """Token -> id, of tokens that plain text can become."""
        hidden = set(self.special_texts) - {self._unknown}
        return {token: i for token, i in self.id_of.items() if token not in hidden}

    def merges(self) -> list[tuple[str, str]]:
        """The merges that lead from tokens of plain text to such, best first."""
        ids = self.text_ids()
        return [pair for pair in map(self._merge, self._list(self.model, "merges")) if _fits(pair, ids)]

    def build(self) -> tokenizers.Tokenizer:
        """The tokenizer of plain text."""
        plain = [entry for token, entry in self.added.items() if token not in self.special_texts]
        model = {**self.model, "vocab": self._hidden_pieces() if self._pieces else self.text_ids()}
        if self.kind not in ("bert", "t5"):
            model["merges"] = self.merges()
        for step in steps_of(self.files.tokenizer.get("normalizer"), "normalizers"):
            if step.get("type") == "Precompiled":
                self._check_normalization(step.get("precompiled_charsmap"))
        contents = {
            **self.files.tokenizer,
            "truncation": None,
            "padding": None,
            "added_tokens": plain,
            "model": model,
        }
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(contents, ensure_ascii=False))
        except Exception as error:  # `tokenizers` raises no narrower one
            raise self._error(f"must be a tokenizer: {' '.join(str(error).split())[:200]}") from None

    def build_later(self, text: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
        """Return the tokenizer for text after a special token, which puts no space before it; None if it is
        the same.
        """
        words = self.files.tokenizer.get("pre_tokenizer")
        first = [p for p in steps_of(words, "pretokenizers") if p.get("prepend_scheme") == "first"]
        if not first:
            return None
        model = {"type": "BPE", "vocab": {}, "merges": []}
        steps = {"version": "1.0", "model": model, "pre_tokenizer": _never_prepending(words)}
        later = tokenizers.Tokenizer(text.model)  # shares the vocabulary
        later.pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(steps)).pre_tokenizer
        if text.normalizer is not None:
            later.normalizer = text.normalizer
        plain = (entry["id"] for token, entry in self.added.items() if token not in self.special_texts)
        later.add_tokens([*map(self.vocabulary.added_token, plain)])
        return later

    @property
    def scores(self) -> list[float]:
        """The score of each token of a unigram model; 0 for added tokens, which have no score."""
        return [score for _, score in self._pieces] + [0.0] * (len(self.tokens) - len(self._pieces))

    def adds_separator(self, text: tokenizers.Tokenizer) -> bool:
        """True if a pair has a second EOS before its second text."""
        pair, eos = self._around(text, "a", "a"), self.vocabulary.eos_id
        return sum(i == eos for i, sequence in zip(pair.ids, pair.sequence_ids) if sequence is None) == 3

    def adds(self, text: tokenizers.Tokenizer) -> tuple[bool, bool]:
        """True if the post-processor puts BOS and EOS around a text.

        As in transformers 5, it overrules `add_bos_token` in tokenizer_config.json.
        """
        bos, eos = self.vocabulary.bos_id, self.vocabulary.eos_id
        around = self._around(text, "a")
        inside = [i for i, special in enumerate(around.special_tokens_mask) if not special]
        first, last = (inside[0], inside[-1] + 1) if inside else (len(around.ids), len(around.ids))
        before, after = around.ids[:first], around.ids[last:]
        if before and before[0] == self.vocabulary.id_of.get("<|startoftranscript|>"):
            return False, False  # the prompt of each sound says how its text begins
        if before not in ([], [bos]) or after not in ([], [eos]):
            raise UnsupportedError(
                f"{self.files.path}: the post-processor adds {before}, {after}, but only BOS and EOS are "
                "supported"
            )
        return bool(before), bool(after)

    def _around(
        self, text: tokenizers.Tokenizer, first: str, second: str | None = None
    ) -> tokenizers.Encoding:
        """A text or a pair, with what the post-processor adds."""
        try:
            return text.encode(first, second, add_special_tokens=True)
        except BaseException as error:  # a panic of `tokenizers` is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise self._error(f"has a post-processor that cannot run: {brief(str(error))}") from None

    def _error(self, message: str) -> FormatError:
        return FormatError(message, path=self.files.path)

    def _object(self, key: str) -> dict[str, Any]:
        value = self.files.tokenizer.get(key)
        if not isinstance(value, dict):
            raise self._error(f"key {key!r} must be an object")
        return value

    def _list(self, part: dict[str, Any], key: str) -> list[Any]:
        value = part.get(key)
        if value is not None and not isinstance(value, list):
            raise self._error(f"key {key!r} must be a list, not {brief(value)}")
        return value or []

    def _scored(self) -> list[tuple[str, float]]:
        """The pieces of a unigram model and their scores."""
        pieces = self._list(self.model, "vocab")
        for piece in pieces:
            if not isinstance(piece, list) or [*map(type, piece)] not in ([str, float], [str, int]):
                raise self._error(f"must have pieces that are a text and a score, not {brief(piece)}")
        if not pieces:
            raise self._error("must have a vocabulary")
        return [(text, float(score)) for text, score in pieces]

    def _check_decoder(self, steps: list[dict[str, Any]]) -> None:
        """Raise UnsupportedError for a step that makes other text of tokens than their bytes."""
        n_separate = next((i for i, step in enumerate(steps) if step.get("type") in _JOINING), len(steps))
        for i, step in enumerate(steps):
            known = _DECODERS.get(str(step.get("type")))
            is_of_each = step.get("type") == "Strip" and i < n_separate  # not of the text's beginning
            if known is None or is_of_each or any(step.get(key) not in (None, want) for key, want in known):
                raise UnsupportedError(
                    f"{self.files.path}: the decoder's step {brief(step)} is not supported: use a "
                    "tokenizer.json whose decoder replaces '▁' by a space, strips one space of the text's "
                    "beginning, or is ByteLevel, Metaspace or WordPiece"
                )

    def _check_normalization(self, stated: Any) -> None:
        try:
            charsmap = b64decode(stated or "", validate=True)
        except (TypeError, ValueError):
            raise self._error("must have a 'precompiled_charsmap' in base64") from None
        check_charsmap(charsmap, self._error)

    def _unknown_piece(self) -> str:
        i = self.model.get("unk_id")
        if type(i) is not int or not 0 <= i < len(self._pieces):
            raise self._error(f"key 'unk_id' must be the number of a piece, not {brief(i)}")
        return self._pieces[i][0]

    def _hidden_pieces(self) -> list[tuple[str, float]]:
        """Return the pieces in order, with "" for each piece that plain text cannot become."""
        ids = {token: i for token, i in self.text_ids().items() if token != self._unknown}
        texts = {i: token for token, i in ids.items()}
        return [(texts.get(i, ""), score) for i, score in enumerate(self.scores)]

    def _ids(self) -> dict[str, int]:
        ids = self.model.get("vocab")
        if self._pieces:
            ids = {text: i for i, (text, _) in enumerate(self._pieces)}
            if len(ids) < len(self._pieces):
                raise self._error("must have each piece once")
        if not isinstance(ids, dict) or not ids:
            raise self._error("must have a vocabulary")
        for token, i in ids.items():
            self._check_id(token, i)
        return dict(ids)

    def _check_id(self, token: str, i: Any) -> None:
        if not token.isascii() and _SURROGATE.search(token):
            raise self._error(f"token {brief(token)} must not hold lone surrogates")
        if type(i) is not int or not 0 <= i < self.files.n_vocab:
            raise self._error(
                f"token {brief(token)} must have an id below the model's {self.files.n_vocab}, not {brief(i)}"
            )

    def _added_tokens(self) -> dict[str, dict[str, Any]]:
        added: dict[str, dict[str, Any]] = {}
        for entry in self._list(self.files.tokenizer, "added_tokens"):
            if (
                not isinstance(entry, dict)
                or not isinstance(entry.get("content"), str)
                or not entry["content"]
            ):
                raise self._error(f"must have content in each added token, as in {brief(entry)}")
            self._check_id(entry["content"], entry.get("id"))
            added[entry["content"]] = entry
        return added

    def _named_token(self, name: str) -> str | None:
        stated = self.files.settings.get(name)
        text = stated.get("content") if isinstance(stated, dict) else stated
        if text is None or text == "":
            return None
        if not isinstance(text, str) or text not in self.id_of:
            message = f"{name} is {brief(text)}, which tokenizer.json does not hold"
            raise FormatError(message, path=self.files.path.with_name("tokenizer_config.json"))
        return text

    def _mask_id(self) -> int | None:
        """Return the id of the mask token; None for models that name a mask token which they do not have."""
        stated = self.files.settings.get("mask_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        return self.id_of.get(text) if isinstance(text, str) else None

    def _tokens(self) -> list[str]:
        """Texts by id, "" if there is none."""
        tokens = [""] * self.files.n_vocab
        for token, i in self.id_of.items():
            if tokens[i]:
                raise self._error(f"tokens {brief(tokens[i])} and {brief(token)} must not both have id {i}")
            tokens[i] = token
        return tokens

    def _vocabulary(self) -> Vocabulary:
        types = [NORMAL if token else UNUSED for token in self.tokens]
        for entry in self.added.values():
            types[entry["id"]] = USER_DEFINED
        if self.kind in ("llama", "t5") and self.model.get("byte_fallback") is True:
            for byte in range(256):
                if (i := self.id_of.get(f"<0x{byte:02X}>")) is not None:
                    types[i] = BYTE
        for token in self.special_texts:
            types[self.id_of[token]] = CONTROL
        ids = {name: None if token is None else self.id_of[token] for name, token in self.named.items()}
        ends = {*self.files.eos_ids, *([] if ids["eos_token"] is None else [ids["eos_token"]])}
        return Vocabulary(
            kind=self.kind,
            tokens=self.tokens,
            id_of={token: i for token, i in self.id_of.items() if token},
            types=types,
            bos_id=ids["bos_token"],
            eos_id=ids["eos_token"],
            unk_id=ids["unk_token"],
            mask_id=self._mask_id(),
            eos_ids=frozenset(ends),
            special_ids=frozenset(self.id_of[token] for token in self.special_texts),
            flags={
                name: frozenset(entry["id"] for entry in self.added.values() if entry.get(name) is True)
                for name in FLAG_KEYS
            },
        )

    def _merge(self, stated: Any) -> tuple[str, str]:
        pair = stated.split(" ") if isinstance(stated, str) else stated
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise self._error(f"must have merges of two tokens, not {brief(stated)}")
        return pair[0], pair[1]


def _fits(pair: tuple[str, str], vocabulary: dict[str, int]) -> bool:
    return pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary


def steps_of(part: Any, inside: str) -> list[dict[str, Any]]:
    """The steps of a decoder, normalizer or pre-tokenizer, whether it is one or a sequence."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    steps = part.get(inside)
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _drops_space(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return [decoder.get(key) for key in ("type", "content", "start")] == ["Strip", " ", 1]


def _never_prepending(part: Any) -> Any:
    if isinstance(part, dict):
        made = {key: _never_prepending(value) for key, value in part.items()}
        return {**made, "prepend_scheme": "never"} if made.get("prepend_scheme") == "first" else made
    return [_never_prepending(step) for step in part] if isinstance(part, list) else part
