"""Ollama's chat, generate and embed: bodies become a ChatRequest, answers lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.calls.choice import Choice, Part, PartEvent, PlacedToken
from kukri.dialects.answer_parser import parser_of
from kukri.dialects.families import GENERIC
from kukri.errors import RequestError
from kukri.server.answers.embeddings import EmbeddingBody, vectors_of
from kukri.server.answers.logprobs import chat_logprobs
from kukri.server.answers.reply import AnswerWriter, Reply, StreamForm, compact, grown, interp_fields
from kukri.server.chat.request import ChatRequest
from kukri.server.intervention_bodies import steering
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.ollama.schema import (
    NAMES,
    GenerationBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
)
from kukri.server.schema import client_image, content_of
from kukri.tokenizer import arguments_object


def _line(content: dict[str, Any]) -> str:
    return compact(content) + "\n"


def _failure(error: dict[str, Any]) -> bytes:
    return _line(error).encode()


NDJSON = StreamForm(b"application/x-ndjson", b" ", _failure)  # a space in front of a line is part of its JSON


async def chat(served: ServedModel, body: OllamaChatBody, http: Request) -> Response:
    """The response to a chat."""
    opened = await served.open(parse_ollama_chat(body), http.scope)
    return _reply(served, opened, body, http)


async def generate(served: ServedModel, body: OllamaGenerateBody, http: Request) -> Response:
    """The response to a prompt: a message to a model with a chat template, else a text to continue."""
    if body.suffix or body.raw or served.tokenizer.chat_template is None:
        opened = await _continue(served, body, http)
    else:
        opened = await served.open(parse_ollama_prompt(body), http.scope)
    return _reply(served, opened, body, http)


def _reply(served: ServedModel, opened: Chat, body: GenerationBody, http: Request) -> Response:
    writer = OllamaWriter(served, opened, body, http.scope.get("kukri.load_s", 0.0))
    return Reply(served, opened.call, writer, stream=body.stream, form=NDJSON)


def parse_ollama_chat(body: OllamaChatBody) -> ChatRequest:
    """The request of a chat. Raises RequestError."""
    return ChatRequest(
        messages=_messages(body.messages or ()),
        functions=[tool.function.model_dump(exclude_none=True) for tool in body.tools or ()],
        **_common(body),
    )


def parse_ollama_prompt(body: OllamaGenerateBody) -> ChatRequest:
    """The request of a prompt as a conversation of one message. Raises RequestError."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    message = {"role": "user", "content": _with_images(body.images, body.prompt, "images")}
    return ChatRequest(messages=[*system, message], **_common(body))


def _common(body: GenerationBody) -> dict[str, Any]:
    return {
        "model": body.model,
        "sampling": body.sampling(),
        "grammar": body.grammar,
        "effort": body.effort,
        "max_context": body.max_context,
        "interventions": steering(body.interventions),
        "names": NAMES,
    }


async def _continue(served: ServedModel, body: OllamaGenerateBody, http: Request) -> Chat:
    """Queues the continuation of a text, in which control tokens count, or the text before `suffix`."""
    if body.images:
        raise RequestError.of(
            "images", "requires a model with a chat template, and cannot be combined with 'raw' and 'suffix'"
        )
    limit = served.llm.engine.maker.max_context
    text = "\n\n".join(part for part in (body.system, body.prompt) if part)
    if body.suffix:
        prompt = await served.middle_prompt(text, body.suffix, "suffix")
    else:
        prompt = await served.encode(text, parse_special=True, max_tokens=limit)
    request = ChatRequest(messages=(), **_common(body))
    try:
        sampling = served.within_context(request, len(prompt))
        params = served.params_of(body.model, {**sampling, "grammar": body.grammar})
        adapter = served.adapter_of(body.model)
        call = await served.submit(
            [prompt], params, http.scope, adapter=adapter, interventions=request.interventions
        )
    except RequestError as error:
        raise request.error(error) from None
    return Chat(call, [Choice(call.answers[0], parser_of(GENERIC, None))])


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form.

    Ollama's calls have no ids: a result belongs to the first call of its tool that has none yet, or simply to
    the first one.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and function of calls without a result
    n_calls = 0
    for i, one in enumerate(given):
        content = _with_images(one.images, one.content, f"messages[{i}].images")
        message: dict[str, Any] = {"role": one.role, "content": content}
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            open_calls = []
            for call in one.tool_calls:
                open_calls.append((f"call_{n_calls}", call.function.name))
                n_calls += 1
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(call.function.arguments)},
                }
                for (call_id, name), call in zip(open_calls, one.tool_calls, strict=True)
            ]
        elif one.role == "tool":
            name = one.tool_name or one.name
            found = next((call for call in open_calls if call[1] == name), None) or next(
                iter(open_calls), None
            )
            if found is not None:
                open_calls.remove(found)
                message["tool_call_id"] = found[0]
            if name is not None:
                message["name"] = name
        messages.append(message)
    return messages


