"""One answer with reasoning, text and a call through every face of kukri."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kukri import LLM, AsyncLLM
from kukri.calls.results import Result
from kukri.sampling import SamplingParams
from kukri.server.models.served_model import ServedModel
from kukri.terminal import answer_writer, chat
from kukri.terminal.batch import run_batch
from kukri.terminal.remote_model import RemoteModel
from kukri.terminal.run import answer_prompt
from tests.dialects.families import FAMILIES, write_family
from tests.server.forcing import force
from tests.server.live_server import MODEL, Served, serving

REASONING, TEXT, ARGUMENTS = "Oslo is cold.", "I look.", {"city": "Oslo"}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
QUESTION = [{"role": "user", "content": "Which weather has Oslo?"}]
CALLED = f"<think>\n{REASONING}\n</think>\n\n{TEXT}\n" + FAMILIES["hermes"].write([("weather", ARGUMENTS)])
PLAIN = f"<think>\n{REASONING}\n</think>\n\n{TEXT}"


class Parts(NamedTuple):
    """What a face shows of an answer; `calls` is None for a face that has no tools."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]] | None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_family(tmp_path_factory.mktemp("model") / "tiny.gguf", FAMILIES["hermes"])
    with LLM(path, n_threads=1, max_requests=4, speculation="off") as llm, serving(llm) as made:
        yield made


@pytest.fixture(scope="module")
def llm(server: Served) -> Iterator[LLM]:
    with LLM(server.served.llm.path, n_threads=1, speculation="off") as made:
        yield made


def script(llm: LLM, text: str) -> dict[str, Any]:
    """Parameters with which the model says a text."""
    ids = [*llm.tokenizer.encode(text, add_special=False, parse_special=True), min(llm.tokenizer.eos_ids)]
    left = iter(ids)

    def processor(_: Any, logits: Any) -> Any:
        row = np.full_like(logits, -np.inf)
        row[next(left)] = 0.0
        return row

    return {"logits_processors": (processor,), "temperature": 0.0, "max_tokens": 500}


def of_result(result: Result) -> Parts:
    return Parts(
        result.reasoning, result.text, [(c.name, json.loads(c.arguments)) for c in result.tool_calls]
    )


def of_chunks(chunks: Any) -> Parts:
    calls = [(call.name, json.loads(call.arguments)) for chunk in chunks for call in chunk.tool_calls]
    reasoning = "".join(chunk.reasoning for chunk in chunks)
    return Parts(reasoning, "".join(chunk.text for chunk in chunks), calls)


