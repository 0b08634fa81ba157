"""What a user writes stays what it is, above all where it spells a token, in every kind of tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from kukri.formats.checkpoint import open_checkpoint
from kukri.tokenizer import ChatTemplate, Tokenizer, load_tokenizer
from kukri.tokenizer.gguf_writer import tokenizer_metadata
from kukri.tokenizer.vocabulary import NORMAL
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import save as save_encoder
from tests.tokenizer.hard_texts import HARD_TEXTS
from tests.tokenizer.test_huggingface_reader import KINDS, edited, files, save
from tests.tokenizer.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, train_sentencepiece

with lazy_imports():
    from transformers import PreTrainedTokenizerFast

# user-defined tokens that end a text by their names, as Gemma 3 has </s> among HTML's tags
ENDS = ["</s>", "<eos>", "<|im_end|>", "<|eot_id|>"]
OTHERS = ["<tool>", "‡", "<b>", "<unused0>", "\n\n", "[AVAILABLE]", "<|user|>"]


def _with_tokens(metadata: dict[str, Any], kind: int) -> dict[str, Any]:
    """The metadata with tokens of a kind at the end; a last word shows whether ids were moved."""
    keys = {name: list(metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type")}
    scores = metadata.get("tokenizer.ggml.scores")
    for token in [*ENDS, *OTHERS, "zebra"]:
        if token in keys["tokens"]:
            keys["token_type"][keys["tokens"].index(token)] = kind
        else:
            keys["tokens"].append(token)
            keys["token_type"].append(kind if token != "zebra" else NORMAL)
    made = {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in keys.items()}}
    if scores is not None:
        made["tokenizer.ggml.scores"] = [*scores, *[-1e4] * (len(keys["tokens"]) - len(scores))]
    return made


def _metadata(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "byte level", byte_level_metadata("gpt-2", ByteLevel(add_prefix_space=False))
    yield "sentencepiece", sentencepiece_metadata(train_sentencepiece())
    without = train_sentencepiece(add_dummy_prefix=False)
    yield "sentencepiece without a space", sentencepiece_metadata(without, add_space_prefix=False)
    save_encoder(directory, "xlm_roberta")
    with open_checkpoint(directory) as checkpoint:
        yield "unigram", tokenizer_metadata(checkpoint.tokenizer)


def _directories(path: Path) -> Iterator[tuple[str, Path, list[int]]]:
    """Names, directories and ids that end a text: added tokens that are ordinary ones, then special ones."""
    for name, make in KINDS.items():
        made = make()
        new = [token for token in (*ENDS, *OTHERS) if made.token_to_id(token) is None]
        made.add_tokens([AddedToken(token, normalized=False) for token in new])
        directory = save(path / name, made)

        def plain(contents: dict[str, Any]) -> None:
            for entry in contents["added_tokens"]:
                entry["special"] &= entry["content"] in ("<s>", "<unk>")

        yield f"{name}, special", directory, [made.token_to_id(token) for token in ENDS]
        shutil.copytree(directory, path / f"{name} plain")
        yield f"{name}, plain", edited(path / f"{name} plain", plain), []


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for name, metadata in _metadata(tmp_path_factory.mktemp("encoder")):
        for kind in range(1, 6):
            metadata_ = _with_tokens(metadata, kind)
            made[f"{name}, type {kind}"] = Tokenizer.from_metadata(metadata_)
    for name, directory, ends in _directories(tmp_path_factory.mktemp("directories")):
        made[name] = load_tokenizer(files(directory, eos_token_id=ends))
    return {name: one for name, one in made.items() if not name.startswith("prepending")}  # see below


def test_ordinary_added_tokens_are_those_of_transformers(tmp_path):
    """Catches an id that another token has, in files whose tokens take spaces along."""
    for name, directory, ends in _directories(tmp_path):
        if not ends:
            ours, theirs = (
                load_tokenizer(files(directory)),
                PreTrainedTokenizerFast.from_pretrained(directory),
            )
            for text in _texts(ours):
                if not any(token in text for token in ("<s>", "<unk>", "<|im_end|>")):
                    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), (name, text)


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that spell each token that is no ordinary word, and a few words."""
    vocabulary = tokenizer.vocabulary
    odd = [i for i, kind in enumerate(vocabulary.types) if kind != NORMAL]
    for token in dict.fromkeys(vocabulary.tokens[i] for i in {*odd, *tokenizer.special_ids} if i):
        if "▁" not in token:
            yield from (f"a {token} b", token, f"x{token}y", f"{token}{token} ", f" {token}")
    yield from (f"a {token} zebra" for token in (*ENDS, *OTHERS))


def _kept(name: str, text: str) -> str:
    """What comes back, where transformers too gives back another text.

    Metaspace puts no space before another, and drops the first; with a space prefix, text after a
    user-defined token gets one.
    """
    if name == "sentencepiece, type 4":
        first, *rest = re.split("(" + "|".join(map(re.escape, OTHERS)) + ")", text)
        return first + "".join(f" {part}" if part and i % 2 else part for i, part in enumerate(rest))
    return text.removeprefix(" ") if name.startswith("metaspace") else text


def test_decoding_gives_back_what_was_encoded(tokenizers):
    """Catches a token's text that becomes another character, because the token is left out of plain text."""
    wrong = []
    for name, tokenizer in tokenizers.items():
        is_unigram = name.startswith("unigram")
        for text in _texts(tokenizer):
            ids = tokenizer.encode(text)
            found = tokenizer.decode(ids)
            want = " ".join(text.split()) if is_unigram else _kept(name, text)
            unknown = is_unigram and tokenizer.vocabulary.unk_id in ids
            if found != want and not unknown:
                wrong.append((name, text, found))
            assert not tokenizer.special_ids - {tokenizer.vocabulary.unk_id} & {*ids}, (name, text)
    assert not wrong, wrong[:20]


@pytest.mark.full
def test_chats_give_back_what_was_written(tokenizers):
    """Catches the same in a chat, where control tokens count and a user's stay text."""
    for name, tokenizer in tokenizers.items():
        if not name.startswith("unigram"):
            template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
            for text in _texts(tokenizer):
                ids = template.encode(tokenizer, [{"role": "user", "content": text}])
                assert tokenizer.decode(ids[tokenizer.add_bos :]) == _kept(name, text), (name, text)


@pytest.mark.parametrize("number", range(len(HARD_TEXTS)))
def test_hard_texts_come_back(tokenizers, number):
    """Catches a character that a kind of tokenizer changes without need."""
    text = HARD_TEXTS[number].encode("utf-8", "replace").decode()
    for name, tokenizer in tokenizers.items():
        if not name.startswith(("unigram", "byte level,")) and "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == _kept(name, text), name
