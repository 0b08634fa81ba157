"""`Tokenizer`: text to token ids and back, built on Hugging Face `tokenizers` from a model's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from kukri.errors import ContextLengthError, RequestError, brief, reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.tokenizer.gguf_keys import TokenizerKeys
from kukri.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer
from kukri.tokenizer.unigram import check_charsmap, unigram
from kukri.tokenizer.vocabulary import (
    DROPS_SPACE,
    GEMMA4,
    NORMAL,
    PREPENDS_ONCE,
    SPACE_MARK,
    Vocabulary,
    read_vocabulary,
)

_AT_ENDS = ("Prepend", "Strip")  # normalizers that change the beginning or the ends of a text
_SURROGATES = re.compile("[\ud800-\udfff]")
_LONG = 8  # characters for each token allowed: a longer text is counted in slices before it is encoded
_SLICE = 1 << 12  # characters a slice: a prompt that is far too long is refused after a few slices
_SHARED = 1 << 12  # characters from which on encoding takes long enough to let other threads run
TEXT_MARK = "\ufdd0"  # not a character: put inside the text of a special token, it keeps it text
_MAX_SPLIT_WORK = (
    1 << 30
)  # characters; real vocabularies need some 10 million, a hostile one could take years


class Tokenizer:
    """A model's tokenizer.

    Attributes: n_vocab; bos_id (None when the model has none); eos_ids, ids after which generation ends;
    special_ids, control tokens; add_bos, add_eos, what `add_special` adds; chat_template, its source, or
    None; add_separator, whether a second EOS stands before the second text of a pair; bos_token, eos_token,
    their texts, or ""; drops_leading_space, whether `decode` removes the space
    that `encode` puts before text (SentencePiece).

    Methods may be called from several threads.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        text: tokenizers.Tokenizer,
        later_text: tokenizers.Tokenizer | None = None,
    ) -> None:
        """Use `load_tokenizer`, `from_gguf` or `from_metadata`. `text` must never return a special id.

        `later_text` stands in for `text` after a special token.
        """
        self.vocabulary, self.text, self._later_text = vocabulary, text, later_text or text
        self._marks = _special_finder(vocabulary)
        self._bytes: dict[SupportsIndex, bytes] = {}
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id, self.eos_ids = vocabulary.bos_id, vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.bos_token = "" if self.bos_id is None else vocabulary.tokens[self.bos_id]
        self.eos_token = "" if vocabulary.eos_id is None else vocabulary.tokens[vocabulary.eos_id]
        self.add_bos = self.add_eos = self.add_separator = self.drops_leading_space = False
        self.chat_template: str | None = None

    @classmethod
    def from_gguf(cls, file: str | os.PathLike[str] | GGUFFile) -> Tokenizer:
        """The tokenizer in a GGUF file, which is a path or open. Raises the errors of `from_metadata`."""
        if isinstance(file, GGUFFile):
            return cls.from_metadata(file.metadata, path=file.path)
        with GGUFFile(file) as opened:
            return cls.from_metadata(opened.metadata, path=opened.path)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Tokenizer:
        """The tokenizer that GGUF keys `tokenizer.*` describe.

        Raises FormatError, naming `path`, when they are broken, and UnsupportedError for a kind of tokenizer
        or a pre-tokenizer that kukri does not know.
        """
        keys = TokenizerKeys(metadata, path)
        with reading(path, lambda: keys.last):
            return cls._of_keys(keys)

    @classmethod
    def _of_keys(cls, keys: TokenizerKeys) -> Tokenizer:
        vocabulary = read_vocabulary(keys)
        adds_space = adds_bos = True
        if vocabulary.kind == "llama":
            is_gemma4 = keys.get("model") == GEMMA4
            adds_space = keys.flag("add_space_prefix", not is_gemma4)
            text = _sentencepiece(vocabulary, keys, adds_space)
            if is_gemma4:  # line ends are separate words
                text.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")
        elif vocabulary.kind == "bert":
            text = _word_pieces(vocabulary, keys)
        elif vocabulary.kind == "t5":
            adds_space, adds_bos = keys.flag("add_space_prefix", True), False
            text = _unigram(vocabulary, keys, adds_space)
        else:
            rules = pre_tokenizer(keys.text("pre") or "default")
            text, adds_space, adds_bos = _byte_level(vocabulary, keys, rules), False, rules.add_bos
        # Gemma's runs of spaces are found among marks, as SentencePiece does; a prefix would go before each
        among_marks = vocabulary.kind == "llama" and not adds_space
        # unigram tokenizers find them by their scores
        defined = [] if vocabulary.kind == "t5" else vocabulary.user_defined
        text.add_tokens([vocabulary.added_token(vocabulary.id_of[t], among_marks) for t in defined])
        self = cls(vocabulary, text)
        self.drops_leading_space = keys.flag(DROPS_SPACE, adds_space)
        if keys.flag(PREPENDS_ONCE, False):
            self._later_text = self._inner
        self.add_bos = keys.flag("add_bos_token", adds_bos and self.bos_id is not None)
        self.add_eos = keys.flag("add_eos_token", vocabulary.kind in ("bert", "t5"))
        for wanted, name, i in ((self.add_bos, "bos", self.bos_id), (self.add_eos, "eos", vocabulary.eos_id)):
            if wanted and i is None:
                raise keys.error(f"add_{name}_token is true, but the {name} token is missing")
        if vocabulary.kind == "t5":
            self.add_separator = keys.flag("add_sep_token", self.add_bos and self.add_eos)
            self.text.post_processor = ends(self)
        self.chat_template = keys.chat_template
        return self

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of a text; lone surrogates count as U+FFFD.

        `add_special` adds BOS and EOS as the model wants them, BOS not twice. `parse_special` recognises
        control tokens written in the text: it is for templates, never for a user's text. Raises
        RequestError unless `text` is a str, and ContextLengthError, without encoding it all, if a long text
        has certainly more than `max_tokens`.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text must be a string, not {type(text).__name__}", param="prompt")
        if not text.isascii():
            text = _SURROGATES.sub("\ufffd", text)
        self._check_length(text, max_tokens)
        ids = self._encode_sections(text, self.text) if parse_special else _ids(self.text, text)
        if add_special:
            self._add_bos(ids)
            if self.add_eos and self.vocabulary.eos_id is not None:
                ids.append(self.vocabulary.eos_id)
        return ids

    def encode_inside(
        self, text: str, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text in the middle of another: as `encode`, but no space is put before it."""
        text = _SURROGATES.sub("\ufffd", text)
        self._check_length(text, max_tokens)
        return self._encode_sections(text, self._inner) if parse_special else _ids(self._inner, text)

    def encode_spans(
        self, text: str, before: str | None = None
    ) -> tuple[list[int], list[tuple[int, int] | None]]:
        """Return the ids of `before`, if given, and of `text`, with BOS and EOS as the model wants them.

        The second list has the characters of each token in `text`, (start, stop), or None for other tokens.
        Control tokens written in either stay text. Raises RequestError unless both are str.
        """
        texts = [text] if before is None else [before, text]
        for given in texts:
            if not isinstance(given, str):
                raise RequestError(f"a text must be a string, not {type(given).__name__}", param="prompt")
        first, *second = (_SURROGATES.sub("\ufffd", given) for given in texts)
        encoding = self.text.encode(first, second[0] if second else None)
        ids: list[int] = encoding.ids
        spans: list[tuple[int, int] | None] = [
            span if sequence == len(second) else None
            for span, sequence in zip(encoding.offsets, encoding.sequence_ids, strict=True)
        ]
        self._add_bos(ids)
        if len(ids) > len(spans):
            spans.insert(0, None)
        eos = self.vocabulary.eos_id
        if self.add_eos and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
            spans.append(None)
        return ids, spans

    def encode_marked(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a prompt whose control tokens count, except control tokens broken by a
        `TEXT_MARK`.

        The marks leave no trace. BOS is added as the model wants it, not twice. `max_tokens` as for `encode`.
        """
        text = _SURROGATES.sub("\ufffd", text)
        self._check_length(text, max_tokens)
        ids = self._encode_sections(text, self.text, TEXT_MARK)
        self._add_bos(ids)
        return ids

    @cached_property
    def special_texts(self) -> list[str]:
        """The texts of the control tokens as the file spells them; tokens without a text are left out."""
        return [text for i in self.special_ids if (text := self.token_text(i))]

    def decode(
        self, ids: Iterable[SupportsIndex], skip_special: bool = False, continues: bool = False
    ) -> str:
        """The text of token ids, U+FFFD for bytes that are not UTF-8.

        `continues` says that the ids follow other text, so that a SentencePiece leading space is kept. Raises
        RequestError for an id outside the vocabulary.
        """
        if skip_special:
            ids = [i for i in ids if i not in self.special_ids]
        data = b"".join(map(self.token_bytes, ids))
        if self.drops_leading_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token adds to a text; a SentencePiece word keeps its leading space.

        Raises RequestError for an id outside the vocabulary.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self.vocabulary.bytes_of(token_id)
        return data

    def token_text(self, token_id: SupportsIndex) -> str:
        """A token as the file spells it; raises RequestError for an id outside the vocabulary."""
        return self.vocabulary.tokens[self.vocabulary.checked(token_id)]

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Raises ContextLengthError if slices of the text come to twice `max_tokens`.

        Where a slice is cut, a token may be cut into a few: far fewer than there are in a slice.
        """
        if max_tokens is None or len(text) <= _LONG * max_tokens:
            return
        n_tokens = 0
        for start in range(0, len(text), _SLICE):
            n_tokens += len(_ids(self.text, text[start : start + _SLICE]))
            if n_tokens > 2 * max_tokens:
                raise ContextLengthError(n_tokens // 2, max_tokens, at_least=True)

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        return _inner_text(self.text)

    def _add_bos(self, ids: list[int]) -> None:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)

    def _encode_sections(self, text: str, first: tokenizers.Tokenizer, mark: str = "") -> list[int]:
        """Return the ids of special tokens and of the text between them; `first` encodes the text before the
        first.

        `mark` is removed from texts.
        """
        ids: list[int] = []
        marks = self._marks.encode(text, add_special_tokens=False)
        start = 0
        for special_id, (begin, end) in zip(marks.ids, marks.offsets, strict=True):
            if mark and end - begin == 1 and text.startswith(mark, end):
                continue  # a token of one character has its mark after it
            ids += _ids(self._later_text if start else first, text[start:begin].replace(mark, ""))
            ids.append(special_id)
            start = end
        return ids + _ids(self._later_text if start else first, text[start:].replace(mark, ""))


def as_text(text: str, specials: Iterable[str]) -> str:
    """Put marks into the given control tokens of a text, so that `encode_marked` takes them for text."""
    text = text.replace(TEXT_MARK, "")
    for special in specials:
        marked = special[0] + TEXT_MARK + special[1:]
        if len(special) == 1:
            text = text.replace(special, marked)
        while len(special) > 1 and special in text:  # again: halves of "\n\n\n\n" make another
            text = text.replace(special, marked)
    return text


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of a text. A long text is encoded as a batch, since `encode` stops other threads."""
    with reading(None):  # a tokenizer.json may make the library panic only at some text
        if len(text) < _SHARED:
            return tokenizer.encode(text, add_special_tokens=False).ids
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _special_finder(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A tokenizer that knows only special tokens: it finds them in a text, leftmost and longest first.

    The tokenizer of plain text does not know them, so a user's text can never become a special token.
    """
    texts = {vocabulary.tokens[i]: i for i in vocabulary.special_ids if vocabulary.tokens[i]}
    finder = tokenizers.Tokenizer(models.BPE(vocab=texts, merges=[]))
    finder.add_special_tokens([vocabulary.added_token(i) for i in texts.values()])
    return finder


def ends(tokenizer: Tokenizer) -> processors.TemplateProcessing | None:
    """The step that puts BOS and EOS around a text, or the two of a pair; None if neither is added."""
    before = [(tokenizer.bos_token, tokenizer.bos_id)] if tokenizer.add_bos else []
    after = [(tokenizer.eos_token, tokenizer.vocabulary.eos_id)] if tokenizer.add_eos else []
    if not before and not after:
        return None
    first, last = ([text for text, _ in around] for around in (before, after))
    between = last * (1 + tokenizer.add_separator)
    single, pair = [*first, "$A", *last], [*first, "$A", *between, "$B", *last]
    return processors.TemplateProcessing(single, pair, [*before, *after])


def _byte_level(vocabulary: Vocabulary, keys: TokenizerKeys, rules: PreTokenizer) -> tokenizers.Tokenizer:
    text = tokenizers.Tokenizer(_bpe(vocabulary, keys.merges(), keys, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        text.normalizer = normalizers.NFC()
    text.pre_tokenizer = rules.build()
    return text


def _sentencepiece(vocabulary: Vocabulary, keys: TokenizerKeys, adds_space: bool) -> tokenizers.Tokenizer:
    """SentencePiece BPE as Llama's tokenizer.json writes it: ▁ for spaces, bytes for unknown characters."""
    merges = keys.merges() or merges_from_scores(vocabulary, keys)
    unknown = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    bpe = _bpe(vocabulary, merges, keys, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    text = tokenizers.Tokenizer(bpe)
    if adds_space and keys.flag(PREPENDS_ONCE, False):
        text.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, "first", split=False)
        return text
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if adds_space else []
    text.normalizer = normalizers.Sequence([*prefix, spaces])
    return text


def _unigram(vocabulary: Vocabulary, keys: TokenizerKeys, adds_space: bool) -> tokenizers.Tokenizer:
    scores, charsmap = keys.scores(len(vocabulary.tokens)), keys.charsmap()
    check_charsmap(charsmap, keys.error)
    joins_spaces = keys.flag("remove_extra_whitespaces", True)
    return unigram(
        vocabulary, scores, charsmap, adds_space=adds_space, joins_spaces=joins_spaces, error=keys.error
    )


def _word_pieces(vocabulary: Vocabulary, keys: TokenizerKeys) -> tokenizers.Tokenizer:
    """BERT's WordPiece, of lower case and without accents, as llama.cpp reads every such file."""
    bos, eos, unknown = vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id
    if bos is None or eos is None or unknown is None:
        raise keys.error("a WordPiece tokenizer requires ids of [CLS], [SEP] and [UNK]")
    unk_token = vocabulary.tokens[unknown]
    ids = {**vocabulary.text_ids(), unk_token: unknown}
    text = tokenizers.Tokenizer(
        models.WordPiece(vocab=ids, unk_token=unk_token, max_input_chars_per_word=100)
    )
    text.normalizer = normalizers.BertNormalizer(lowercase=True)
    text.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = (vocabulary.tokens[bos], bos), (vocabulary.tokens[eos], eos)
    text.post_processor = processors.BertProcessing((last[0], last[1]), (first[0], first[1]))
    return text


def _bpe(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    keys: TokenizerKeys,
    *,
    unk_token: str | None = None,
    **options: bool,
) -> models.BPE:
    ids = vocabulary.text_ids()
    if unk_token:
        ids[unk_token] = vocabulary.id_of[unk_token]
    made, texts = list(map("".join, merges)), list(ids)
    start = texts.index(made[0]) if made and made[0] in ids else 0
    # the library panics at a result that is not a token, without an Exception; to look them up takes longer
    # than to see that they stand in the order of the merges, as most files have them
    if made != texts[start : start + len(made)] and not all(map(ids.__contains__, made)):
        known = vocabulary.id_of
        if wrong := next((pair for pair in merges if "".join(pair) not in known), None):
            raise keys.error(f"tokenizer.ggml.merges must fit the tokens: {brief(wrong)} make none")
        # text must not reach special tokens
        merges = [pair for pair in merges if "".join(pair) in ids]
    return models.BPE(vocab=ids, merges=merges, unk_token=unk_token, **options)


def merges_from_scores(vocabulary: Vocabulary, keys: TokenizerKeys) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: each way to cut a token into two, best token first.

    Ties go by length and then by id, as in `generate_merges` (transformers 5.23, tokenization_utils_base.py).
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    scores = keys.scores(len(tokens))
    pieces = {
        token: i
        for token, i in vocabulary.id_of.items()
        if i not in vocabulary.special_ids and (not types or types[i] == NORMAL)
    }
    if sum(len(piece) ** 2 for piece in pieces) > _MAX_SPLIT_WORK:
        raise keys.error("the tokens are too long for a vocabulary")
    ranked = sorted(
        (-score, -at, at - len(piece), i)
        for (piece, i), score in zip(pieces.items(), scores[list(pieces.values())].tolist(), strict=True)
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    )
    return [(tokens[i][:-at], tokens[i][-at:]) for _, at, _, i in ranked]


def _inner_text(text: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, sharing its vocabulary, which adds and removes nothing at the ends of a text."""
    inner = tokenizers.Tokenizer(text.model)
    if text.normalizer is not None:
        steps = [step for step in _steps(text.normalizer, "normalizers") if step["type"] not in _AT_ENDS]
        inner.normalizer = _sequence(normalizers.Sequence([]), "normalizers", steps)
    if text.pre_tokenizer is not None:
        steps = [_unprefixed(step) for step in _steps(text.pre_tokenizer, "pretokenizers")]
        if any(step["type"] == "Metaspace" for step in steps):  # it alone keeps the spaces between words
            steps = [step for step in steps if step["type"] != "WhitespaceSplit"]
        inner.pre_tokenizer = _sequence(pre_tokenizers.Sequence([]), "pretokenizers", steps)
    inner.add_tokens(list(text.get_added_tokens_decoder().values()))
    return inner


def _steps(made: Any, inside: str) -> list[dict[str, Any]]:
    state = json.loads(made.__getstate__())
    steps: list[dict[str, Any]] = state[inside] if state["type"] == "Sequence" else [state]
    return steps


def _sequence(empty: Any, inside: str, steps: list[dict[str, Any]]) -> Any:
    empty.__setstate__(json.dumps({"type": "Sequence", inside: steps}).encode())
    return empty


def _unprefixed(step: dict[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer that puts no space before a text."""
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**step, **{key: value for key, value in changes.items() if key in step}}
