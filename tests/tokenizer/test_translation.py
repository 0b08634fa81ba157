"""A text in another tokenizer's tokens: nothing lost, doubled or changed that was said to stay."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from kukri.tokenizer import Tokenizer
from kukri.tokenizer.translation import TranslatedText, Translation
from kukri.tokenizer.vocabulary import SPACE_MARK
from tests.tokenizer.hard_texts import HARD_TEXTS, PROSE, any_text
from tests.tokenizer.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, train_sentencepiece

BYTE_LEVEL = Tokenizer.from_metadata(byte_level_metadata("gpt-2", ByteLevel(add_prefix_space=False)))
SENTENCEPIECE = Tokenizer.from_metadata(sentencepiece_metadata(train_sentencepiece()))
BOTH = [Translation(BYTE_LEVEL, SENTENCEPIECE), Translation(SENTENCEPIECE, BYTE_LEVEL)]
END, START, UNKNOWN = (BYTE_LEVEL.encode(text, parse_special=True)[0] for text in (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>!",
))  # fmt: skip


def whole(text: str) -> str:
    """The text without what is no character, or what SentencePiece takes for a space."""
    return text.encode("utf-8", "replace").decode().replace(SPACE_MARK, "_")


@settings(max_examples=30)
@given(any_text, st.sampled_from(BOTH), st.lists(st.integers(1, 40), min_size=1))
def test_a_growing_text_stays_the_same_text(text: str, translation: Translation, sizes: list[int]) -> None:
    """Characters lost or doubled where a text is cut, a space before each part, ids that change later."""
    ids = translation.source.encode(whole(text + PROSE))
    grown, start = TranslatedText(translation), 0
    for i in range(len(ids)):
        part = ids[start : start + sizes[i % len(sizes)]]
        before = list(grown.ids)
        first = grown.push(part)
        assert grown.ids[:first] == before[:first]
        start += len(part)
        so_far = translation.source.decode(ids[:start])
        assert so_far.startswith(translation.target.decode(grown.ids, skip_special=True))
        if grown.is_complete:
            assert translation.target.decode(grown.ids, skip_special=True) == so_far
        if start >= len(ids):
            break
    assert grown.is_complete


@given(any_text, st.sampled_from(BOTH))
def test_drafts_are_the_same_text(text: str, translation: Translation) -> None:
    """Text that is lost, or half a character, among drafts."""
    ids = translation.target.encode_inside(whole(text))
    source = translation.source
    assert source.decode(translation.back(ids), continues=True) == whole(text)
    for n in range(len(ids)):
        found = source.decode(translation.back(ids[:n]), continues=True)
        assert whole(text).startswith(found)


def test_a_long_text_is_not_encoded_again() -> None:
    """A prompt that is encoded again with each token; words that have no spaces."""
    for text in (PROSE * 20, "x" * 5000, "日本語" * 2000):
        grown = TranslatedText(BOTH[0])
        grown.push(BYTE_LEVEL.encode(text))
        n = len(grown.ids)
        assert n - grown.push(BYTE_LEVEL.encode(" more")) < 700
        assert SENTENCEPIECE.decode(grown.ids, skip_special=True) == text + " more"


def test_special_tokens_stand_for_their_like() -> None:
    """A control token that a user wrote, ends of a turn as text, a token of one model alone."""
    grown = TranslatedText(BOTH[0])
    grown.push(
        [START, *BYTE_LEVEL.encode("user <|endoftext|> </s> hi"), END, *BYTE_LEVEL.encode("a"), UNKNOWN]
    )
    n_bos = int(SENTENCEPIECE.add_bos)
    text = [*SENTENCEPIECE.encode("user <|endoftext|> </s> hi"), SENTENCEPIECE.vocabulary.eos_id]
    assert grown.ids[n_bos:] == [*text, *SENTENCEPIECE.encode_inside("a")]
    eos = SENTENCEPIECE.vocabulary.eos_id
    assert eos is not None
    drafts = [
        *SENTENCEPIECE.encode_inside("b"),
        eos,
        SENTENCEPIECE.bos_id or 0,
        *SENTENCEPIECE.encode_inside("c"),
    ]
    assert BOTH[0].back(drafts) == [*BYTE_LEVEL.encode("b"), BYTE_LEVEL.vocabulary.eos_id]


def test_every_hard_text_comes_back() -> None:
    """Copies that share what grows."""
    for translation in BOTH:
        for text in map(whole, HARD_TEXTS):
            grown = TranslatedText(translation)
            ids, more = translation.source.encode(text), translation.source.encode_inside(" and more")
            grown.push(ids)
            one, before = grown.copy(), list(grown.ids)
            one.push(more)
            assert grown.ids == before
            want = translation.source.decode([*ids, *more])
            assert translation.target.decode(one.ids, skip_special=True) == want
