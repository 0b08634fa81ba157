"""Small vocabularies trained on the spot, as GGUF metadata."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer

from tests.tokenizer.hard_texts import HARD_TEXTS, PROSE

CORPUS = [*(text.encode("utf-8", "replace").decode() for text in HARD_TEXTS), *PROSE.split("\n")] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>!", "<tool>"]


def byte_level_metadata(pre: str, words: PreTokenizer, **keys: Any) -> dict[str, Any]:
    """GGUF keys of a byte-level BPE vocabulary learned on `words`, special tokens at both ends of the ids.

    <tool> is user-defined, "unused word" an unused slot; `keys` are added below tokenizer.ggml.
    """
    return metadata_of(Tokenizer.from_str(_learned_words(pickle.dumps(words))), pre, **keys)


@cache
def _learned_words(words: bytes) -> str:
    """The file of a byte-level BPE vocabulary that is learned on the words of a pickled pre-tokenizer."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pickle.loads(words)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS[:2],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    return trained.to_str()


def metadata_of(trained: Tokenizer, pre: str, **keys: Any) -> dict[str, Any]:
    """The metadata that a converter would write for a trained tokenizer, and a few tokens more."""
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    types = [3 if token in SPECIALS else 1 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *SPECIALS[2:], "unused word"],
        "tokenizer.ggml.token_type": [*types, 3, 3, 4, 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with Llama's settings, learned once a process."""
    return sentencepiece.SentencePieceProcessor(model_proto=_learned(json.dumps(options)))


@cache
def _learned(options: str) -> bytes:
    """The file of a SentencePiece model with Llama's settings and `options`, as JSON."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 900,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "max_sentence_length": 20000,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **{**settings, **json.loads(options)}
    )
    return model.getvalue()


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor, **keys: Any) -> dict[str, Any]:
    """GGUF keys of a SentencePiece model, <tool> as user-defined; `keys` are added below tokenizer.ggml."""
    ids = range(processor.get_piece_size())
    kinds = {2: processor.is_unknown, 3: processor.is_control, 5: processor.is_unused, 6: processor.is_byte}
    types = [next((kind for kind, is_it in kinds.items() if is_it(i)), 1) for i in ids]
    if (tool := processor.piece_to_id("<tool>")) != processor.unk_id():
        types[tool] = 4
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": processor.id_to_piece(list(ids)),
        "tokenizer.ggml.scores": processor.get_score(list(ids)),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
