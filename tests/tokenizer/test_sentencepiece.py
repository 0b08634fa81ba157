"""SentencePiece BPE against the sentencepiece package and transformers."""

import re

import numpy as np
import pytest
from hypothesis import given

from kukri.errors import FormatError
from kukri.tokenizer import TextStream, Tokenizer
from kukri.tokenizer.gguf_keys import TokenizerKeys
from kukri.tokenizer.tokenizer import merges_from_scores
from kukri.tokenizer.vocabulary import read_vocabulary
from tests.lazy_imports import lazy_imports
from tests.stopwatch import within
from tests.tokenizer.hard_texts import HARD_TEXTS, any_text
from tests.tokenizer.tiny_tokenizers import sentencepiece_metadata, train_sentencepiece

with lazy_imports():
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer
    from transformers.tokenization_utils_base import generate_merges

PROCESSOR = train_sentencepiece(user_defined_symbols=["<tool>"])
METADATA = sentencepiece_metadata(PROCESSOR)
TOKENIZER = Tokenizer.from_metadata(METADATA)


def replaced(text):
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def test_ids_equal_sentencepiece():
    """Catches merges in another order, a lost space at the start, and bytes of unknown characters."""
    for text in HARD_TEXTS:
        assert TOKENIZER.encode(text) == PROCESSOR.encode(replaced(text)), text


@pytest.mark.full
@given(any_text)
def test_ids_equal_sentencepiece_on_any_text(text):
    """Catches the odd character that goes another way; ▁ is a space to both."""
    ids = TOKENIZER.encode(text)
    assert ids == PROCESSOR.encode(replaced(text))
    assert TOKENIZER.decode(ids) == replaced(text).replace("▁", " ")


def test_ids_without_the_space_prefix_equal_sentencepiece():
    """Catches add_space_prefix being ignored (Gemma, CodeLlama infill)."""
    processor = train_sentencepiece(add_dummy_prefix=False)
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(processor, add_space_prefix=False))
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert ids == processor.encode(replaced(text)), text
        assert tokenizer.decode(ids) == replaced(text).replace("▁", " ")


def test_ids_equal_transformers_with_special_and_user_defined_tokens():
    """Catches text after <s> or <tool> without its space, which Llama 2 and TinyLlama never saw."""
    parts = {"tokenizer_type": "llama"} | {
        name: METADATA[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    }
    # phi3's builder makes the Prepend normalizer of those models' tokenizer.json
    reference = PreTrainedTokenizerFast(tokenizer_object=convert_gguf_tokenizer("phi3", parts)[0])
    for text in [*HARD_TEXTS, "<s>[INST] hi [/INST]</s><s> a<tool>b <tool>", "<s></s>", "<tool>"]:
        expected = reference.encode(replaced(text), add_special_tokens=False)
        assert TOKENIZER.encode(text, parse_special=True) == expected, text


def test_decode_equals_sentencepiece_and_transformers():
    """Catches ▁ in the output, byte tokens printed as <0x..>, and a wrong number of leading spaces."""
    for text in HARD_TEXTS:
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == PROCESSOR.decode(PROCESSOR.encode(replaced(text)))
    bos = TOKENIZER.encode("Hi there", add_special=True)
    assert TOKENIZER.decode(bos) == "<s> Hi there"  # as transformers
    assert TOKENIZER.decode(bos, skip_special=True) == "Hi there"
    assert TOKENIZER.decode(TOKENIZER.encode("Hi"), continues=True) == " Hi"


def test_special_tokens_spelled_out_are_text():
    """Catches <s> and </s> being built by merges, since their score of 0 is the best of all."""
    for text in ("<s>", "</s>", "<unk>", "a<s>b</s>", "<0x41>"):
        ids = TOKENIZER.encode(text)
        assert not TOKENIZER.special_ids.intersection(ids)
        assert TOKENIZER.decode(ids) == text


def test_a_stream_equals_decode():
    """Catches a leading space that decode drops and a stream keeps, and characters of several byte tokens."""
    for text in HARD_TEXTS:
        for continues in (False, True):
            ids = TOKENIZER.encode(text, add_special=True)
            stream = TextStream(TOKENIZER, continues=continues)
            streamed = "".join(map(stream.push, ids)) + stream.flush()
            assert streamed == TOKENIZER.decode(ids, skip_special=True, continues=continues), text


def test_merges_in_the_file_are_used():
    """Catches files converted from tokenizer.json, whose scores mean nothing."""
    stored = TokenizerKeys(METADATA, None)
    merges = [" ".join(pair) for pair in merges_from_scores(read_vocabulary(stored), stored)]
    keys = {key: value for key, value in METADATA.items() if key != "tokenizer.ggml.scores"}
    tokenizer = Tokenizer.from_metadata(keys | {"tokenizer.ggml.merges": merges})
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == TOKENIZER.encode(text)


def test_merges_equal_transformers_in_order():
    """Catches ties broken another way: tokens of equal score must merge as in transformers."""
    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *"abcd"]
    tokens += sorted({"".join(rng.choice(list("abcd"), n)) for n in rng.integers(2, 7, 300)})
    scores = [0.0] * 3 + rng.integers(-5, 0, len(tokens) - 3).astype(float).tolist()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
    }
    ids = {token: i for i, token in enumerate(tokens)}
    expected = generate_merges(ids, dict(zip(tokens, scores)), skip_tokens=tokens[:3])
    stored = TokenizerKeys(metadata, None)
    assert merges_from_scores(read_vocabulary(stored), stored) == expected


def test_defaults_of_old_files():
    """Catches files without special ids or types, where <s> is 1, </s> 2, <unk> 0 and bytes are <0x..>."""
    keys = ("model", "tokens", "scores")
    tokenizer = Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": METADATA[f"tokenizer.ggml.{key}"] for key in keys}
    )
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("Hi 漢字", add_special=True)[0] == 1
    assert tokenizer.decode(tokenizer.encode("Hi 漢字 \x01")) == "Hi 漢字 \x01"


@pytest.mark.representative(2)
def test_32k_scores_become_merges_quickly():
    """Catches a quadratic search: the whole tokenizer of a Llama-sized vocabulary is made in 1.5 s."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz▁"))
    words = {"".join(rng.choice(letters, n)) for n in rng.integers(2, 12, 31000)}
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters.tolist(), *sorted(words)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259), np.int32),
    }
    with within(1.5):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("scores", [None, [1.0], ["x"] * 900, [float("nan")] * 900])
def test_scores_that_are_missing_or_odd(scores):
    """Catches nonsense scores that silently give nonsense tokens."""
    metadata = {key: value for key, value in METADATA.items() if key != "tokenizer.ggml.scores"}
    if scores is not None:
        metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(FormatError, match="scores"):
        Tokenizer.from_metadata(metadata)


def test_a_vocabulary_that_would_take_years_is_refused():
    """Catches a hostile file of very long tokens: cutting each in two everywhere is quadratic."""
    metadata = METADATA | {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a" * 50_000],
        "tokenizer.ggml.scores": [0.0] * 4,
        "tokenizer.ggml.token_type": [2, 3, 3, 1],
    }
    with pytest.raises(FormatError, match="too long"):
        Tokenizer.from_metadata(metadata)
