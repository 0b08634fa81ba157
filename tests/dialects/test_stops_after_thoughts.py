"""Stop strings count from the end of the reasoning on, in every family that reasons."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kukri.calls.answer import Answer
from kukri.dialects.answer_parser import AnswerBeginning, parser_of
from kukri.dialects.families import DIALECTS
from kukri.dialects.thoughts import Thought
from tests.dialects.families import FAMILIES, Family
from tests.dialects.test_families import dialect

THINKING = [pytest.param(family, id=name) for name, family in FAMILIES.items() if any(family.thinks)]


def begun(family: Family, text: str, cuts: list[str]) -> tuple[str, str]:
    """(text before the answer, the answer), put together from pieces."""
    beginning = AnswerBeginning(parser_of(dialect(family), None))
    found = [*map(beginning.push, cuts), beginning.flush()]
    before, answer = ("".join(parts) for parts in zip(*found, strict=True))
    assert before + answer == text, "nothing is lost and nothing changes its place"
    return before, answer


@pytest.mark.parametrize("family", THINKING)
def test_an_answer_begins_after_its_reasoning(family: Family) -> None:
    """Catches a thought that is taken for the answer, however it is cut, and an answer for a thought."""
    thought, said = "Question: who asks?".join(family.thinks), "Rome. Question: next".join(family.says)
    for text in (thought + said, said):
        for cuts in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
            before, answer = begun(family, text, cuts)
            assert ("who asks" in before) == text.startswith(thought)
            assert answer.startswith("Rome.") or answer.startswith(said.strip())
    before, answer = begun(family, thought[: len(thought) // 2], list(thought[: len(thought) // 2]))
    assert not answer, "a thought that never ended"


@pytest.mark.parametrize("stop", ["Question:", "ome", "Rome. Q"])
def test_a_stop_string_in_a_thought_ends_nothing(monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """Catches a harness that gets no answer as the model thinks of a question, and text after a stop."""

    stream = SimpleNamespace(push=chr, flush=str)
    monkeypatch.setattr("kukri.calls.answer.TextStream", lambda *_, **__: stream)
    text = f"<think>{stop} Question: Rome</think>\n\nRome. Question: next"
    params = SimpleNamespace(stop_strings=[stop], logprobs=None, min_tokens=0)
    request = cast(Any, SimpleNamespace(params=params))
    hermes = next(one for one in DIALECTS if one.name == "hermes")
    answer = Answer(request, 0, cast(Any, None), beginning=AnswerBeginning(parser_of(hermes, None)))
    token = lambda char: cast(Any, SimpleNamespace(id=ord(char), logprob=None))  # noqa: E731
    ended = next(i for i in itertools.count() if answer.push(token(text[i]), None))
    shown = answer.take_text()
    assert answer.stop_string == stop
    assert text[: ended + 1].endswith(stop)
    assert ended > text.index("</think>")
    assert shown == text[: ended + 1 - len(stop)]
    pieces = parser_of(hermes, None).push(shown)
    assert "".join(one.text for one in pieces if isinstance(one, Thought)) == f"{stop} Question: Rome"
