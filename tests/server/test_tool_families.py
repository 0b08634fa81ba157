"""Tools from end to end for each family: a tiny model with its marks and template, made to write its form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kukri import LLM
from tests.dialects.families import FAMILIES, PYTHON_TOOLS, SMOLLM3_CODE, Family, history_of, write_family
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_chat, check_chunk, events
from tests.server.forcing import force
from tests.server.live_server import MODEL, Served, serving

with lazy_imports():
    import anthropic
    import ollama

CALLS = [("get_weather", {"city": "Zürich \"}'", "unit": "C"}), ("get_time", {})]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
QUESTION = [{"role": "user", "content": "Weather and time?"}]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request) -> Family:
    return FAMILIES[request.param]


def serve(family: Family, path) -> Iterator[Served]:
    model = write_family(path / "tiny.gguf", family)
    with LLM(model, n_threads=1, max_requests=2) as llm, serving(llm) as server:
        yield server


@pytest.fixture(scope="module")
def server(family, tmp_path_factory) -> Iterator[Served]:
    yield from serve(family, tmp_path_factory.mktemp("family"))


@pytest.fixture
def say(server, monkeypatch) -> Callable[[str], None]:
    """Makes the model of a server write a text."""

    def make(text: str, of: Served = server) -> None:
        force(of.served, monkeypatch, text, with_marks=True)

    return make


def ask(server: Served, **options: Any) -> tuple[str | None, list[tuple[str, Any]], str]:
    """(content, calls, why it ended), which are the same in a stream."""
    options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS} | options
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=options)
        assert response.status_code == 200, response.text
        whole = check_chat(response.json()).choices[0]
        chunks = list(events(http.post("/v1/chat/completions", json=options | {"stream": True})))
    for chunk in chunks:
        check_chunk(chunk)
    content, calls = "", []
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [tuple(call) for call in calls] == found
    assert content == (whole.message.content or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.finish_reason
    ids = [call.id for call in whole.message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    return whole.message.content, [(n, json.loads(a)) for n, a in found], whole.finish_reason


# ---- what the model writes


@pytest.mark.full(but=["smollm3"])
def test_stop_strings_count_from_the_answer_on(server, family, say):
    """Catches an answer without content as the model thinks of a stop string, and one that is not stopped."""
    say("The Question: who asks?".join(family.thinks) + "Rome. Question: next".join(family.says))
    assert ask(server, tools=None, stop=["Question:"]) == ("Rome. ", [], "stop")
    assert ask(server, stop=["ome"]) == ("R", [], "stop")


@pytest.mark.full(but=["qwen", "hermes", "llama3", "gpt_oss", "gemma4", "glm4"])
def test_calls_are_read(server, family, say):
    """Catches a form that is not recognized, marks that are shown, and calls in another order."""
    calls = CALLS[: family.most_calls]
    say(family.before + family.write(calls))
    before = "Let me see." if family.before else None
    assert ask(server) == (before, calls, "tool_calls")
    assert ask(server, tool_choice="auto", parallel_tool_calls=False) == (before, CALLS[:1], "tool_calls")


def test_text_alone_is_text(server, family, say):
    """Catches an answer that tools change where none is called."""
    say("It is { noon } [here].".join(family.says))
    assert ask(server) == ("It is { noon } [here].", [], "stop")
    assert ask(server, tools=STRICT) == ("It is { noon } [here].", [], "stop")


def test_no_tools_no_calls(server, family, say):
    """Catches calls where the client has said that there are to be none."""
    say(family.write(CALLS[:1]))
    content, calls, reason = ask(server, tool_choice="none")
    assert (calls, reason) == ([], "stop")
    assert "Zürich" in content


@pytest.mark.full(but=["qwen-*", "llama3-*", "gpt_oss-*", "gemma4-*", "glm4-*", "smollm3-*"])
@pytest.mark.parametrize("many", [True, False])
def test_a_grammar_knows_the_form(server, family, say, many):
    """Catches a grammar that forbids what the family writes: the request would fail."""
    calls = CALLS[: family.most_calls] if many else CALLS[:1]
    say(family.write(calls))
    parallel = {"parallel_tool_calls": many}
    assert ask(server, tool_choice="required", **parallel) == (None, calls, "tool_calls")
    assert ask(server, tools=STRICT, **parallel) == (None, calls, "tool_calls")
    say(family.before + family.write(calls))
    before = "Let me see." if family.before else None
    assert ask(server, tools=STRICT, **parallel) == (before, calls, "tool_calls")
    say(family.write(CALLS[1:]))
    assert ask(server, tool_choice=NAMED) == (None, CALLS[1:], "tool_calls")


def test_a_grammar_forbids_the_rest(server, family, say):
    """Catches a choice that is not enforced: what is written breaks it, so that the request fails."""
    options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
    for text, choice in (
        ("Hello", "required"),
        (family.write([("get_weather", {"city": "Paris"})]), "required"),
        (family.write(CALLS[:1]), NAMED),
    ):
        say(text)
        with server.http() as http:
            response = http.post("/v1/chat/completions", json=options | {"tool_choice": choice})
        assert response.status_code == 500, response.text


PATCH = """*** Begin Patch
*** Add File: src/a "b".py
+print('e', "\\\\n", 1 < 2)\t# \\\\
+
*** Update File: b.txt
@@ def f():
- old
+ new / other
*** End Patch"""
# as Codex states the form of its tool
PATCH_GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+  // more than one
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""


@pytest.mark.full(but=["qwen-*", "llama3-*", "gpt_oss-*", "gemma4-*", "glm4-*", "smollm3-*"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"syntax": "lark", "definition": PATCH_GRAMMAR}, PATCH, PATCH.replace("+ new", "new")),
        ({"syntax": "regex", "definition": r"^/(\w|\s|\")+\.py$"}, '/a b\n"c".py', "/a-b.py"),
    ],
    ids=["lark", "regex"],
)
def test_the_text_of_a_custom_tool_follows_its_grammar(server, family, say, choice, form, right, wrong):
    """Catches a grammar that is only told, and one that does not know how a family writes a text."""
    tool = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", **form}}
    body = {"model": MODEL, "input": "Change it.", "tools": [tool], "tool_choice": choice}

    def written(text: str) -> str:
        """A call; of a text in Python's form JSON's quotes are what a grammar leaves."""
        return family.write([("apply_patch", {"input": text})]).replace(repr(text), json.dumps(text))

    say(written(right))
    with server.http() as http:
        response = http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        (call,) = [item for item in response.json()["output"] if item["type"] == "custom_tool_call"]
        assert (call["name"], call["input"]) == ("apply_patch", right)
        say(written(wrong))
        assert http.post("/v1/responses", json=body).status_code == 500


def test_thoughts_come_before_calls(server, family, say):
    """Catches thoughts in the content, or a grammar that forbids them where the template has them."""
    calls = CALLS[: family.most_calls]
    say("Hm.".join(family.thinks) + family.write(calls))
    assert ask(server) == (None, calls, "tool_calls")
    if family.thinks[0].strip().split("\n")[0] in family.template or family.dialect == "harmony":
        for options in ({"tool_choice": "required"}, {"tools": STRICT}):
            assert ask(server, **options) == (None, calls, "tool_calls")


@pytest.mark.parametrize("family", ["qwen_xml", "gpt_oss", "gemma4", "lfm2", "glm4"], indirect=True)
def test_the_clients_see_the_same_calls(server, family, say):
    """Catches calls, thoughts or texts that a package of one API reads otherwise than those of another."""
    written = CALLS[: family.most_calls]
    say("Hm.".join(family.thinks) + family.before + family.write(written))
    chat = server.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    message = chat.choices[0].message
    seen = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert (message.reasoning_content, message.content, seen) == ("Hm.", "Let me see.", written)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    asked = {"model": MODEL, "max_tokens": 400, "tools": tools, "messages": QUESTION}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.thinking for block in answer.content if block.type == "thinking"] == ["Hm."]
        assert "".join(block.text for block in answer.content if block.type == "text") == "Let me see."
        assert [(b.name, b.input) for b in answer.content if b.type == "tool_use"] == written
        assert answer.stop_reason == "tool_use"
    for given in (TOOLS, STRICT):
        answer = ollama.Client(server.url).chat(MODEL, messages=QUESTION, tools=given)
        calls = [(call.function.name, dict(call.function.arguments)) for call in answer.message.tool_calls]
        assert (answer.message.thinking, answer.message.content, calls) == ("Hm.", "Let me see.", written)


@pytest.mark.parametrize("family", ["qwen", "gpt_oss", "seed"], indirect=True)
def test_thoughts_come_before_json(server, family, say):
    """Catches a schema that is enforced from the first token, where the family begins with its thoughts."""
    form = {"type": "json_object"}
    options = {"tools": None, "response_format": form}
    for thoughts in ("Hm.".join(family.thinks), ""):
        say(thoughts + '{"a": 1}'.join(family.says))
        assert ask(server, **options) == ('{"a": 1}', [], "stop")


@pytest.mark.parametrize("family", ["qwen"], indirect=True)
def test_a_call_that_cannot_be_read_is_counted(server, family, say, caplog):
    """Catches an agent that waits for a call which neither the log nor the metrics know of."""

    def count() -> float:
        with server.http() as http:
            found = re.search(
                r"^kukri_unparsed_tool_calls_total\{.*\} (\S+)$", http.get("/metrics").text, re.M
            )
        return float(found[1]) if found else 0.0

    before = count()
    say("<tool_call>{broken</tool_call>")
    content, calls, _ = ask(server)
    assert (content, calls) == ("<tool_call>{broken</tool_call>", [])
    assert count() == before + 2, "one whole and one in a stream"
    assert "<tool_call>" in caplog.text


@pytest.mark.parametrize("family", ["lfm2"], indirect=True)
def test_control_tokens_can_be_shown(server, family, say):
    """Catches a field that is refused, or ignored, though it is the one way to see what a model wrote."""
    text = family.write(CALLS[1:]) + "<|tool_list_start|>"
    say(text)
    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 90}
    for shows in (True, False):
        options = {"extra_body": {"skip_special_tokens": not shows}}
        plain = server.client.completions.create(**asked, **options).choices[0].text
        assert plain == (text if shows else "[get_time()]")
        chat = server.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, **options)
        message = chat.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_time"]
        assert (message.content or "") == ("<|tool_list_start|>" if shows else "")


def test_the_other_endpoints_read_the_same(server, family, say):
    """Catches a form that only chats know."""
    written = CALLS[: family.most_calls]
    say(family.before + family.write(written))
    tools = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
    answer = server.client.responses.create(model=MODEL, input="Hi", tools=tools)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == written
    assert answer.output_text == ("Let me see." if family.before else "")
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    body = {"model": MODEL, "max_tokens": 400, "tools": tools, "messages": QUESTION}
    with server.http() as http:
        blocks = http.post("/v1/messages", json=body).json()["content"]
    found = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert found == written


# ---- what the model reads


def prompt_of(server: Served, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt that a chat becomes."""
    seen = []
    encode = server.served.prompts.encode

    async def spy(*args: Any, **kwargs: Any) -> list[int]:
        ids = await encode(*args, **kwargs)
        seen.append(server.served.tokenizer.decode(ids, skip_special=False))
        return ids

    server.served.prompts.encode = spy
    try:
        server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, **options)
    finally:
        del server.served.prompts.encode
    return seen[0]


