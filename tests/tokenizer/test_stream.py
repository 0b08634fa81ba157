"""Text token by token, and stop strings, for every way to cut a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from kukri.errors import RequestError
from kukri.tokenizer import StopStrings, TextStream, Tokenizer
from tests.stopwatch import within
from tests.tokenizer.hard_texts import HARD_TEXTS, any_text
from tests.tokenizer.tiny_tokenizers import byte_level_metadata

METADATA = byte_level_metadata("gpt-2", ByteLevel(add_prefix_space=False))
TOKENIZER = Tokenizer.from_metadata(METADATA)
BYTE_IDS = [TOKENIZER.encode(chr(i))[0] for i in range(128)]


def streamed(ids, **options):
    stream = TextStream(TOKENIZER, **options)
    return [*map(stream.push, ids), stream.flush()]


@given(st.lists(st.integers(0, TOKENIZER.n_vocab - 1), max_size=40), st.booleans())
def test_pieces_add_up_to_decode(ids, skip_special):
    """Catches characters lost, doubled or replaced differently where bytes make no sense."""
    assert "".join(streamed(ids, skip_special=skip_special)) == TOKENIZER.decode(
        ids, skip_special=skip_special
    )


@given(any_text)
def test_no_piece_holds_half_a_character(text):
    """Catches U+FFFD shown for the first bytes of an emoji that is still coming."""
    text = text.encode("utf-8", "replace").decode().replace("\ufffd", "")
    *pieces, rest = streamed(TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert rest == ""


def test_a_character_cut_short_shows_at_the_end():
    """Catches the last bytes being swallowed when generation ends within a character."""
    ids = TOKENIZER.encode("é𐍈")
    assert streamed(ids[:-1])[-1] == "\ufffd"
    assert "".join(streamed(ids[:-1])) == TOKENIZER.decode(ids[:-1]) == "é\ufffd"
    stream = TextStream(TOKENIZER)
    assert [stream.push(ids[0]), stream.flush(), stream.flush()].count("") == 2  # é is one or two tokens


def test_special_tokens_are_skipped_unless_asked_for():
    """Catches <|im_end|> in an answer."""
    ids = TOKENIZER.encode("a<|im_end|>b", parse_special=True)
    assert "".join(streamed(ids)) == "ab"
    assert "".join(streamed(ids, skip_special=False)) == "a<|im_end|>b"


def test_ids_outside_the_vocabulary():
    """Catches an id of -1 read from the end of the table."""
    for wrong in (-1, TOKENIZER.n_vocab, 10**9):
        for use in (TextStream(TOKENIZER).push, TOKENIZER.token_bytes, lambda i: TOKENIZER.decode([i])):
            with pytest.raises(RequestError, match=f"{wrong} must be below"):
                use(wrong)
    for wrong in (1.5, "1", None):
        with pytest.raises(RequestError, match="must be an integer"):
            TOKENIZER.decode([wrong])


def first_stop(text, stops):
    """StopStrings' contract, written the slow way."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@st.composite
def chopped_text(draw):
    text = draw(st.text("ab\n", max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@given(chopped_text(), st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4))
def test_text_ends_before_the_first_stop_string_however_it_is_chopped(pieces, stops):
    """Catches stop strings that span pieces, overlap, or begin one another; and text emitted too early."""
    stopper = StopStrings(stops)
    emitted, found = "", None
    expected, stop = first_stop("".join(pieces), stops)
    for piece in pieces:
        safe, found = stopper.push(piece)
        emitted += safe
        assert expected.startswith(emitted)
        if found:
            break
    assert found == stop
    assert emitted + stopper.flush() == expected


def test_no_more_is_held_back_than_may_become_a_stop_string():
    """Catches an answer that lags: only the end that could begin a stop string waits."""
    stopper = StopStrings(["</s>", "\n\nUser:"])
    assert stopper.push("a < b") == ("a < b", None)
    assert stopper.push("<") == ("", None)
    assert stopper.push("/") == ("", None)
    assert stopper.push("p>\n") == ("</p>", None)
    assert stopper.push("\n") == ("", None)
    assert stopper.flush() == "\n\n"
    assert stopper.flush() == ""


def test_stop_strings_that_make_no_sense():
    """Catches "" stopping everything, and "abc" taken for three stop strings."""
    for wrong in ([""], ["a", ""], "abc", [1], [None]):
        with pytest.raises(RequestError, match="stop") as error:
            StopStrings(wrong)
        assert error.value.param == "stop"
    assert StopStrings([]).push("abc") == ("abc", None)


def test_a_token_costs_microseconds():
    """Catches work that grows with the answer, or decoding it all again at each token."""
    ids = TOKENIZER.encode("".join(text for text in HARD_TEXTS if len(text) < 3000)) * 20
    stream, stopper = TextStream(TOKENIZER), StopStrings([])
    for i in ids[:1000]:
        stream.push(i)
    with within(5e-6 * len(ids)):
        for i in ids:
            stopper.push(stream.push(i))


def test_a_hostile_stop_string_stays_cheap():
    """Catches quadratic matching of a long stop string against text that almost is it."""
    stopper = StopStrings(["a" * 100_000 + "b"])
    with within(1):
        for _ in range(2000):
            assert stopper.push("a" * 20) == ("", None)
