"""Byte-level BPE against transformers: the same words, the same ids."""

import json
import re
import unicodedata
from functools import cache

import pytest
from hypothesis import given
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from kukri.errors import UnsupportedError
from kukri.tokenizer import Tokenizer
from kukri.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.lazy_imports import lazy_imports
from tests.tokenizer.hard_texts import HARD_TEXTS, any_text
from tests.tokenizer.tiny_tokenizers import SPECIALS, byte_level_metadata

with lazy_imports():
    import transformers
    from transformers.integrations.gguf import convert_gguf_tokenizer, gguf_tokenizer_mapping

GPT2_WORDS = ByteLevel(add_prefix_space=False)


def replaced(text):
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def vocab_and_merges(metadata):
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return {token: i for i, token in enumerate(tokens)}, merges


def with_added(reference):
    """A transformers tokenizer given the added tokens that the metadata speaks of."""
    reference.add_special_tokens(
        {"additional_special_tokens": [AddedToken(s, normalized=False, special=True) for s in SPECIALS[:-1]]}
    )
    reference.add_tokens([AddedToken(SPECIALS[-1], normalized=False, special=False)])
    return reference


def assert_same_ids(tokenizer, reference, texts=HARD_TEXTS):
    for text in texts:
        expected = reference.encode(replaced(text), add_special_tokens=False)
        assert tokenizer.encode(text, parse_special=True) == expected, text