def _with_images(images: Sequence[Any] | None, text: str | None, param: str) -> Any:
    """The content of a message: images stand before the text."""
    pieces = [client_image("image", f"{param}[{i}]", data=one) for i, one in enumerate(images or ())]
    return content_of([*pieces, text or ""])


class OllamaWriter(AnswerWriter):
    """Writes an answer as lines of JSON, or whole. Calls of tools come when they are complete."""

    form = NDJSON
    error_json = staticmethod(lambda message, status: {"error": message})

    def __init__(self, served: ServedModel, opened: Chat, body: GenerationBody, load_s: float) -> None:
        super().__init__(opened.call, opened.choices, stream=body.stream)
        self._served, self._body, self._load_s = served, body, load_s
        self._choice = opened.choices[0]
        self._started_s = monotonic()
        self._model = served.check_model(body.model.removesuffix(":latest"))

    def end(self) -> bytes:
        """The last line, with the counts, and what was read and captured."""
        return _line(self._last("", "", [], [])).encode()

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choice = self._choice
        return self._last(choice.text("reasoning"), choice.text(), choice.calls, choice.tokens)

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        (thinking, _), (content, _) = grown(events, "reasoning"), grown(events)
        tokens = [token for event in events for token in event.tokens]
        calls = [event.part for event in events if event.what == "closed" and event.part.kind == "call"]
        if not (thinking or content or calls or (tokens and self._body.logprobs)):
            return ""
        return _line({**self._answer(thinking, content, calls, tokens), "done": False})

    def _last(
        self, thinking: str, content: str, calls: Sequence[Part], tokens: Sequence[PlacedToken]
    ) -> dict[str, Any]:
        answer = self._answer(thinking, content, calls, tokens)
        return {**answer, **self._counts(), **interp_fields(self._call, 0)}

    def _answer(
        self, thinking: str, content: str, calls: Sequence[Part], tokens: Sequence[PlacedToken]
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": timestamp()}
        thought = {"thinking": thinking} if thinking else {}
        more: dict[str, Any] = {}
        if tokens and self._body.logprobs:
            more = {"logprobs": chat_logprobs(self._served.tokenizer, tokens)}
        if isinstance(self._body, OllamaGenerateBody):
            return {**head, "response": content, **thought, **more}
        message: dict[str, Any] = {"role": "assistant", "content": content, **thought}
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": arguments_object(call.text)}} for call in calls
            ]
        return {**head, "message": message, **more}

    def _counts(self) -> dict[str, Any]:
        reason, timings = self._choice.finish_reason, self._choice.answer.request.timings
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(monotonic() - self._started_s + self._load_s),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": self._call.n_prompt_tokens,
            "prompt_eval_duration": _ns(timings.prompt_s),
            "eval_count": self._call.n_generated,
            "eval_duration": _ns(timings.decode_s),
        }


def loaded_answer(body: GenerationBody, name: str, reason: str) -> Response:
    """The response to a body that asks for nothing but its model: `reason` is "load" or "unload"."""
    is_chat = isinstance(body, OllamaChatBody)
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    head = {"model": name, "created_at": timestamp()}
    return JSONResponse({**head, **empty, "done": True, "done_reason": reason})


async def embed(served: ServedModel, body: OllamaEmbedBody, http: Request) -> Response:
    """The response to texts to embed: a vector each, of length 1."""
    started_s, texts = monotonic(), body.input
    if isinstance(texts, str):
        texts = [texts] if texts else []  # as Ollama answers it: with no vector
    encode = served.llm.text_encoder.encode
    ids = (await asyncio.to_thread(encode, texts, truncate=body.truncate is not False)).ids
    vectors = await _vectors(served, body.model, ids, body.dimensions, http)
    load_s = http.scope.get("kukri.load_s", 0.0)
    return JSONResponse(
        {
            "model": served.check_model(body.model.removesuffix(":latest")),
            "embeddings": vectors,
            "total_duration": _ns(monotonic() - started_s + load_s),
            "load_duration": _ns(load_s),
            "prompt_eval_count": sum(map(len, ids)),
        }
    )


async def embed_one(served: ServedModel, body: OllamaEmbeddingsBody, http: Request) -> Response:
    """The response to the older form: the vector of one text."""
    ids = [await served.encode(body.prompt)] if body.prompt else []
    vectors = await _vectors(served, body.model, ids, None, http)
    return JSONResponse({"embedding": vectors[0] if vectors else []})


async def _vectors(
    served: ServedModel, model: str, ids: list[list[int]], dimensions: int | None, http: Request
) -> list[list[float]]:
    if not ids:
        return []
    empty = next((i for i, one in enumerate(ids) if not one), None)
    if empty is not None:
        raise RequestError(
            f"'input[{empty}]' must not be empty, because the model adds no tokens of its own", param="input"
        )
    given = EmbeddingBody(model=model, input="", dimensions=dimensions)  # the texts are `ids`
    vectors: list[list[float]] = (await vectors_of(served, given, ids, http)).tolist()
    return vectors


def timestamp() -> str:
    """The time now, as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
