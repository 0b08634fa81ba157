"""Requests as agents send them to /v1/responses: tools, histories, responses that are continued."""

from __future__ import annotations

import asyncio
import errno
import json
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kukri.errors import ConfigError, RequestError
from kukri.server.errors import NotFoundError
from kukri.server.keys import KeyRing
from kukri.server.openai import response_store
from kukri.server.openai.response_store import ResponseFiles, ResponseStore
from kukri.server.openai.responses import parse_response
from kukri.server.openai.responses_schema import ResponseBody
from kukri.tokenizer.messages import ROLES, checked_messages
from tests.server.bodies import check_error, check_event, check_response, events
from tests.server.forcing import force
from tests.server.live_server import MODEL, serving

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'},
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
FILES = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files.",
    "tools": [{**SHELL, "name": "read"}],
}
CODEX = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        SHELL,
        PATCH,
        FILES,
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "none", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "client_metadata": {"x-codex-installation-id": "i"},
    "max_output_tokens": 40,
}


def messages(**changes: Any) -> list[dict[str, Any]]:
    return list(parse_response(ResponseBody.model_validate(CODEX | changes)).messages)


def say(server: Any, monkeypatch: Any, name: str, arguments: dict[str, Any]) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    force(server.served, monkeypatch, f"<tool_call>\n{text}\n</tool_call>", with_marks=True)


@pytest.mark.representative(3)
@pytest.mark.full(but=["apply_patch-*"])
@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        (
            "shell",
            {"command": "ls"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}'},
        ),
        (
            "mcp__files__read",
            {"command": "a"},
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__files__",
                "arguments": '{"command": "a"}',
            },
        ),
        (
            "apply_patch",
            {"input": "*** Begin Patch\n+é"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch\n+é"},
        ),
    ],
)
def test_an_agents_call_comes_as_its_own_tool(tooled, monkeypatch, name, arguments, item):
    """Catches a 400 for Codex's first request, and calls under names that the client does not know."""
    say(tooled, monkeypatch, name, arguments)
    with tooled.http() as http:
        response = http.post("/v1/responses", json=CODEX)
        assert response.status_code == 200, response.text
        assert response.headers["x-tools-left-out"] == "web_search, local_shell"
        told = list(events(response))
        whole = http.post("/v1/responses", json=CODEX | {"stream": False}).json()
    for event in told:
        check_event(event)
    check_response(whole)
    (found,) = told[-1]["response"]["output"]
    assert {key: found.get(key) for key in item} == item
    assert {key: whole["output"][0].get(key) for key in item} == item
    kinds = [event["type"] for event in told]
    if item["type"] == "custom_tool_call":
        text = "".join(e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta")
        assert text == item["input"]
        assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    # and what came can be sent back with a result
    kind = "custom_tool_call_output" if item["type"] == "custom_tool_call" else "function_call_output"
    back = [*CODEX["input"], found, {"type": kind, "call_id": found["call_id"], "output": "done"}]
    history = messages(input=back)
    (call,) = history[-2]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
    assert history[-1] == {"role": "tool", "tool_call_id": found["call_id"], "content": "done"}


def test_other_items_of_a_history_are_notes():
    """Catches a history with items of hosted tools, or with parts that cannot be read, that is refused."""
    picture = {"type": "input_image", "image_url": "data:,"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, picture]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"role": "assistant", "phase": "commentary", "content": [
            {"type": "output_text", "text": "b", "annotations": [{"type": "url_citation"}]},
            {"type": "refusal", "refusal": "c"},
        ]},
        {"type": "local_shell_call", "call_id": "l", "action": {}},
        {"type": "function_call", "call_id": "f", "name": "f", "arguments": "{", "caller": {"type": "x"}},
        {"type": "function_call_output", "call_id": "f", "output": [picture]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    found = checked_messages(messages(input=items, instructions=None, tools=[]), frozenset(ROLES))
    assert [one.get("content") for one in found] == [
        *("a\n[image]", "[web search call]", "b\nc", "[local shell call]", "[image]", "d")
    ]
    assert found[1]["reasoning_content"] == "Hm."
    with pytest.raises(RequestError, match="reads and writes only text") as caught:
        checked_messages(messages(input=[{"role": "user", "content": [picture]}]), frozenset(ROLES))
    assert caught.value.param == "input[0].content[0]"


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        ({"type": "custom", "name": "apply_patch"}, ("required", "apply_patch", 3)),
        ({"type": "function", "function": {"name": "shell"}}, ("required", "shell", 3)),
        (
            {"type": "function", "name": "read", "namespace": "mcp__files__"},
            ("required", "mcp__files__read", 3),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
            ("auto", None, 1),
        ),
    ],
)
def test_choices_of_tools(choice, want):
    """Catches a form of tool_choice that is refused, and a call of a tool that is not allowed."""
    found = parse_response(ResponseBody.model_validate(CODEX | {"tool_choice": choice}))
    assert (found.tool_choice, found.tool_name, len(found.functions)) == want
    with pytest.raises(RequestError, match="'tool_choice' must name one of the tools"):
        parse_response(ResponseBody.model_validate(CODEX | {"tool_choice": {"type": "web_search"}}))


