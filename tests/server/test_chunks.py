"""The chunks of a streamed chat without a server or a model: most are put together from two kept halves."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kukri.calls.answer import Answer
from kukri.calls.choice import Choice
from kukri.dialects.answer_parser import parser_of
from kukri.dialects.families import HERMES
from kukri.dialects.toolbox import Toolbox
from kukri.engine import Request
from kukri.sampling import SampledToken, SamplingParams
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import Chat
from kukri.server.openai.chat_completions import ChatWriter
from kukri.server.schema import ChatBody

TEXTS = {
    "plain": ["Once", " upon", " a", " time"],
    "quotes": ['say "hi"', "back\\slash\n", "\x00\x7f\u2028", '{"content":', '","', '"}}]}'],
    "unicode": ["é", "日本", "👩‍🚀", "\ufffd"],
    "thoughts": ["<think>", "hm", " so", "</think>", "Yes", ", it", " is"],
    "call": ["Well.", '<tool_call>{"name": "add", ', '"arguments": {"a"', ": 1}}</tool_call>"],
    "at once": ["Well", '.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", "Done."],
}
BODIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "usage": {"stream_options": {"include_usage": True}},
    "counts": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "timings": {"timings_per_token": True},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "ids": {"return_token_ids": True},
    "progress": {"return_progress": True},
    "two": {"n": 2},
}
MODEL = 'a "model": {"content":'
ADD = {"name": "add", "parameters": {"properties": {"a": {}}}}


class Forgetful(dict[int, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


def streamed(pieces: list[bytes], options: dict[str, Any], *, keeps: bool) -> list[bytes]:
    """What is written after each token, which has one of the pieces as its text, and at the end."""
    tokenizer: Any = SimpleNamespace(
        token_bytes=pieces.__getitem__, special_ids=frozenset(), drops_leading_space=False
    )
    params = SamplingParams(max_tokens=len(pieces), logprobs=1 if options.get("logprobs") else None)
    prompt = np.zeros(3, np.int32)
    answers = [
        Answer(Request.new(i, prompt, params, max_context=256, max_pages=16), i, tokenizer)
        for i in range(options.get("n", 1))
    ]
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **options}
    )
    bridge: Any = None
    call = LiveCall(bridge, answers, 1, "log")
    toolbox = Toolbox(HERMES, [ADD], many=True, required=False, is_strict=False)
    service: Any = SimpleNamespace(fingerprint='kukri-"1"', tokenizer=tokenizer)
    choices = [Choice(answer, parser_of(HERMES, toolbox.signatures), toolbox=toolbox) for answer in answers]
    writer = ChatWriter(service, Chat(call, choices), body, MODEL)
    if not keeps:
        writer._around = Forgetful()
    found = []
    for place in range(len(pieces)):
        for answer in answers:
            request = answer.request
            request.times.started_s = request.times.first_token_s = 1.0
            request.times.last_token_s = 1.5 + place
            request.sequence.n_tokens = request.n_prompt + place + 1
            request.sequence.tokens[request.n_prompt + place] = place
            logprobs = {"logprob": -0.5, "top_logprobs": ((0, -0.25),)} if body.logprobs else {}
            answer.push(SampledToken(place, **logprobs), "length" if place == len(pieces) - 1 else None)
        found.append(writer.advance())
    return [*found, writer.end()]


@pytest.fixture
def same_ids(monkeypatch):
    for module in ("server.answers.reply", "dialects.toolbox"):
        monkeypatch.setattr(f"kukri.{module}.uuid4", lambda: SimpleNamespace(hex="0" * 32))
    monkeypatch.setattr("kukri.server.answers.reply.time", SimpleNamespace(time=lambda: 1.0))


@pytest.mark.parametrize("options", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("name", TEXTS)
def test_kept_halves_change_no_byte(name, options, same_ids):
    """Catches a text escaped in another way, and counts, ids or log-probabilities that are left out."""
    for cut in (False, True):  # at each byte: characters in pieces
        pieces = [piece.encode() for piece in TEXTS[name]]
        if cut:
            pieces = [bytes([byte]) for piece in pieces for byte in piece]
        assert streamed(pieces, options, keeps=True) == streamed(pieces, options, keeps=False)


@pytest.mark.parametrize("name", TEXTS)
def test_chunks_are_the_json_of_all_there_is(name, same_ids):
    """Catches what both ways of writing a chunk lose, and JSON that only nearly is."""
    content = reasoning = arguments = ""
    for written in streamed([piece.encode() for piece in TEXTS[name]], {}, keeps=True):
        for event in written.decode().removesuffix("\n\n").split("\n\n"):
            data = event.removeprefix("data: ")
            if data in ("", "[DONE]"):
                continue
            chunk = json.loads(data)
            assert chunk["model"] == MODEL
            delta = chunk["choices"][0]["delta"]
            if set(delta) == {"content"}:
                assert json.dumps(chunk, separators=(",", ":")) == data
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                arguments += call["function"]["arguments"]
    text = "".join(TEXTS[name])
    expected = {"thoughts": ("Yes, it is", "hm so", ""), "call": ("Well.", "", '{"a": 1}')}
    expected["at once"] = "Well.\nDone.", "", '{"a": 1}'
    assert (content, reasoning, arguments) == expected.get(name, (text, "", ""))
