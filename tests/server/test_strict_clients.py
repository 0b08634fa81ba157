"""Every endpoint by clients that refuse an answer whose form is not their API's."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.server.live_server import MODEL, TOOL_TEMPLATE, Served, serving
from tests.tiny_gguf import tiny_config, write_tiny

with lazy_imports():
    import anthropic
    import ollama
    from openai import OpenAI

ASKED = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
CALL = {"name": "f", "description": "d", "parameters": SCHEMA}
CHAT = {"model": MODEL, "messages": ASKED, "max_tokens": 8}
TEXT = {"model": MODEL, "prompt": "Hi", "max_tokens": 8}
ASK = {"model": MODEL, "input": "Hi", "max_output_tokens": 8}
TOOLS = {"tools": [{"type": "function", "function": CALL}], "tool_choice": "required", "max_tokens": 100}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TEXT_FORM = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
FLAT_TOOLS = {
    "tools": [{"type": "function", "strict": True, **CALL}],
    "tool_choice": "required",
    "max_output_tokens": 100,
}
Ask: TypeAlias = "Callable[[OpenAI], Any]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("strict")
    with LLM(write_tiny(path / "tiny.gguf", tiny_config(1024)), max_requests=4, n_threads=1) as llm:
        llm.tokenizer.chat_template = TOOL_TEMPLATE
        with serving(llm, batch_dir=path / "batches") as server:
            yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    """A client that raises APIResponseValidationError, for whole answers and of each event of a stream."""
    with OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    ) as made:
        yield made


def ended(client: OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 3},
        {"stop": ["a", "e"], "seed": 1, "user": "u", "metadata": {"a": "b"}},
        {"response_format": FORM, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
        TOOLS,
        {**TOOLS, "parallel_tool_calls": False, "stream_options": {"include_usage": True}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        {"extra_body": {"return_token_ids": True, "prompt_logprobs": 1, "timings_per_token": True}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_fit_the_openai_clients_types(
    client: OpenAI, more: dict[str, Any], stream: bool
) -> None:
    """A field of a chat, of its logprobs, calls or usage that is missing or of another type."""
    more = {key: value for key, value in more.items() if stream or key != "stream_options"}
    if stream and "prompt_logprobs" in more.get("extra_body", {}):
        more = {**more, "extra_body": {"return_token_ids": True}}  # they are not sent in streams
    answer = client.chat.completions.create(**CHAT | more, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert any(one.choices for one in chunks)


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2, "logprobs": 3}, {"echo": True}, {"prompt": [[5, 6], [7]], "stop": "a"}],
)
def test_completions_fit_the_openai_clients_types(client: OpenAI, more: dict[str, Any]) -> None:
    """A field of a completion that is missing or of another type.

    Not of streams, nor of scores of an echoed prompt: chunks have no finish reason yet and the first token
    no score, which OpenAI writes as null, and its client's types forbid.
    """
    assert client.completions.create(**TEXT | more).choices


@pytest.mark.full(only=["False-more5"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"text": TEXT_FORM, "max_output_tokens": 40},
        FLAT_TOOLS,
        {"reasoning": {"effort": "low"}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5, "store": False},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_fit_the_openai_clients_types(client: OpenAI, more: dict[str, Any], stream: bool) -> None:
    """A field or an event of a response that is missing or of another type."""
    answer = client.responses.create(**ASK | more, stream=stream)
    if not stream:
        assert answer.output
        return
    found = list(answer)
    assert found[-1].type in ("response.completed", "response.incomplete")


def test_kept_responses(client: OpenAI) -> None:
    """A stored response or its items in another form than when it was made."""
    made = client.responses.create(**ASK)
    again = client.responses.retrieve(made.id)
    assert again.output_text == made.output_text
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "5"}
    parts = [{"type": "input_text", "text": "And"}]
    more = client.responses.create(
        model=MODEL,
        max_output_tokens=8,
        input=[*turns, call, output, {"role": "user", "content": parts}],
        previous_response_id=made.id,
    )
    assert more.previous_response_id == made.id
    pages = client.responses.input_items.list(more.id, limit=2, order="asc")
    kinds = [(one.type, getattr(one, "role", "")) for one in pages]  # on all pages
    assert kinds[:2] == [("message", "user"), ("message", "assistant")]
    assert kinds[2:] == [("function_call", ""), ("function_call_output", ""), ("message", "user")]
    newest = next(iter(client.responses.input_items.list(more.id)))
    assert newest.content[0].text == "And"
    reference = [{"type": "item_reference", "id": newest.id}]
    again = client.responses.create(model=MODEL, max_output_tokens=8, input=reference)
    assert next(iter(client.responses.input_items.list(again.id))).content[0].text == "And"
    client.responses.delete(made.id)
    assert client.responses.input_tokens.count(model=MODEL, input="Hi").input_tokens > 0


@pytest.mark.parametrize(
    "ask",
    [
        # as base64, which the client asks for by itself, its own strict form refuses the text it decodes
        lambda client: client.embeddings.create(
            model=MODEL,
            input=[[5], [6]],
            encoding_format="float",
            extra_body={"allow_token_ids": True},
        ),
        lambda client: next(iter(client.models.list())),
        lambda client: client.models.retrieve(MODEL),
    ],
    ids=["embeddings", "models", "model"],
)
def test_vectors_and_models(client: OpenAI, ask: Ask) -> None:
    """A field of a vector, its usage or a model that is missing or of another type."""
    assert ask(client)


def test_files_and_batches(client: OpenAI) -> None:
    """A field of a file, a batch, or a list of them that is missing or of another type."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": TEXT}
    file = io.BytesIO(json.dumps(line).encode() + b"\n")
    file.name = "requests.jsonl"
    made = client.files.create(file=file, purpose="batch")
    assert client.files.retrieve(made.id).id == made.id
    assert made.id in [one.id for one in client.files.list()]
    batch = client.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.id in [one.id for one in client.batches.list()]
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert set(answer) == {"id", "custom_id", "response", "error"}
    other = client.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert ended(client, client.batches.cancel(other.id).id).status in ("cancelled", "completed")
    assert client.files.delete(made.id).deleted


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "s", "stop_sequences": ["a", "e"], "metadata": {"user_id": "u"}},
        {
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "max_tokens": 100,
        },
        {"thinking": {"type": "disabled"}, "extra_body": {"temperature": 0.5}},
    ],
)
def test_messages_fit_the_anthropic_clients_types(server: Served, more: dict[str, Any]) -> None:
    """A field or an event of a message that is missing or of another type."""
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        given = {"model": MODEL, "max_tokens": 8, "messages": ASKED, **more}
        assert client.messages.create(**given).content
        with client.messages.stream(**given) as stream:
            assert [event.type for event in stream][-1] == "message_stop"
        count = {key: value for key, value in given.items() if key in ("model", "messages", "system")}
        assert client.messages.count_tokens(**count).input_tokens > 0


@pytest.mark.representative(2)
def test_answers_fit_the_ollama_clients_types(server: Served) -> None:
    """A field that ollama's types, which are always strict, miss."""
    client = ollama.Client(host=server.url, timeout=60)
    options = {"num_predict": 8}
    assert client.chat(MODEL, ASKED, options=options).done
    assert [one.done for one in client.chat(MODEL, ASKED, options=options, stream=True)][-1]
    assert client.generate(MODEL, "Hi", options=options, logprobs=True, top_logprobs=2).logprobs
    assert [one.done for one in client.generate(MODEL, "Hi", options=options, stream=True)][-1]
    tool = {"type": "function", "function": CALL}
    assert client.chat(MODEL, ASKED, tools=[tool], options=options).done
    assert client.embed(MODEL, ["a", "b"]).embeddings
    assert client.embeddings(MODEL, "a").embedding
    assert client.list().models
    assert client.ps().models
    assert client.show(MODEL).modelinfo