def test_tools_are_shown(server):
    """Catches tools that never reach the prompt, and those that do where there are to be none."""
    prompt = prompt_of(server, QUESTION, tools=TOOLS)
    for word in ("get_weather", "The weather of a city", "get_time", "additionalProperties"):
        assert word in prompt
    assert "strict" not in prompt_of(server, QUESTION, tools=STRICT)
    assert "get_weather" not in prompt_of(server, QUESTION, tools=TOOLS, tool_choice="none")


def test_history_is_shown(server, family):
    """Catches calls or results that the model never sees again, arguments quoted twice, and lost ids."""
    if not family.history:
        pytest.skip("tests/dialects/test_families.py has what this template prints")
    messages = history_of(family)
    assert prompt_of(server, messages) == family.history
    with server.http() as http:
        shown = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert shown == family.history
    with_tools = prompt_of(server, messages, tools=TOOLS)
    assert "The weather of a city" in with_tools
    assert with_tools.endswith(family.history[-60:])


def test_an_answer_can_be_sent_back(server, family, say):
    """Catches ids that the family's template does not take, and calls that change on the way."""
    say(family.write(CALLS[: min(family.n_calls_in_history, family.most_calls)]))
    message = (
        server.client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS).choices[0].message
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
        for i, call in enumerate(message.tool_calls)
    ]
    prompt = prompt_of(server, [*QUESTION, message.to_dict(), *results], tools=TOOLS)
    assert "Zürich" in prompt
    for i in range(len(results)):
        assert f"result {i}" in prompt
    if family.id_length is not None:
        assert {len(call.id) for call in message.tool_calls} == {family.id_length}


