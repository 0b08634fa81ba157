"""Thoughts and answers are told apart, however the text is chopped."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kukri.server.chat.reasoning_parser import ReasoningParser


def split(text: str, cuts: list[int], inside: bool = False) -> tuple[str, str]:
    return positions(text, cuts, inside)[:2]


def positions(text: str, cuts: list[int], inside: bool) -> tuple[str, str, int | None, int | None]:
    """(thoughts, answer, where </think> begins, where the answer does)."""
    splitter, thoughts, answer = ReasoningParser(inside=inside), "", ""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    for new in [*map(splitter.push, pieces), splitter.flush()]:
        thoughts, answer = thoughts + new[0], answer + new[1]
    return thoughts, answer, splitter.reasoning_end, splitter.answer_start


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
    thoughts, answer, reasoning_end, answer_start = positions(text, [], inside)
    assert positions(text, cuts, inside) == (thoughts, answer, reasoning_end, answer_start)
    if reasoning_end is not None:
        assert text[reasoning_end:].startswith("</think>")
        assert text[:reasoning_end].rstrip().endswith(thoughts)
    assert text[len(text) if answer_start is None else answer_start :] == answer
