"""Texts in the middle of another: grammars, bad words, breakers and biases get no space put before them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers

from kukri import LLM, SamplingParams
from kukri.formats.checkpoint import open_checkpoint
from kukri.sampling import Grammar, resolve_texts
from kukri.sampling.grammar import compiled
from kukri.server.llama_cpp.schema import LlamaCompletionBody
from kukri.tokenizer import FillInMiddle, Tokenizer, load_tokenizer
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import save as save_encoder
from tests.tiny_gguf import tiny_config, write_tiny
from tests.tokenizer.hard_texts import HARD_TEXTS
from tests.tokenizer.test_huggingface_reader import KINDS, files, save
from tests.tokenizer.tiny_tokenizers import metadata_of, sentencepiece_metadata, train_sentencepiece

with lazy_imports():
    from transformers import PreTrainedTokenizerFast

PROCESSOR = train_sentencepiece(user_defined_symbols=["<tool>"])
METADATA = sentencepiece_metadata(PROCESSOR)
PREFIXING = Tokenizer.from_metadata(METADATA)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}},
    "required": ["name"],
    "additionalProperties": False,
}


def without_prefix() -> sentencepiece.SentencePieceProcessor:
    """The same vocabulary in SentencePiece itself, which puts no space before a text."""
    from sentencepiece import sentencepiece_model_pb2 as protos

    proto = protos.ModelProto.FromString(PROCESSOR.serialized_model_proto())
    proto.normalizer_spec.add_dummy_prefix = False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def whole(text: str) -> str:
    """The text as all may see it: lone surrogates are U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def test_ids_are_those_of_sentencepiece_without_its_prefix():
    """Catches a space put before a text that continues another."""
    reference = without_prefix()
    for text in HARD_TEXTS:
        assert PREFIXING.encode_inside(text) == reference.encode(whole(text)), text
    assert PREFIXING.encode("The") != PREFIXING.encode_inside("The") == reference.encode("The")


def test_ids_are_those_of_transformers_that_add_no_space(tmp_path):
    """Catches a tokenizer.json whose space comes by another step, and tokens of its own that are lost."""
    for name, make in KINDS.items():
        made = make()
        ours = load_tokenizer(files(save(tmp_path / name, made)))
        contents = json.loads(made.to_str())
        for key, steps in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
            step = contents[key]
            if step and step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
            if step and step["type"] == "Sequence":
                step[steps] = [one for one in step[steps] if one["type"] != "Prepend"]
        theirs = PreTrainedTokenizerFast(tokenizer_object=Trained.from_str(json.dumps(contents)))
        for text in HARD_TEXTS:
            want = theirs.encode(whole(text), add_special_tokens=False, split_special_tokens=True)
            assert ours.encode_inside(text) == want, (name, text)


def _tokenizers(path) -> dict[str, Tokenizer]:
    """Kinds that put a space before a text."""
    trained = Trained(models.BPE())
    trained.pre_tokenizer = words = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=words.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    trained.train_from_iterator(HARD_TEXTS[5:8], trainer)
    save_encoder(path / "unigram", "xlm_roberta")
    with open_checkpoint(path / "unigram") as checkpoint:
        unigram = load_tokenizer(checkpoint.tokenizer)
    kinds = {name: load_tokenizer(files(save(path / name, make()))) for name, make in KINDS.items()}
    return kinds | {
        "sentencepiece": PREFIXING,
        "unigram": unigram,
        "byte level": Tokenizer.from_metadata(metadata_of(trained, "gpt-2")),
    }


def test_bytes_are_those_of_the_text(tmp_path):
    """Catches spaces lost at the ends, where a tokenizer joins or strips them, and a space too many."""
    for name, tokenizer in _tokenizers(tmp_path).items():
        for text in (" the cat", "the cat", "cat ", "the", " "):
            ids = tokenizer.encode_inside(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode(), (name, text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json(PERSON),
        Grammar.choice(["the cat", " the dog", "né"]),
        Grammar.regex(r"The capital (is|was) [A-Z][a-z]{1,5}"),
        Grammar.json({"const": {"The capital of France": ["Paris", "日本"]}}),
    ],
    ids=["person", "choice", "regex", "constant"],
)
def test_grammars_are_followed_to_their_end(tmp_path, grammar):
    """Catches a grammar that fails where only one text may follow: its tokens began with a space."""
    for name, tokenizer in _tokenizers(tmp_path).items():
        if name == "unigram":
            continue  # it has no bytes to spell every text with
        start = compiled(grammar, tokenizer)
        for seed in range(20):
            rng, matcher, text = np.random.default_rng(seed), start.matcher(), b""
            for _ in range(200):
                assert matcher.update() == "", (name, text)
                bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
                ids = np.flatnonzero(bits)
                if tokenizer.eos_ids & {*ids.tolist()}:
                    break
                token_id = int(rng.choice(ids))
                text += tokenizer.token_bytes(token_id)
                matcher.take(token_id)
            found = text.decode("utf-8", "replace")
            assert not found.startswith("  "), (name, found)
            if grammar.kind == "json" and len(text) < 190:
                json.loads(found)


def test_a_model_with_a_space_prefix_serves_grammars(tmp_path):
    """Catches the 500 of every Llama 2, TinyLlama, Mistral and Phi-3."""
    keys = {name.replace(".", "__"): value for name, value in METADATA.items()}
    n_vocab = len(METADATA["tokenizer.ggml.tokens"])
    keys |= {"tokenizer__ggml__pre": None, "tokenizer__ggml__merges": None}
    path = write_tiny(tmp_path / "sp.gguf", replace(tiny_config(256), n_vocab=n_vocab), **keys)
    with LLM(path, n_threads=1) as llm:
        for seed in range(3):
            params = SamplingParams(max_tokens=200, seed=seed, grammar=Grammar.json(PERSON))
            result = llm.generate("The capital", params)
            if result.finish_reason == "stop":
                assert set(json.loads(result.text)) == {"name"}
            assert result.finish_reason in ("stop", "length")


def test_words_and_biases_are_tokens_of_a_text_inside():
    """Catches words that are banned with a space before them alone."""
    reference = without_prefix()
    params = resolve_texts(
        SamplingParams(
            bad_words=["cat"],
            dry_multiplier=1,
            dry_sequence_breakers=["\x01 zz"],
            prediction="The capital",
        ),
        PREFIXING,
    )
    assert set(params.bad_words) == {tuple(reference.encode("cat")), tuple(reference.encode(" cat"))}
    assert params.dry_sequence_breakers == (tuple(reference.encode("\x01 zz")),)
    assert list(params.prediction) == reference.encode("The capital")
    body = LlamaCompletionBody(prompt="x", logit_bias=[["The", 1.0]])
    assert set(body.bias(PREFIXING)) == {*reference.encode("The")}


def test_code_is_filled_in_without_a_space():
    """Catches the middle of a line of code that begins with a space nobody wrote."""
    tool = PREFIXING.vocabulary.id_of["<tool>"]
    ids = FillInMiddle(PREFIXING, tool, tool, tool, None, None).prompt("def f", "return", middle="x")
    inside = [without_prefix().encode(text) for text in ("def f", "return", "x")]
    first = [] if not PREFIXING.add_bos else [PREFIXING.bos_id]
    assert ids == [*first, tool, *inside[0], tool, *inside[1], tool, *inside[2]]