def of_message(message: Any) -> Parts:
    """The parts of a message in OpenAI's or Ollama's form."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [
        (f["name"], json.loads(f["arguments"]) if isinstance(f["arguments"], str) else f["arguments"])
        for f in functions
    ]
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return Parts(reasoning, message["content"] or "", calls)


async def streamed(llm: LLM, **given: Any) -> list[Any]:
    async with AsyncLLM(llm) as made:
        return [chunk async for chunk in made.stream(QUESTION, **given)]


async def chatted(llm: LLM, **given: Any) -> Result:
    async with AsyncLLM(llm) as made:
        return await made.chat(QUESTION, **given)


PYTHON: dict[str, Callable[[LLM, dict[str, Any]], Parts]] = {
    "LLM.chat": lambda llm, given: of_result(llm.chat(QUESTION, **given)),
    "LLM.chat of a list": lambda llm, given: of_result(llm.chat([QUESTION], **given)[0]),
    "LLM.stream": lambda llm, given: of_chunks([*llm.stream(QUESTION, **given)]),
    "AsyncLLM.chat": lambda llm, given: of_result(asyncio.run(chatted(llm, **given))),
    "AsyncLLM.stream": lambda llm, given: of_chunks(asyncio.run(streamed(llm, **given))),
}


def post(server: Served, path: str, **body: Any) -> Any:
    with server.http() as http:
        answer = http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


def responded(server: Served) -> Parts:
    items = post(
        server, "/v1/responses", input="Which weather has Oslo?", tools=[{"type": "function", **FUNCTION}]
    )
    found = Parts("", "", [])
    for item in items["output"]:
        if item["type"] == "reasoning":
            texts = [part["text"] for part in item.get("content") or item["summary"]]
            found = found._replace(reasoning="".join(texts))
        elif item["type"] == "message":
            found = found._replace(text="".join(part["text"] for part in item["content"]))
        else:
            found = found._replace(calls=[(item["name"], json.loads(item["arguments"]))])
    return found


def messaged(server: Served) -> Parts:
    tool = {"name": "weather", "input_schema": FUNCTION["parameters"]}
    blocks = post(server, "/v1/messages", messages=QUESTION, max_tokens=500, tools=[tool])["content"]
    by_type = {block["type"]: block for block in blocks}
    call = by_type["tool_use"]
    return Parts(by_type["thinking"]["thinking"], by_type["text"]["text"], [(call["name"], call["input"])])


def chat_completed(server: Served) -> Parts:
    answer = post(server, "/v1/chat/completions", messages=QUESTION, tools=TOOLS)
    return of_message(answer["choices"][0]["message"])


def generated(server: Served) -> Parts:
    answer = post(server, "/api/generate", prompt="Which weather has Oslo?", stream=False, think=True)
    return Parts(answer["thinking"], answer["response"], None)


HTTP: dict[str, Callable[[Served], Parts]] = {
    "/v1/chat/completions": chat_completed,
    "/v1/responses": responded,
    "/v1/messages": messaged,
    "/api/chat": lambda server: of_message(
        post(server, "/api/chat", messages=QUESTION, tools=TOOLS, stream=False, think=True)["message"]
    ),
}


@pytest.mark.parametrize("face", PYTHON)
def test_python_tells_reasoning_text_and_calls_apart(llm: LLM, face: str) -> None:
    """Catches a face on which a reasoning model prints its thoughts as its answer, or its calls as text."""
    found = PYTHON[face](llm, {**script(llm, CALLED), "tools": TOOLS})
    assert found == (REASONING, TEXT, [("weather", ARGUMENTS)])
    assert PYTHON[face](llm, script(llm, PLAIN)) == (REASONING, TEXT, [])


@pytest.mark.parametrize("face", HTTP)
def test_every_api_tells_reasoning_text_and_calls_apart(
    server: Served, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    """Catches an API whose answer differs from the answer that Python gives."""
    force(server.served, monkeypatch, CALLED, with_marks=True)
    assert HTTP[face](server) == (REASONING, TEXT, [("weather", ARGUMENTS)])


def test_faces_without_tools_tell_reasoning_and_text_apart(
    server: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Catches thoughts in the answers of /api/generate, `kukri run`, `kukri chat` and `kukri chat --url`."""
    force(server.served, monkeypatch, PLAIN, with_marks=True)
    assert generated(server) == (REASONING, TEXT, None)
    remote = RemoteModel(server.url, None, MODEL, {})
    assert of_chunks([*remote.stream(QUESTION)]) == (REASONING, TEXT, [])
    for model in (llm, remote):
        params = SamplingParams(**script(llm, PLAIN))
        conversation = chat.Chat(model, params)
        conversation.take("Which weather has Oslo?")
        wanted = {"role": "assistant", "content": TEXT, "reasoning_content": REASONING}
        assert conversation.messages[-1] == wanted
        assert capsys.readouterr().out == f"{TEXT}\n\n"  # a pipe gets the answer alone
    given: dict[str, Any] = {"system": "", "raw": False, "with_stats": False, "loading": {"n_threads": 1}}
    given |= {"model": str(llm.path), "sampling": script(llm, PLAIN)}
    answer_prompt("Which weather has Oslo?", as_json=True, **given)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["reasoning"], answer["text"]) == (REASONING, TEXT)
    given["sampling"] = script(llm, PLAIN)
    answer_prompt("Which weather has Oslo?", as_json=False, **given)
    assert capsys.readouterr().out == f"{TEXT}\n"


def test_a_plain_prompt_has_text_alone(
    server: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Catches an API of plain prompts that parses what Python leaves as it was written, or the other way."""
    want = llm.generate("Weather?", **script(llm, PLAIN))
    assert (want.reasoning, want.tool_calls) == ("", ())
    assert REASONING in want.text
    assert TEXT in want.text
    assert "".join(chunk.text for chunk in llm.stream("Weather?", **script(llm, PLAIN))) == want.text
    force(server.served, monkeypatch, PLAIN, with_marks=True)
    answer = post(server, "/v1/completions", prompt="Weather?", max_tokens=500)
    assert answer["choices"][0]["text"] == want.text
    answer_prompt(
        "Weather?", model=str(llm.path), system="", raw=True, with_stats=False, as_json=False,
        loading={"n_threads": 1}, sampling=script(llm, PLAIN),
    )  # fmt: skip
    assert capsys.readouterr().out == f"{want.text}\n"


@pytest.mark.representative(2)
def test_a_batch_tells_reasoning_text_and_calls_apart(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Catches results of `kukri batch` that differ from what the server answers."""
    params = ServedModel.params
    monkeypatch.setattr(
        ServedModel, "params", lambda self, given: replace(params(self, given), **script(llm, CALLED))
    )
    body = {"messages": QUESTION, "tools": TOOLS}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))
    loading = {"n_threads": 1, "speculation": "off"}
    run_batch(source, target, model=str(llm.path), aliases=(), loading=loading, as_json=True)
    answer = json.loads(target.read_text())["response"]["body"]
    assert of_message(answer["choices"][0]["message"]) == (REASONING, TEXT, [("weather", ARGUMENTS)])
    assert json.loads(capsys.readouterr().out)["n_failed"] == 0