def test_a_custom_tools_regular_expression_is_its_schema():
    """Catches a form of a text that is neither told nor enforced."""
    tool = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    (function,) = parse_response(ResponseBody.model_validate(CODEX | {"tools": [tool]})).functions
    assert function["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:a+)$"}
    assert function["description"].endswith("a+")


def test_a_response_is_continued(tooled):
    """Catches a conversation that is lost, read by another, or kept although it was to be forgotten."""
    asked = {"model": MODEL, "max_output_tokens": 3, "temperature": 0}
    create = tooled.client.responses.create
    first = create(**asked, input="My name is Ada.")
    second = create(**asked, input="And?", previous_response_id=first.id)
    items = [
        {"role": "user", "content": "My name is Ada."},
        first.output[0].to_dict(),
        {"role": "user", "content": "And?"},
    ]
    whole = create(**asked, input=items, store=False)
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text
    assert second.previous_response_id == first.id
    third = create(**asked, input=[{"role": "user", "content": "Go on"}], previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    assert tooled.client.responses.retrieve(second.id).output_text == second.output_text
    assert [one.role for one in tooled.client.responses.input_items.list(second.id).data] == ["user"]
    reference = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "?"}]
    assert create(**asked, input=reference).usage.input_tokens
    with tooled.http() as http:
        lost = {**asked, "input": "?", "previous_response_id": whole.id}
        error = http.post("/v1/responses", json=lost)
        check_error(error, 400, "previous_response_id")
        assert error.json()["error"]["code"] == "previous_response_not_found"
        tooled.client.responses.delete(first.id)
        check_error(http.get(f"/v1/responses/{first.id}"), 404)
        check_error(http.post("/v1/responses", json={**lost, "previous_response_id": second.id}), 400)
        assert http.post("/responses", json={**asked, "input": "?"}).status_code == 200


def test_all_apis_give_the_likeliest_answer(served, offline):
    """Catches an API that refuses the seed or the penalties, so that defaults cannot be undone there."""
    said = {
        "temperature": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 1,
        "logit_bias": {"5": 0},
    }
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    want = offline.chat(turn, temperature=0, frequency_penalty=0, presence_penalty=0, max_tokens=6).text
    body = {"model": MODEL, **said}
    with served.http() as http:
        chat = http.post("/v1/chat/completions", json=body | {"messages": turn, "max_tokens": 6}).json()
        response = http.post("/v1/responses", json=body | {"input": turn, "max_output_tokens": 6}).json()
        message = http.post("/v1/messages", json=body | {"messages": turn, "max_tokens": 6}).json()
    assert chat["choices"][0]["message"]["content"] == want
    assert response["output"][0]["content"][0]["text"] == want
    assert message["content"][0]["text"] == want


