"""Broken and hostile files: what is refused about their tokens."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from kukri.errors import FormatError, KukriError, RequestError, UnsupportedError
from kukri.tokenizer import Tokenizer
from tests.tokenizer.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, train_sentencepiece

METADATA = byte_level_metadata("gpt-2", ByteLevel(add_prefix_space=False))
N_TOKENS = len(METADATA["tokenizer.ggml.tokens"])


def changed(**keys):
    return METADATA | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": []}, "missing or empty"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "'a' appears twice"),
        ({"tokens": "abc"}, "must be an array of strings"),
        ({"tokens": [1, 2]}, "must be an array of strings"),
        ({"token_type": [1]}, f"must have {N_TOKENS} entries, not 1"),
        ({"token_type": ["x"] * N_TOKENS}, "must be an array of integers"),
        ({"token_type": [1.5] * N_TOKENS}, "must be an array of integers"),
        ({"eos_token_id": N_TOKENS}, f"eos_token_id must be below {N_TOKENS}"),
        ({"bos_token_id": -2}, "bos_token_id must be below .* not -2"),
        ({"bos_token_id": "x"}, "must be a token id, not"),
        ({"bos_token_id": True}, "must be a token id, not"),
        ({"merges": ["a b c"]}, "entry 0 of tokenizer.ggml.merges"),
        ({"merges": ["a b", "ab"]}, "entry 1 of tokenizer.ggml.merges"),
        ({"merges": ["qqq zzz"]}, "must fit the tokens"),
        ({"add_bos_token": "yes"}, "must be a boolean"),
        ({"add_bos_token": True, "bos_token_id": -1}, "the bos token is missing"),
        ({"pre": 3}, "must be a string"),
    ],
)
def test_contradictions_are_named(keys, message):
    """Catches a broken file that loads and talks nonsense, or fails with a traceback from Rust."""
    with pytest.raises(FormatError, match=message) as error:
        Tokenizer.from_metadata(changed(**keys), path="model.gguf")
    assert str(error.value).startswith("model.gguf: ")


@pytest.mark.parametrize("kind", [None, "plamo2", "rwkv", 7, ["gpt2"]])
def test_other_tokenizers_are_refused_by_name(kind):
    """Catches a vocabulary of another kind read as BPE."""
    with pytest.raises(UnsupportedError, match=r"gpt2.*llama"):
        Tokenizer.from_metadata(changed(model=kind))


def test_a_missing_token_id_may_be_written_as_minus_one():
    """Catches files with bos_token_id 4294967295 being refused; it is how converters write None."""
    tokenizer = Tokenizer.from_metadata(changed(bos_token_id=0xFFFFFFFF))
    assert tokenizer.bos_id is None
    assert tokenizer.bos_token == ""
    assert tokenizer.encode("a", add_special=True) == tokenizer.encode("a")


def test_tokens_that_end_a_turn_are_found_by_their_text():
    """Catches a model that talks on after <|eot_id|> because its file calls only <|end_of_text|> EOS."""
    tokens = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|fim_pad|>", "x"]
    metadata = changed(tokens=tokens, token_type=[3, 3, 1, 3, 1], merges=[], eos_token_id=0, bos_token_id=-1)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.eos_ids == {0, 1, 2, 3}
    assert 2 in tokenizer.special_ids  # though the file calls it normal
    stated = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.eot_token_id": 4})
    assert 4 in stated.eos_ids


def test_end_of_a_message_within_a_turn_is_no_end():
    """Catches gpt-oss stopping after its reasoning: <|end|> only ends a message there."""
    tokens = ["<|end|>", "<|return|>", "<|call|>"]
    metadata = changed(tokens=tokens, token_type=[3, 3, 3], merges=[], eos_token_id=1, bos_token_id=-1)
    assert Tokenizer.from_metadata(metadata).eos_ids == {1, 2}
    alone = changed(tokens=tokens[:1], token_type=[3], merges=[], eos_token_id=0, bos_token_id=-1)
    assert Tokenizer.from_metadata(alone).eos_ids == {0}


def test_text_must_be_text():
    """Catches bytes or None being tokenized by their repr, or a TypeError from Rust."""
    tokenizer = Tokenizer.from_metadata(METADATA)
    for wrong in (b"abc", None, 1, ["a"]):
        with pytest.raises(RequestError, match="must be a string") as error:
            tokenizer.encode(wrong)
        assert error.value.param == "prompt"


SENTENCEPIECE = sentencepiece_metadata(train_sentencepiece(vocab_size=500))
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**33),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-3, 8), st.text("ab ▁<>", max_size=3), st.floats()), max_size=6),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([METADATA, SENTENCEPIECE]),
    st.dictionaries(
        st.sampled_from([*sorted(METADATA.keys() | SENTENCEPIECE.keys()), "tokenizer.chat_template"]),
        odd_values,
    ),
    st.sets(st.sampled_from(sorted(METADATA.keys() | SENTENCEPIECE.keys()))),
)
def test_any_metadata_works_or_is_refused_in_one_line(metadata, odd, missing):
    """Catches TypeErrors, panics and tracebacks on metadata that no converter wrote."""
    metadata = {key: value for key, value in (metadata | odd).items() if key not in missing}
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except KukriError as error:
        refusal = str(error)
        assert "\n" not in refusal
        return
    ids = tokenizer.encode("ab <s>é\n", add_special=True, parse_special=True)
    tokenizer.decode(ids)
    for i in range(tokenizer.n_vocab):
        tokenizer.token_bytes(i)