@pytest.mark.parametrize("family", ["lfm2", "phi4", "granite3"], indirect=True)
def test_calls_of_the_history_are_control_tokens(server, family):
    """Catches calls that the template does not print written as plain text, which the model never saw."""
    mark = "<|tool_call_start|>" if family.dialect == "lfm2" else "<|tool_call|>"
    mark_id = server.served.tokenizer.vocabulary.id_of[mark]
    seen = []
    encode = server.served.prompts.template.encode
    server.served.prompts.template.encode = lambda *a, **k: seen.append(encode(*a, **k)) or seen[-1]
    try:
        messages = [{"role": "user", "content": f"What is {mark}?"}, *history_of(family)[1:]]
        server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    finally:
        del server.served.prompts.template.encode
    assert seen[0].count(mark_id) == 1, "the call's, and not the user's"


@pytest.mark.parametrize("text", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_a_call_without_text_is_legal_in_every_api(server, family, text):
    """Catches a 400 for what clients send back of a call, and an API that shows it in another way."""
    calls = history_of(family)[1]["tool_calls"]
    messages = [*QUESTION, {"role": "assistant", **text, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in calls]
    function = [call["function"] for call in calls]
    uses = [
        {"type": "tool_use", "id": call["id"], "name": f["name"], "input": json.loads(f["arguments"])}
        for call, f in zip(calls, function, strict=True)
    ]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": []} for call in calls]
    turns = [*QUESTION, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    items = [
        *QUESTION,
        *({"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls),
        *({"type": "function_call_output", "call_id": call["id"], "output": []} for call in calls),
    ]
    with server.http() as http:
        counts = {
            path: http.post(path, json={"model": MODEL, **body}).json()
            for path, body in {
                "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
                "/v1/messages": {"messages": turns, "max_tokens": 1},
                "/v1/responses": {"input": items, "max_output_tokens": 1},
            }.items()
        }
    n = counts["/v1/chat/completions"]["usage"]["prompt_tokens"]
    usage = counts["/v1/messages"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n
    assert counts["/v1/responses"]["usage"]["input_tokens"] == n


# ---- SmolLM3's Python tools


@pytest.fixture(scope="module")
def coder(tmp_path_factory) -> Iterator[Served]:
    yield from serve(SMOLLM3_CODE, tmp_path_factory.mktemp("coder"))


def test_code_is_read_and_shown(coder, monkeypatch):
    """Catches calls written as Python that are not recognized, and a history in another form."""
    python = {"chat_template_kwargs": {"python_tools": PYTHON_TOOLS}}
    force(coder.served, monkeypatch, "Well.\n" + SMOLLM3_CODE.write(CALLS), with_marks=True)
    for tools in (None, TOOLS):
        assert ask(coder, tools=tools, **python) == ("Well.", CALLS, "tool_calls")
    prompt = prompt_of(coder, history_of(SMOLLM3_CODE), extra_body=python)
    assert "def get_weather(city: str, unit: str) -> str:" in prompt
    assert prompt.endswith(SMOLLM3_CODE.history.split("<|im_end|>\n", 1)[1])