def add(store: ResponseStore, *response: Any) -> None:
    assert asyncio.run(store.add(*response))


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_is_told_with_the_answer(offline, tmp_path, monkeypatch, stream):
    """Catches a response that is said to be stored, and is not known to the next server."""
    asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 2, "ignore_eos": True, "stream": stream}

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def respond(http):
        reply = http.post("/v1/responses", json=asked)
        response = [*events(reply)][-1]["response"] if stream else reply.json()
        check_response(response)
        return response

    with serving(offline, response_dir=tmp_path) as server, server.http() as http:
        with monkeypatch.context() as full:
            full.setattr(response_store, "write_private", write)
            lost = respond(http)
        kept = respond(http)
        assert (lost["status"], lost["store"], kept["store"]) == ("incomplete", False, True)
        check_error(http.get(f"/v1/responses/{lost['id']}"), 404)
    with serving(offline, response_dir=tmp_path) as server, server.http() as http:
        assert http.get(f"/v1/responses/{kept['id']}").json()["store"]


def test_the_store_is_bounded_and_each_owners_own():
    """Catches a server whose memory grows with each response, and one key that reads another's."""
    store = ResponseStore(max_bytes=40_000)
    for i in range(100):
        item = {"id": f"msg_{i}", "content": "x" * 1000}
        add(store, "a", f"resp_{i - 1}" if i else None, [], {"id": f"resp_{i}", "output": [item]})
    assert 5 < len(store._stored) < 20
    assert store._n_bytes == sum(one.n_bytes for one in store._stored.values()) <= 40_000
    with pytest.raises(NotFoundError):
        store.find("b", "resp_99")
    with pytest.raises(RequestError, match="send its items as 'input'"):
        store.items_before("a", "resp_99")
    assert store.items_by_id("a", {"msg_99", "msg_0"}).keys() == {"msg_99"}
    assert store.items_by_id("b", {"msg_99"}) == {}
    huge = {"id": "huge", "output": [{"content": "x" * 20_000}]}
    assert not asyncio.run(store.add("a", None, [], huge)), "a client is told so"
    with pytest.raises(NotFoundError):
        store.find("a", "huge")
    for name in list(store._stored):
        asyncio.run(store.forget("a", name))
    assert store._n_bytes == 0


