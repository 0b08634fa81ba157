"""Thoughts and answers are told apart, however the text is chopped."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kukri.dialects.thoughts import Thought, ThoughtParser, Thoughts

THINK = Thoughts()


def split(text: str, cuts: list[int], inside: bool = False) -> tuple[str, str]:
    return positions(text, cuts, inside)[:2]


def positions(text: str, cuts: list[int], inside: bool) -> tuple[str, str, list, list]:
    """(thoughts, answer, where thoughts are, where answers are)."""
    parser, thoughts, answer = ThoughtParser(THINK, inside=inside), "", ""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    for new in [piece for part in pieces for piece in parser.push(part)] + parser.flush():
        if isinstance(new, Thought):
            thoughts += new.text
        else:
            answer += new
    return thoughts, answer, parser.thoughts, parser.answers


CASES = [
    ("plain text", False, ("", "plain text")),
    ("  plain text ", False, ("", "  plain text ")),
    ("<think>a b</think>c", False, ("a b", "c")),
    ("\n<think>\n a b \n</think>\n\n c ", False, ("a b", "c ")),
    ("a b\n</think>\n\nc", True, ("a b", "c")),
    ("<think>\n\n</think>\n\nc", False, ("", "c")),
    ("<think>never ends \n", False, ("never ends", "")),
    ("<think>a < b </thin k></think>c</think>", False, ("a < b </thin k>", "c</think>")),
    ("about <think> tags", False, ("", "about <think> tags")),
    ("<thin", False, ("", "<thin")),
    ("", False, ("", "")),
    ("<think>a</thi", False, ("a</thi", "")),
    ("<think>a</think>  ", False, ("a", "")),
]


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_thoughts_are_split_off(text, inside, expected):
    """Catches tags that are shown, white space around them, and tags that are only talked about."""
    assert split(text, [], inside) == expected
    assert split(text, list(range(len(text))), inside) == expected


@given(st.text("<think>/ \nab", max_size=40), st.booleans(), st.lists(st.integers(0, 100), max_size=8))
def test_chopping_changes_nothing(text, inside, cuts):
    """Catches a tag that is missed where it falls between two tokens."""
    thoughts, answer, spans, answers = positions(text, [], inside)
    assert positions(text, cuts, inside) == (thoughts, answer, spans, answers)
    for _, end in spans:
        assert end is None or text[end:].startswith("</think>")
    assert "".join(text[begin:end] for begin, end in answers) == answer
