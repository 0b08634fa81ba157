"""Response bodies against the types of the `openai` package, nulls and all."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter

from tests.lazy_imports import lazy_imports

with lazy_imports():
    import anthropic
    import openai

# beyond OpenAI's: as vLLM and others write thoughts and contexts
EXTENSIONS = {
    *("reasoning_content", "max_model_len"),
    *("state", "memory_bytes", "running_requests", "expires_in_s", "root", "capabilities"),  # those of models
    "id",  # that of embeddings, as vLLM has it
    "store",  # whether a response is stored: OpenAI answers it, and its client has no such field
}

# properties that OpenAI's published schema lists as required though they may be null, by object
REQUIRED_NULLS = {
    "chat.completion": {"id", "choices", "created", "model", "object", "usage"},
    "chat.completion.chunk": {"id", "choices", "created", "model", "object"},
    "text_completion": {"id", "choices", "created", "model", "object", "usage"},
    "response": {
        "id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools",
        "output", "parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p",
    },
}  # fmt: skip


def check_chat(body: Any) -> openai.types.chat.ChatCompletion:
    parsed = _strict(openai.types.chat.ChatCompletion, body)
    _has(body, REQUIRED_NULLS["chat.completion"])
    for choice in body["choices"]:
        _has(choice, {"finish_reason", "index", "message", "logprobs"})
        _has(choice["message"], {"role", "content", "refusal"})
        if choice["logprobs"] is not None:
            _has(choice["logprobs"], {"content", "refusal"})
            for entry in choice["logprobs"]["content"]:
                _has(entry, {"token", "logprob", "bytes", "top_logprobs"})
    return parsed


def check_chunk(body: Any) -> openai.types.chat.ChatCompletionChunk:
    parsed = _strict(openai.types.chat.ChatCompletionChunk, body)
    _has(body, REQUIRED_NULLS["chat.completion.chunk"])
    for choice in body["choices"]:
        _has(choice, {"delta", "finish_reason", "index", "logprobs"})
    return parsed


def check_completion(body: Any, *, is_chunk: bool = False) -> openai.types.Completion:
    """OpenAI's chunks of text have a finish_reason of null, which its types leave out."""
    plain = json.loads(json.dumps(body))
    for choice in plain["choices"]:
        _has(choice, {"finish_reason", "index", "logprobs", "text"})
        if is_chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if logprobs and logprobs["tokens"] and logprobs["token_logprobs"][0] is None:  # echo: the first token
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    _has(body, REQUIRED_NULLS["text_completion"] - ({"usage"} if is_chunk else set()))
    return _strict(openai.types.Completion, plain)


def check_response(body: Any) -> openai.types.responses.Response:
    parsed = _strict(openai.types.responses.Response, body)
    _has(body, REQUIRED_NULLS["response"])
    for item in body["output"]:
        if item["type"] == "function_call":
            _has(item, {"id", "type", "status", "call_id", "name", "arguments"})
        for part in item.get("content", ()):
            if part["type"] == "output_text":
                _has(part, {"type", "text", "annotations", "logprobs"})
    for tool in (one for one in body["tools"] if one["type"] == "function"):
        _has(tool, {"type", "name", "parameters", "strict"})
    return parsed


def check_event(body: Any) -> Any:
    if "response" in body:
        check_response(body["response"])
    return TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_json(
        json.dumps(body), strict=True
    )


def check_embeddings(body: Any) -> None:
    """Vectors in base64 are texts, which the client's types leave out: it decodes them before."""
    plain = json.loads(json.dumps(body))
    for item in plain["data"]:
        if isinstance(item["embedding"], str):
            item["embedding"] = [0.0]
    _strict(openai.types.CreateEmbeddingResponse, plain)


def check_message(body: Any) -> anthropic.types.Message:
    parsed = _strict(anthropic.types.Message, body)
    _has(body, {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"})
    return parsed


def check_message_event(body: Any) -> Any:
    if body["type"] == "ping":
        assert body == {"type": "ping"}
        return None
    event = TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_json(json.dumps(body), strict=True)
    _no_extras(event)
    return event


def check_message_tokens(body: Any) -> int:
    return _strict(anthropic.types.MessageTokensCount, body).input_tokens


def check_message_error(response: httpx.Response, status: int) -> str:
    """The message of an error in Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    known = response.text.replace("request_too_large", "api_error")  # documented, and missing in the types
    parsed = anthropic.types.shared.ErrorResponse.model_validate_json(known, strict=True)
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"]
    assert parsed.error.message
    assert "\n" not in parsed.error.message
    return parsed.error.message


def check_model(body: Any) -> openai.types.Model:
    return _strict(openai.types.Model, body)


def check_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    more = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | more
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    assert isinstance(error["type"], str)
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


def events(response: httpx.Response) -> Iterator[Any]:
    """The JSON of each event of a stream; checks its framing, and that [DONE] is last, where it is."""
    is_done = False
    for block in response.read().decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert not is_done, "an event after [DONE]"
        lines = block.split("\n")
        assert len(lines) <= 2
        data = lines[-1].removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if len(lines) == 2:
            assert lines[0] == f"event: {event['type']}"
        yield event
    assert is_done or len(lines) == 2, "[DONE] is missing"


def _strict(kind: type[BaseModel], body: Any) -> Any:
    """The body as its type: nothing converted, nothing unknown."""
    parsed = kind.model_validate_json(json.dumps(body), strict=True)
    _no_extras(parsed)
    return parsed


def _no_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        extras = set(value.model_extra or ()) - EXTENSIONS
        assert not extras, f"{type(value).__name__} has no {extras}"
        for name in type(value).model_fields:
            _no_extras(getattr(value, name))
    elif isinstance(value, typing.Mapping):
        for item in value.values():
            _no_extras(item)
    elif isinstance(value, list):
        for item in value:
            _no_extras(item)


def _has(body: Any, names: set[str]) -> None:
    assert names <= set(body), f"{names - set(body)} missing"