@pytest.mark.parametrize("has_colours", [True, False])
def test_a_terminal_shows_reasoning_dim(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any, has_colours: bool
) -> None:
    """Catches reasoning that looks like the answer, is shown although it is hidden, or is lost."""
    monkeypatch.setattr(answer_writer.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(answer_writer, "has_colours", lambda: has_colours)
    before, after = ("\x1b[2m", "\x1b[0m") if has_colours else ("(reasoning)\n", "(answer)\n")
    for hides in (False, True):
        conversation = chat.Chat(llm, SamplingParams(**script(llm, PLAIN)), hides_reasoning=hides)
        conversation.take("Which weather has Oslo?")
        shown = "" if hides else f"{before}{REASONING}\n\n{after}"
        assert capsys.readouterr().out == f"{shown}{TEXT}\n\n"


def test_the_llm_program_gets_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches thoughts in the answer of `llm -m kukri`."""
    pytest.importorskip("llm")
    from kukri.llm_plugin import Kukri

    model = Kukri()
    monkeypatch.setattr(Kukri, "_load", lambda self, name: llm)
    stream = llm.stream
    monkeypatch.setattr(llm, "stream", lambda told, **given: stream(told, **{**given, **script(llm, PLAIN)}))
    assert str(model.prompt("Which weather has Oslo?")) == TEXT


def test_raw_answers_are_as_the_model_writes_them(llm: LLM) -> None:
    """Catches `raw_text` that has lost something, and no way back to the text of before."""
    result = llm.chat(QUESTION, **script(llm, CALLED), tools=TOOLS)
    assert result.raw_text.startswith(CALLED)
    with LLM(llm.path, n_threads=1, speculation="off", raw_answers=True) as raw:
        answer = raw.chat(QUESTION, **script(raw, PLAIN))
        assert (answer.text, answer.reasoning) == (PLAIN, "")


def test_usage_counts_cached_and_reasoning_tokens(llm: LLM) -> None:
    """Catches counts that Python users cannot see, or that leave the reasoning out."""
    told = [{"role": "user", "content": "Which weather has Oslo? " * 20}]
    for _ in range(2):
        result = llm.chat(told, **script(llm, PLAIN))
    usage, n = result.usage, len(llm.tokenizer.encode(PLAIN, add_special=False, parse_special=True))
    assert usage.prompt_tokens == len(result.prompt_token_ids)
    assert 0 < usage.cached_tokens < usage.prompt_tokens
    assert usage.completion_tokens == n + 1
    assert 0 < usage.reasoning_tokens < n


def test_a_batch_of_conversations_calls_functions(llm: LLM) -> None:
    """Catches conversations of a batch that read one another's calls."""
    said: dict[str, list[int]] = {"Oslo": [], "Rome": []}

    def weather(city: str) -> str:
        return f"cold in {city}"

    told = [[{"role": "user", "content": f"Weather of {city}?"}] for city in said]
    ends = min(llm.tokenizer.eos_ids)

    def processor(prompt: Any, logits: Any) -> Any:
        """Says a call to a first prompt, and its result to the next."""
        row = np.full_like(logits, -np.inf)
        text = llm.tokenizer.decode(list(prompt))
        city = "Oslo" if "Weather of Oslo" in text else "Rome"
        answer = (
            f"It is {city}."
            if f"cold in {city}" in text
            else FAMILIES["hermes"].write([("weather", {"city": city})])
        )
        ids = [*llm.tokenizer.encode(answer, add_special=False, parse_special=True), ends]
        n_said = len(said[city])
        said[city].append(ids[n_said])
        if ids[n_said] == ends:
            said[city].clear()
        row[ids[n_said]] = 0.0
        return row

    results = llm.chat(told, tools=[weather], logits_processors=(processor,), temperature=0.0, max_tokens=200)
    assert [result.text for result in results] == ["It is Oslo.", "It is Rome."]
    assert [len(result.messages) for result in results] == [3, 3]