def transformers_words(pre):
    split = Split(Regex(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


CLASSES = {  # name: (words the vocabulary is learned on, the name of transformers' class for the family)
    "gpt-2": (GPT2_WORDS, "GPT2Tokenizer"),
    "phi-2": (GPT2_WORDS, "GPT2Tokenizer"),
    "mpt": (GPT2_WORDS, "GPTNeoXTokenizer"),
    "olmo": (GPT2_WORDS, "GPTNeoXTokenizer"),
    "command-r": (Sequence([Digits(individual_digits=True), GPT2_WORDS]), "CohereTokenizer"),
    "qwen2": (GPT2_WORDS, "Qwen2Tokenizer"),
    "qwen35": (GPT2_WORDS, "Qwen3_5Tokenizer"),
}


@pytest.mark.parametrize("pre", CLASSES)
def test_ids_equal_the_tokenizer_class_of_the_family(pre):
    """Catches a wrong pattern, a missing NFC, digits in groups, and added tokens that are cut or merged."""
    words, class_name = CLASSES[pre]
    metadata = byte_level_metadata(pre, words)
    vocab, merges = vocab_and_merges(metadata)
    reference = with_added(getattr(transformers, class_name)(vocab=vocab, merges=merges))
    assert_same_ids(Tokenizer.from_metadata(metadata), reference)


READ_BY_BOTH = (
    *(
        "dbrx",
        "deepseek-r1-qwen",
        "falcon-h1",
        "falcon3",
        "gpt-4o",
        "lfm2",
        "llama-bpe",
        "llama-v3",
        "llama3",
    ),
    *("llama4", "megrez", "pixtral", "qwen2", "qwen35", "smaug-bpe", "tekken"),
)


def test_every_pattern_that_transformers_has_too_is_compared():
    """Catches a name in both tables that the test below leaves out."""
    theirs = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    assert set(theirs) & set(PRE_TOKENIZERS) == set(READ_BY_BOTH)


@pytest.mark.parametrize("pre", READ_BY_BOTH)
def test_ids_equal_transformers_reading_of_the_same_metadata(pre):
    """Catches a name in the table that stands for another family's pattern."""
    metadata = byte_level_metadata(pre, transformers_words(pre))
    parts = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    parts |= {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")}
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=convert_gguf_tokenizer("llama", parts)[0]
    )
    # transformers leaves out NFC here
    texts = [unicodedata.normalize("NFC", replaced(text)) for text in HARD_TEXTS]
    assert_same_ids(Tokenizer.from_metadata(metadata), reference, texts)


# `pre_tokenizer` of the models' own tokenizer.json
DIGITS = {"type": "Digits", "individual_digits": True}
REGEX_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def isolated(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


OFFICIAL = {
    "bailingmoe2": [
        isolated(
            "'(?i:[sdmt]|ll|ve|re)|[^\r\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\r\n]*"
            "|\\s*[\r\n]|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ],
    "smollm": [DIGITS, REGEX_BYTES],
    "starcoder": [DIGITS, REGEX_BYTES],
    "refact": [DIGITS, REGEX_BYTES],
    "deepseek-coder": [
        isolated("[\r\n]"),
        isolated("\\s?\\p{L}+"),
        isolated("\\s?\\p{P}+"),
        isolated("[一-龥ࠀ-一가-퟿]+"),
        DIGITS,
        BYTES,
    ],
    "deepseek-v3": [
        isolated("\\p{N}{1,3}"),
        isolated("[一-龥\u3040-ゟ゠-ヿ]+"),
        isolated(
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ],
}


def pieces(pre_tokenizer, text):
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def official_words(pre):
    empty = json.loads(HFTokenizer(BPE()).to_str())
    empty["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": OFFICIAL[pre]}
    return HFTokenizer.from_str(json.dumps(empty)).pre_tokenizer


@pytest.mark.parametrize("pre", OFFICIAL)
def test_words_equal_those_of_the_models_tokenizer_json(pre):
    """Catches an order of steps or a class of characters that differs from the model's."""
    ours, theirs = PRE_TOKENIZERS[pre].build(), official_words(pre)
    for text in HARD_TEXTS:
        assert pieces(ours, replaced(text)) == pieces(theirs, replaced(text)), text


@pytest.mark.representative(2)
@pytest.mark.full(but=["smollm"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_words_of_every_character(pre):
    """Catches a character class that differs from transformers' for some part of Unicode."""
    ours, theirs = PRE_TOKENIZERS[pre].build(), GPT2_WORDS
    if pre in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS:
        theirs = transformers_words(pre)
    elif pre in OFFICIAL:
        theirs = official_words(pre)
    for start in range(0, 0x20000, 64):
        text = "".join(f"a{chr(i)}{chr(i)} " for i in range(start, start + 64) if not 0xD800 <= i < 0xE000)
        assert pieces(ours, text) == pieces(theirs, text), hex(start)


LLAMA3 = byte_level_metadata("llama-bpe", PRE_TOKENIZERS["llama-bpe"].build())
TOKENIZER = Tokenizer.from_metadata(LLAMA3)


@cache
def llama3_of_transformers():
    return with_added(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=convert_gguf_tokenizer(
                "llama",
                {"tokenizer_type": "gpt2", "pre_tokenizer_type": "llama3"}
                | {name: LLAMA3[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")},
            )[0]
        )
    )


@given(any_text)
def test_any_text_comes_back_and_has_the_reference_ids(text):
    """Catches bytes lost or doubled between words, and ids that differ on some odd character."""
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == replaced(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == replaced(text).encode()
    assert TOKENIZER.encode(text, parse_special=True) == llama3_of_transformers().encode(
        replaced(text), add_special_tokens=False
    )


def test_a_whole_word_of_the_vocabulary_wins_over_merges():
    """Catches ignore_merges being lost for Llama 3: its longer words have no merges that lead to them."""
    tokens = [*LLAMA3["tokenizer.ggml.tokens"], "Ġzyzzyva"]
    types = [*LLAMA3["tokenizer.ggml.token_type"], 1]
    metadata = LLAMA3 | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert Tokenizer.from_metadata(metadata).encode(" zyzzyva") == [len(tokens) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer.from_metadata(metadata).encode(" zyzzyva")) > 1


def test_special_tokens_in_text_are_text_unless_asked_for():
    """Catches prompt injection: a user who writes <|im_end|> must not end their turn."""
    text = "a<|im_end|>b<|endoftext|>"
    plain = TOKENIZER.encode(text)
    assert not TOKENIZER.special_ids.intersection(plain)
    assert TOKENIZER.decode(plain) == text
    parsed = TOKENIZER.encode(text, parse_special=True)
    assert [i for i in parsed if i in TOKENIZER.special_ids] == [
        LLAMA3["tokenizer.ggml.tokens"].index("<|im_end|>"),
        0,
    ]
    assert TOKENIZER.decode(parsed, skip_special=True) == "ab"


def test_no_text_reaches_a_control_token_even_where_merges_or_whole_words_would():
    """Catches a control token that plain BPE can build, or that ignore_merges takes for a word."""
    tokens = [*LLAMA3["tokenizer.ggml.tokens"], "STOP", "aaa"]
    types = [*LLAMA3["tokenizer.ggml.token_type"], 3, 3]
    merges = [*LLAMA3["tokenizer.ggml.merges"], "aa a"]
    metadata = LLAMA3 | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    for text in ("STOP", "aaa", "STOP aaa aaaa"):
        ids = tokenizer.encode(text)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("STOP", parse_special=True) == [len(tokens) - 2]


def test_the_longest_special_token_wins_and_user_defined_ones_always_match():
    """Catches <|im_end|>! read as <|im_end|> and "!", and <tool> cut to pieces in plain text."""
    index = LLAMA3["tokenizer.ggml.tokens"].index
    assert TOKENIZER.encode("<|im_end|>!", parse_special=True) == [index("<|im_end|>!")]
    assert TOKENIZER.encode("<|im_end|>", parse_special=True) == [index("<|im_end|>")]
    assert TOKENIZER.encode("a<tool>") == [index("a"), index("<tool>")]
    assert index("<tool>") not in TOKENIZER.special_ids


def test_bos_and_eos_are_added_as_the_file_says():
    """Catches BOS lost, doubled, or added to models that never saw one."""
    bos = TOKENIZER.bos_id
    assert TOKENIZER.add_bos  # Llama 3's default
    assert TOKENIZER.encode("a", add_special=True)[:1] == [bos]
    assert TOKENIZER.encode("", add_special=True) == [bos]
    again = TOKENIZER.encode("<|endoftext|>a", add_special=True, parse_special=True)
    assert again.count(bos) == 1
    off = Tokenizer.from_metadata(LLAMA3 | {"tokenizer.ggml.add_bos_token": False})
    assert off.encode("a", add_special=True) == off.encode("a")
    both = Tokenizer.from_metadata(LLAMA3 | {"tokenizer.ggml.add_eos_token": True})
    assert both.encode("a", add_special=True) == [bos, *both.encode("a"), 0]


def test_unknown_pre_tokenizer_lists_the_known():
    """Catches a silent fallback to the wrong words, which costs quality that nobody sees."""
    with pytest.raises(UnsupportedError, match=r"'nonesuch'.*llama-bpe.*smollm"):
        Tokenizer.from_metadata(LLAMA3 | {"tokenizer.ggml.pre": "nonesuch"})


def test_missing_pre_tokenizer_is_the_default_one():
    """Catches old files, from before the key, being refused; numbers are cut in threes there."""
    old = {key: value for key, value in LLAMA3.items() if key != "tokenizer.ggml.pre"}
    assert Tokenizer.from_metadata(old).encode("x 1234567") == Tokenizer.from_metadata(
        LLAMA3 | {"tokenizer.ggml.pre": "default"}
    ).encode("x 1234567")
    assert pieces(PRE_TOKENIZERS["default"].build(), "x 1234567.") == ["x", "Ġ", "123", "456", "7", "."]
