"""`chat(tools=[...])`: functions described, called, and their results told to the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from kukri import LLM, AsyncLLM
from kukri.calls.conversation import DECLINED, AskedCall
from kukri.calls.functions import FunctionTool, result_text
from kukri.calls.results import ToolCall
from kukri.errors import ConfigError, RequestError
from kukri.sampling.sampler import SamplingError
from kukri.terminal import function_files
from kukri.terminal.function_files import functions_of
from kukri.terminal.run import answer_prompt
from tests.dialects.families import FAMILIES, write_family
from tests.tiny_gguf import TEMPLATE

# a template that knows no tools gets them in the system message
KNOWN = {**FAMILIES, "generic": replace(FAMILIES["hermes"], template=TEMPLATE)}
QUESTION = [{"role": "user", "content": "Which weather has Oslo?"}]


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather in a city.

    Args:
        city: Its name, without
            the country.
        days (int): How many.

    Returns:
        The degrees.
    """
    if city == "Atlantis":
        raise ValueError("it has sunk")
    return {"city": city, "days": days, "unit": unit}


@pytest.fixture(scope="module", params=["hermes", "generic", "qwen_xml", "gpt_oss", "mistral", "lfm2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_family(tmp_path_factory.mktemp("model") / "tiny.gguf", KNOWN[family])
    with LLM(path, backend="reference", speculation="off") as made:
        yield made


def script(llm: LLM, answers: Sequence[str]) -> dict[str, Any]:
    """Parameters with which the model says these texts in turn; where a grammar forbids one, it fails."""
    end = min(llm.tokenizer.eos_ids)
    ids = [
        i
        for text in answers
        for i in (*llm.tokenizer.encode(text, add_special=False, parse_special=True), end)
    ]
    left = iter(ids)

    def processor(_: Any, logits: Any) -> Any:
        row = np.full_like(logits, -np.inf)
        row[next(left)] = 0.0
        return row

    return {"logits_processors": (processor,), "temperature": 0.0, "max_tokens": 500}


def said(family: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return KNOWN[family].write(calls)


def answered(family: str, text: str) -> str:
    begin, end = KNOWN[family].says
    return f"{begin}{text}{end}"


@pytest.mark.full(only=["generic", "qwen_xml", "gpt_oss", "mistral"])
def test_calls_are_made_and_the_answer_comes_after_them(llm: LLM, family: str) -> None:
    """Catches calls that are not found in a family's own form, results that are lost, and calls unmade."""
    texts = [
        said(family, ("weather", {"city": "Oslo", "days": 2})),
        said(family, ("weather", {"city": "Atlantis", "days": 2})),
        answered(family, "Fine."),
    ]
    result = llm.chat(QUESTION, tools=[weather], **script(llm, texts))
    assert result.text == result.outputs[0].text == "Fine."
    assert [message["role"] for message in result.messages] == [*["assistant", "tool"] * 2, "assistant"]
    call = result.messages[0]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 2}
    assert result.messages[1]["tool_call_id"] == call["id"]
    assert json.loads(result.messages[1]["content"]) == {"city": "Oslo", "days": 2, "unit": "C"}
    assert result.messages[3]["content"] == "error: ValueError: it has sunk"
    assert "Atlantis" in llm.tokenizer.decode(result.prompt_token_ids)
    # the conversation continues with what it returned
    again = llm.chat([*QUESTION, *result.messages, QUESTION[0]], max_tokens=1)
    assert "it has sunk" in llm.tokenizer.decode(again.prompt_token_ids)


SCHEMA = {
    "type": "function",
    "function": {"name": "when", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.full(only=["generic", "qwen_xml", "gpt_oss", "mistral"])
def test_calls_of_schemas_are_returned(llm: LLM, family: str) -> None:
    """Catches a call of a schema that is told to be unknown, and functions called beside it."""
    made: list[str] = []

    def weather(city: str) -> str:
        made.append(city)
        return "cold"

    texts = [said(family, ("weather", {"city": "Oslo"})), said(family, ("when", {}))]
    result = llm.chat(QUESTION, tools=[weather, SCHEMA], **script(llm, texts))
    assert (result.finish_reason, made) == ("tool_calls", ["Oslo"])
    (call,) = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("when", {})
    assert [message["role"] for message in result.messages] == ["assistant", "tool", "assistant"]
    assert result.messages[-1]["tool_calls"] == [call.message]
    # the caller answers the call, and the conversation goes on
    told = {"role": "tool", "tool_call_id": call.id, "name": "when", "content": "now"}
    again = llm.chat([*QUESTION, *result.messages, told], **script(llm, [answered(family, "Fine.")]))
    assert (again.text, again.finish_reason) == ("Fine.", "stop")


@pytest.mark.full(only=["generic-*", "qwen_xml-*", "gpt_oss-*", "mistral-*"])
@pytest.mark.parametrize("choice", ["required", "when", "none"])
def test_the_first_answer_follows_the_choice(llm: LLM, family: str, choice: str) -> None:
    """Catches a choice that is ignored, and one that forbids the answer after the call, too."""

    def when() -> str:
        """The hour."""
        return "now"

    likes = [said(family, ("when", {})), answered(family, "Fine.")]
    texts = likes[1:] if choice == "none" else likes
    if choice != "none":  # the grammar forbids the answer that comes first here
        with pytest.raises(SamplingError, match="no token is allowed"):
            llm.chat(QUESTION, tools=[weather, when], tool_choice=choice, **script(llm, likes[1:]))
    result = llm.chat(QUESTION, tools=[weather, when], tool_choice=choice, **script(llm, texts))
    assert result.text == "Fine."
    assert [message["role"] for message in result.messages][:-1] == ["assistant", "tool"][
        : 2 * (len(texts) - 1)
    ]
    shown = llm.tokenizer.decode(result.prompt_token_ids)
    assert ("The hour." in shown) == (choice != "none")


def test_a_choice_that_names_no_tool_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"'tool_choice' must be .*'always': the tools are weather"):
        llm.chat(QUESTION, tools=[weather], tool_choice="always")
    with pytest.raises(RequestError, match="'tool_choice' requires tools"):
        llm.chat(QUESTION, tool_choice="required")


@pytest.mark.full(only=["generic", "qwen_xml", "gpt_oss", "mistral"])
def test_a_stream_calls_functions_between_its_answers(llm: LLM, family: str) -> None:
    """Catches a stream that ends with the first call, and a place that stays taken when it is closed."""
    texts = [said(family, ("weather", {"city": "Oslo"})), answered(family, "Fine.")]
    chunks = list(llm.stream(QUESTION, tools=[weather], **script(llm, texts)))
    assert "".join(chunk.text for chunk in chunks).strip() == "Fine."
    assert [call.name for chunk in chunks for call in chunk.tool_calls] == ["weather"]
    result = chunks[-1].result
    assert result is not None
    assert [message["role"] for message in result.messages] == ["assistant", "tool", "assistant"]
    assert sum(chunk.result is not None for chunk in chunks) == 1
    ended = next(i for i, chunk in enumerate(chunks) if chunk.tool_calls)
    assert ended > 1, "the call comes in one chunk"
    stream: Any = llm.stream(QUESTION, tools=[weather], **script(llm, texts))
    for _ in range(ended):
        next(stream)
    assert llm.engine.has_work
    stream.close()  # in the middle of the call
    llm.generate("x", max_tokens=1)  # a step, after which the place is free
    assert not llm.engine.has_work


@pytest.mark.full(only=["qwen_xml"])
def test_approve_allows_declines_or_answers_a_call(llm: LLM, family: str) -> None:
    """Catches a call that is made against the verdict, and an error of `approve` told to the model."""
    made: list[str] = []
    asked: list[str] = []

    def look(city: str) -> str:
        made.append(city)
        return "cold"

    def approve(call: Any) -> bool | str:
        asked.append(json.loads(call.arguments)["city"])
        return {"Oslo": True, "Rome": False, "Bern": "ask again"}[asked[-1]]

    async def approve_later(call: Any) -> bool | str:
        await asyncio.sleep(0)
        return approve(call)

    texts = [said(family, ("look", {"city": city})) for city in ("Oslo", "Rome", "Bern")]
    texts.append(answered(family, "Fine."))
    told = ["cold", DECLINED, "ask again"]
    result = llm.chat(QUESTION, tools=[look], approve=approve, **script(llm, texts))
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == told

    async def main(approve: Any) -> Any:
        async with AsyncLLM(llm) as made:
            return await made.chat(QUESTION, tools=[look], approve=approve, **script(llm, texts))

    for verdict in (approve, approve_later):
        result = asyncio.run(main(verdict))
        assert [m["content"] for m in result.messages if m["role"] == "tool"] == told
    assert made == ["Oslo"] * 3
    texts = [said(family, ("look", {"city": "Paris"}))]
    with pytest.raises(KeyError, match="Paris"):
        llm.chat(QUESTION, tools=[look], approve=approve, **script(llm, texts))
    with pytest.raises(RequestError, match="approve"):
        llm.chat(QUESTION, tools=[look], approve=approve_later)


class Later:
    """A function of Python that is an object."""

    __name__ = "later"

    async def __call__(self, call: Any) -> bool:
        return True


def test_wrong_arguments_are_refused_before_the_model_is_asked(llm: LLM, family: str) -> None:
    """Catches a TypeError from within, and an approval that is found to be none after an answer."""
    given: dict[str, Any]
    for given, words in (
        ({"tools": weather}, "'tools' must be a list"),
        ({"tools": None}, "'tools' must be a list"),
        ({"tools": SCHEMA}, "'tools' must be a list"),
        ({"tools": [{"name": "when", "parameters": 3}]}, "a tool must be a function, or a dictionary"),
        ({"tools": [Later()]}, "an async function requires AsyncLLM"),
        ({"tools": [weather], "approve": "yes"}, "'approve' must be a function"),
        ({"tools": [weather], "approve": Later()}, "an async 'approve' requires AsyncLLM"),
    ):
        for face in (llm.chat, llm.stream):
            with pytest.raises(RequestError, match=words):
                face(QUESTION, **given)
    asked = AskedCall(ToolCall("1", "look", '{"city": "Oslo"}'), FunctionTool.of(_look([])))
    with pytest.raises(RequestError, match="an async 'approve' requires AsyncLLM"):
        asked.run(lambda call: Later()(call))
    for approve in (Later(), lambda call: Later()(call)):
        assert asyncio.run(asked.run_async(approve)) == "cold"


def test_an_approval_that_takes_long_holds_no_place(llm: LLM, family: str) -> None:
    """Catches a place that a call keeps while a person thinks, and a task that cannot be cancelled then."""
    texts = [said(family, ("weather", {"city": "Oslo"})), answered(family, "Fine.")]

    def approve(call: Any) -> bool:
        others.append(llm.generate("x", max_tokens=1).finish_reason)
        return not llm.engine.has_work

    others: list[str] = []
    result = llm.chat(QUESTION, tools=[weather], approve=approve, **script(llm, texts))
    assert (result.text, others) == ("Fine.", ["length"])
    assert json.loads(result.messages[1]["content"])["city"] == "Oslo"

    async def main() -> None:
        asked = asyncio.Event()

        async def forever(call: Any) -> bool:
            asked.set()
            await asyncio.Event().wait()
            return True

        async with AsyncLLM(llm) as made:
            given = {"tools": [weather], "approve": forever, **script(llm, texts)}
            task = asyncio.create_task(made.chat(QUESTION, **given))
            await asked.wait()
            assert not llm.engine.has_work
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_only_true_allows_a_call() -> None:
    """Catches a call that a callback allows by returning nothing, as one without a return does."""
    made: list[str] = []
    asked = AskedCall(ToolCall("1", "look", '{"city": "Oslo"}'), FunctionTool.of(_look(made)))
    verdicts: list[Any] = [None, False, 0, 1, [True]]
    for verdict in verdicts:
        assert asked.run(_says(verdict)) == DECLINED
        assert asyncio.run(asked.run_async(_says(verdict))) == DECLINED
    assert made == []
    assert asked.run(lambda call: True) == asked.run() == "cold"


def _says(verdict: Any) -> Any:
    return lambda call: verdict


def _look(made: list[str]) -> Callable[..., Any]:
    def look(city: str) -> str:
        made.append(city)
        return "cold"

    return look


def test_async_functions_are_awaited(llm: LLM, family: str) -> None:
    """Catches a coroutine that is shown to the model, and a loop in Python that blocks the event loop."""

    async def weather(city: str) -> str:
        await asyncio.sleep(0)
        return f"cold in {city}"

    def when() -> str:
        """The time."""
        return "now"

    async def main() -> Any:
        async with AsyncLLM(llm) as made:
            texts = [
                said(family, ("weather", {"city": "Oslo"})), said(family, ("when", {})),
                answered(family, "Fine."),
            ]  # fmt: skip
            return await made.chat(QUESTION, tools=[weather, when], **script(llm, texts))

    result = asyncio.run(main())
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == ["cold in Oslo", "now"]
    with pytest.raises(RequestError, match="AsyncLLM"):
        llm.chat(QUESTION, tools=[weather])


def test_rounds_are_bounded(llm: LLM, family: str) -> None:
    """Catches a model that calls forever."""
    texts = [said(family, ("weather", {"city": "Oslo"}))] * 3
    with pytest.raises(RequestError, match="max_rounds"):
        llm.chat(QUESTION, tools=[weather], max_rounds=2, **script(llm, texts))


@pytest.mark.full(only=["generic", "qwen_xml"])
def test_an_answer_cut_off_in_a_call_calls_nothing(llm: LLM, family: str) -> None:
    """Catches half of a call that is made."""
    text = said(family, ("weather", {"city": "Oslo", "days": 2}))
    n_tokens = len(llm.tokenizer.encode(text, add_special=False, parse_special=True))
    for n in range(1, n_tokens // 2, 5):
        given = {**script(llm, [text]), "max_tokens": n}
        result = llm.chat(QUESTION, tools=[weather], **given)
        assert [message["role"] for message in result.messages] == ["assistant"]
        assert "tool_calls" not in result.messages[0]
        assert result.finish_reason == "length"


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    """Catches descriptions that are lost, and defaults that a model would have to give."""
    tool = FunctionTool.of(weather)
    assert tool.schema == {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"description": "Its name, without the country.", "type": "string"},
                "days": {"description": "How many.", "type": "integer"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    }

    def other(a: list[int] | None, b: dict[str, float], *, c: Annotated[bool, "Whether."], d=1) -> None:
        """Does.

        :param a: The
            numbers.
        :param str b: The rest.
        """

    tool = FunctionTool.of(other)
    assert tool.description == "Does."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {
                "description": "The numbers.",
                "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
            },
            "b": {
                "description": "The rest.", "type": "object", "additionalProperties": {"type": "number"}
            },
            "c": {"description": "Whether.", "type": "boolean"},
            "d": {},
        },
        "required": ["a", "b", "c"],
    }  # fmt: skip


def test_what_cannot_be_a_tool_is_refused() -> None:
    """Catches a tool that no model could call, found out in the middle of an answer."""

    def any_number(*values: int) -> None: ...
    def of_bytes(data: bytes) -> None: ...
    def by_place(a: int, /) -> None: ...

    wrong: list[Any] = [any_number, of_bytes, by_place, lambda: 1, "weather", 3]
    for one in wrong:
        with pytest.raises(RequestError, match="tool"):
            FunctionTool.of(one)


def test_arguments_are_fitted_to_the_schema() -> None:
    """Catches a small model's "3" for 3 that fails, and a text that becomes a number."""
    tool = FunctionTool.of(weather)
    assert tool.bound('{"city": "12", "days": "3"}').arguments == {"city": "12", "days": 3}
    for wrong in ("[1]", "{", '{"town": "Oslo"}', "{}"):
        with pytest.raises((TypeError, ValueError)):
            tool.bound(wrong)


def test_results_become_texts() -> None:
    """Catches a result that ends the conversation because JSON has no form for it."""
    loop: list[Any] = []
    loop.append(loop)
    assert [result_text(one) for one in ("ä", ["ä"], None, {1, 2}, loop)] == [
        "ä", '["ä"]', "null", '"{1, 2}"', "[[...]]"
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(
        "from json import dumps\n"
        "def double(n: int) -> int:\n    '''Twice n.'''\n    return 2 * n\n"
        "def _hidden(): ...\n"
        "class Other: ...\n"
    )
    return path


def ask(llm: LLM, functions: Sequence[Callable[..., Any]], **options: Any) -> None:
    answer_prompt(
        "Hello", model=str(llm.path), system="", raw=False, functions=functions, as_json=True,
        with_stats=False, loading={"backend": "reference"}, **options,
    )  # fmt: skip


def test_functions_of_a_file_are_called_and_shown(llm: LLM, family: str, file: Path, capsys: Any) -> None:
    """Catches imports and private functions that a model may call, and calls that nobody sees."""
    functions = functions_of([file], asks=False)
    assert [function.__name__ for function in functions] == ["double"]
    ask(llm, functions, sampling=script(llm, [said(family, ("double", {"n": 4})), answered(family, "8")]))
    shown = capsys.readouterr()
    assert json.loads(shown.out)["text"] == "8"
    assert json.loads(shown.out)["messages"][1]["content"] == "8"
    assert shown.err.endswith("→ double(n=4)\n← 8\n")


def test_a_call_wants_a_yes(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Catches a call that is made before the yes, after a no, or where nobody can be asked."""
    monkeypatch.setattr(function_files.sys, "stdin", None)
    with pytest.raises(ConfigError, match="--yes"):
        functions_of([file], asks=True)
    monkeypatch.undo()
    monkeypatch.setattr(function_files.sys.stdin, "isatty", lambda: True, raising=False)
    (double,) = functions_of([file], asks=True)
    for reply, wanted in (("y", "8"), ("n", DECLINED), ("", DECLINED)):
        monkeypatch.setattr("builtins.input", lambda reply=reply: reply)
        assert double(n=4) == wanted
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert double(n="\x1b[2J") == "\x1b[2J" * 2
    assert "\x1b" not in capsys.readouterr().err


def test_files_that_have_no_tools_are_refused(tmp_path: Path) -> None:
    """Catches a traceback for a file that is not there, is broken, or is not Python."""
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "text.md").write_text("# tools\n")
    for name in ("nothing.py", "empty.py", "broken.py", "text.md", "."):
        with pytest.raises(ConfigError, match="--tool"):
            functions_of([tmp_path / name], asks=False)
