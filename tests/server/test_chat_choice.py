"""The parts of an answer, without a server or a model: what the writers of all APIs go by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kukri.calls.answer import Answer
from kukri.calls.choice import Choice, PartEvent
from kukri.dialects.answer_parser import PlainParser, parser_of
from kukri.dialects.dialect import Dialect
from kukri.dialects.families import HERMES
from kukri.dialects.thoughts import Thoughts
from kukri.dialects.toolbox import Toolbox
from kukri.engine import Request
from kukri.sampling import SampledToken, SamplingParams

ADD = {"name": "add", "parameters": {"properties": {"a": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
RECURRING = replace(HERMES, thoughts=Thoughts("[T]", "[/T]", recurs=True))
CASES = {
    "text": (HERMES, "Once upon a time", [("text", "Once upon a time")]),
    "thoughts": (HERMES, "<think>hm so</think>Yes", [("reasoning", "hm so"), ("text", "Yes")]),
    "calls": (HERMES, f"A{CALL}{CALL}B",
              [("text", "A"), ("call", '{"a": 1}'), ("call", '{"a": 1}'), ("text", "\nB")]),
    "thoughts between texts": (RECURRING, "A[T]one[/T]B[T]two[/T]C",
                               [("text", "A"), ("reasoning", "one"), ("text", "B"), ("reasoning", "\n\ntwo"),
                                ("text", "C")]),
}  # fmt: skip


def events_of(dialect: Dialect | None, pieces: list[str], n_at_once: int = 1) -> list[PartEvent]:
    """The events of an answer of these pieces, of which `n_at_once` come at a time."""
    texts = [piece.encode() for piece in (*pieces, "")]  # the last token ends it
    tokenizer: Any = SimpleNamespace(
        token_bytes=texts.__getitem__, special_ids=frozenset(), drops_leading_space=False
    )
    params = SamplingParams(max_tokens=len(texts), logprobs=0)
    request = Request.new(0, np.zeros(3, np.int32), params, max_context=1024, max_pages=16)
    answer = Answer(request, 0, tokenizer)
    toolbox = Toolbox(dialect or HERMES, [ADD], many=True, required=False, is_strict=False)
    parser = parser_of(dialect, toolbox.signatures) if dialect else PlainParser()
    choice = Choice(answer, parser, toolbox=toolbox)
    events: list[PartEvent] = []
    for i in range(len(texts)):
        is_last = i == len(texts) - 1
        answer.push(SampledToken(i, -0.5), "stop" if is_last else None)
        if is_last or i % n_at_once == n_at_once - 1:
            events += choice.advance()
    assert choice.advance() == []
    return events


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_at_once", [1, 3, 7, 1000])
def test_parts_are_the_same_however_tokens_come(name: str, n_at_once: int) -> None:
    """Catches reasoning that is moved before a text it came after, and parts that depend on a slow reader."""
    dialect, text, wanted = CASES[name]
    open_part = None
    texts: dict[int, str] = {}
    kinds: list[str] = []
    for event in events_of(dialect, list(text), n_at_once):
        if event.what == "opened":
            assert open_part is None
            open_part = event.part
            assert event.part.index == len(kinds)
            kinds.append(event.part.kind)
            texts[event.part.index] = ""
        else:
            assert event.part is open_part
            texts[event.part.index] += event.text
        if event.what == "closed":
            assert event.part.text == texts[event.part.index]
            open_part = None
    assert open_part is None
    assert list(zip(kinds, texts.values(), strict=True)) == wanted


@pytest.mark.parametrize("n_at_once", [1, 2, 3])
def test_tokens_belong_to_the_texts_and_calls_that_they_make(n_at_once: int) -> None:
    """Catches log-probabilities of reasoning, a token that is told twice, and one that cuts a call in two."""
    pieces = ["<think>", "hm", "</think>", "Yes", ", it", " is", *CALL.partition("add"), "!"]
    events = events_of(HERMES, pieces, n_at_once)
    assert [token.id for event in events for _, token in event.tokens] == [*range(3, len(pieces))]
    assert [event.part.kind for event in events if event.what == "opened"] == [
        *("reasoning", "text", "call", "text"),
    ]
    assert all(event.part.kind != "reasoning" for event in events if event.tokens)


def test_an_answer_without_a_parser_is_one_text() -> None:
    """Catches marks that are read in a completion, where they are text."""
    text = f"<think>a</think>{CALL}"
    events = events_of(None, list(text), 5)
    assert [event.part.kind for event in events if event.what == "opened"] == ["text"]
    assert "".join(event.text for event in events) == text