def test_responses_outlive_the_server(tmp_path, caplog):
    """Catches responses that are lost with the process, that others may read, or that are damaged."""
    keys = KeyRing(["first-key-of-some-length", "second-key-of-some-length"])
    here, other = keys.clients

    def opened(max_bytes=1 << 20):
        store = ResponseStore(max_bytes, ResponseFiles(tmp_path / "responses", keys))
        return store, *(asyncio.run(store.owner(client)) for client in (here, other))

    store, owner, stranger = opened()
    for i in range(4):
        output = [{"id": f"msg_{i}", "content": "x" * 1000}]
        given = [{"id": f"in_{i}", "content": "é"}]
        add(store, owner, f"resp_{i - 1}" if i else None, given, {"id": f"resp_{i}", "output": output})
    before = store.items_before(owner, "resp_3")
    asyncio.run(store.forget(owner, "resp_2"))
    store.close()
    files = sorted((tmp_path / "responses").glob("*.json"))
    assert [path.stem for path in files] == ["resp_0", "resp_1", "resp_3"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert not any(here.digest.hex() in path.read_text() for path in files)
    again, owner, stranger = opened()
    assert again.items_before(owner, "resp_1") == before[:4]
    assert again.find(owner, "resp_3").n_input == 1
    with pytest.raises(NotFoundError):
        again.find(stranger, "resp_1")
    again.close()
    files[1].write_bytes(files[1].read_bytes().replace(b"xx", b"xy", 1))
    last, owner, _ = opened(max_bytes=store._n_bytes // 2)
    last.close()
    assert [path.stem for path in sorted((tmp_path / "responses").glob("*.json"))] == ["resp_0"]
    assert last.find(owner, "resp_0").response["id"] == "resp_0", "which was used last"
    assert "resp_1.json is damaged" in caplog.text


def _of_another_version(data: bytes) -> bytes:
    data = json.dumps({**json.loads(data.partition(b"\n")[2]), "version": 2}).encode()
    return sha256(data).hexdigest().encode() + b"\n" + data


def state(path: Path) -> tuple[int, ...]:
    """What changes of a path when it is written or replaced, and not when it is read."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(_of_another_version(path.read_bytes())),
        lambda path: path.chmod(0o666),
        lambda path: path.rename(path.with_suffix(".kept")) and path.symlink_to("resp_0.kept"),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["version", "mode", "link", "directory"],
)
def test_a_stored_response_that_cannot_be_served_stays(tmp_path, caplog, spoil):
    """Catches another version of kukri, or a fault of the system, that deletes what clients stored."""
    path = tmp_path / "responses"
    store = ResponseStore(files=ResponseFiles(path, KeyRing([])))
    for i in range(2):
        add(store, "", None, [], {"id": f"resp_{i}", "output": []})
    store.close()
    spoil(path / "resp_0.json")
    before = state(path / "resp_0.json")
    again = ResponseStore(files=ResponseFiles(path, KeyRing([])))
    again.close()
    assert state(path / "resp_0.json") == before
    assert "stays, but is not served" in caplog.text
    assert again.find("", "resp_1")
    with pytest.raises(NotFoundError):
        again.find("", "resp_0")


def test_a_lack_of_descriptors_removes_no_responses(tmp_path, monkeypatch):
    """Catches responses that are lost because the process had too many files open."""
    path = tmp_path / "responses"
    store = ResponseStore(files=ResponseFiles(path, KeyRing([])))
    add(store, "", None, [], {"id": "resp_0", "output": []})
    store.close()
    files = ResponseFiles(path, KeyRing([]))
    monkeypatch.setattr(
        response_store, "open_private", lambda _: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many"))
    )
    ResponseStore(files=files).close()
    assert (path / "resp_0.json").exists()


def test_a_response_that_cannot_be_written_is_logged(tmp_path, caplog):
    """Catches a fault other than the disk's that nobody hears of, as nobody waits for the outcome."""
    files = ResponseFiles(tmp_path / "responses", KeyRing([]))
    assert not files.save(SimpleNamespace(id="resp_0")).result()  # of another class
    files.close()
    assert "TypeError" in caplog.text


def test_a_directory_that_others_may_write_to_keeps_no_responses(tmp_path):
    """Catches answers that another user has put there."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="must not be writable by other users"):
        ResponseFiles(tmp_path / "open", KeyRing([]))


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/chat/completions", {"stop": ["a", 5]}, "stop[1]", "must be a text"),
        ("/v1/chat/completions", {"stop": ["a", ""]}, "stop[1]", "must have at least 1 characters"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1]", "must be a text"),
        ("/v1/completions", {"prompt": [5, "a"]}, "prompt[1]", "must be a whole number"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "must not be empty"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048 entries"),
        (
            "/v1/responses",
            {"tool_choice": {"type": "function"}, "tools": [SHELL]},
            "tool_choice",
            "must name one of the tools",
        ),
    ],
)
def test_errors_of_unions_name_the_values_own_branch(served, path, body, param, text):
    """Catches an error about a text where a list was sent, and one that does not say which item is wrong."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a"}
    own = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.get(path, "input")
    with served.http() as http:
        message = check_error(http.post(path, json={own: asked[own]} | body), 400, param)
        assert text in message
        assert "it is at /v1/messages" in check_error(http.post("/messages", json={}), 404)
        assert "POST /what was not found" in check_error(http.post("/what", json={}), 404)
