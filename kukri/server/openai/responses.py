"""/v1/responses: the newer form of a chat, without anything that would have to be stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Literal
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import KukriError, RequestError
from kukri.sampling import SampledToken
from kukri.server.chat.dialects.calls import CallDelta
from kukri.server.chat.request import ChatRequest, only_grammar
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.openai.logprobs import chat_logprobs
from kukri.server.openai.responses_schema import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputText,
    Item,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponseBody,
)
from kukri.server.reply import Reply, interp_fields
from kukri.server.schema import steering

_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_ID_KINDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


async def respond(served: ServedModel, body: ResponseBody, http: Request) -> Response:
    """The response to a response request."""
    model = served.check_model(body.model)
    chat = await served.open(parse_response(body), http.scope)
    writer = ResponseWriter(served, chat, body, model)
    return Reply(served, chat.call, writer, stream=bool(body.stream))


def parse_response(body: ResponseBody) -> ChatRequest:
    """The request of a body. Raises RequestError."""
    if body.wants_logprobs and body.tools and body.tool_choice != "none":
        raise RequestError(
            "log-probabilities and tools cannot be combined", param="top_logprobs", code="invalid_value"
        )
    choice = body.tool_choice or "auto"
    format = body.text.format.as_grammar() if body.text and body.text.format else None
    return ChatRequest(
        messages=_messages(body),
        model=body.model,
        sampling=body.sampling(
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        ),
        functions=[tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools or ()],
        tool_choice="required" if isinstance(choice, NamedFunction) else choice,
        tool_name=choice.name if isinstance(choice, NamedFunction) else None,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=only_grammar([body.form, format]),
        effort=body.reasoning.effort if body.reasoning else None,
        thinking_budget=body.thinking_token_budget,
        template_variables=body.chat_template_kwargs or {},
        interventions=steering(body.interventions),
        user=body.user or "",
        priority=body.priority,
        names=_NAMES,
    )


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """The conversation of a body: reasoning, text and calls that follow each other are one turn."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for message in _pieces(body.input):
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        if not last["role"] == message["role"] == "assistant" or _is_later(last, message):
            messages.append(message)
        elif "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            last |= message
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _is_later(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """True if a piece of the assistant's belongs to another turn than the last one."""
    if "reasoning_content" in message:
        return True
    return "content" in message and "content" in last


def _pieces(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """The messages that the items add. Raises RequestError on the result of an unknown call."""
    call_ids = set()
    for item in items:
        if isinstance(item, MessageItem):
            yield {"role": item.role, "content": _text(item.content)}
        elif isinstance(item, ReasoningItem):
            reasoning = "\n".join(part.text for part in item.content or ())
            yield {"role": "assistant", "reasoning_content": reasoning}
        elif isinstance(item, CallItem):
            call_ids.add(item.call_id)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            yield {"role": "assistant", "tool_calls": [call]}
        else:
            assert isinstance(item, CallOutputItem), "there are no other items"
            if item.call_id not in call_ids:
                raise RequestError(
                    f"there is no function_call before the output of {item.call_id[:100]!r}: nothing is "
                    "stored on this server, so that input has to hold the calls too",
                    param="input",
                )
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


@dataclass
class _OutputItem:
    """An item of the output as it grows; `text` is the text, or the arguments of a call."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)  # with log-probabilities
    status: str = "in_progress"


class ResponseWriter:
    """Writes a response, whole or as events: reasoning, texts and calls are items of its output."""

    def __init__(self, served: ServedModel, chat: Chat, body: ResponseBody, model: str) -> None:
        self._served, self._body, self._model = served, body, model
        self._call, self._choice = chat.call, chat.choices[0]
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._items: list[_OutputItem] = []  # the last one grows
        self._n_events = 0
        self._delta_prefix = ""

    def advance(self) -> bytes:
        """Handles new output; returns its events if it is a stream."""
        reasoning, pieces = self._choice.pieces()
        tokens, self._choice.tokens = self._choice.tokens, []
        events = "" if self._n_events else self._begin()
        if reasoning:
            events += self._grow("reasoning", reasoning)
        for piece in pieces:
            if isinstance(piece, CallDelta):
                events += self._grow_call(piece)
            elif piece or tokens:
                events += self._grow("message", piece, tokens)
                tokens = []
        return events.encode() if self._body.stream else b""

    def end(self) -> bytes:
        """The end of the last item and the finished response."""
        events = self._finish()
        return (events + self._event(f"response.{self._status}", response=self._whole())).encode()

    def fail(self, error: KukriError) -> bytes:
        """The event of a response that failed."""
        done = [item for item in self._items if item.status != "in_progress"]
        failed = {
            **self._response("failed", done),
            "error": {"code": "server_error", "message": str(error)},
        }
        return self._event("response.failed", response=failed).encode()

    def body(self) -> dict[str, Any]:
        """The response."""
        self._finish()
        return self._whole()

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.answer.finish_reason == "length" else "completed"

    def _begin(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _finish(self) -> str:
        """The events that end the last item; a response without any has an empty message."""
        events = "" if self._items else self._grow("message", "")
        return events + self._close(self._status)

    def _grow(
        self, kind: Literal["reasoning", "message"], text: str, tokens: Sequence[SampledToken] = ()
    ) -> str:
        """Events that append text to an output item, opening one if needed."""
        events = ""
        if not self._items or self._items[-1].kind != kind:
            events = self._open(_OutputItem(kind, self._new_id(kind)))
        if not (text or tokens):
            return events
        item = self._items[-1]
        item.text += text
        item.tokens += tokens
        logprobs = "" if kind == "reasoning" else f',"logprobs":{self._logprobs(tokens)}'
        return events + self._delta(text, logprobs)

    def _grow_call(self, delta: CallDelta) -> str:
        """The events of a piece of a call."""
        events = ""
        if delta.name is not None:
            call_id = self._choice.new_call_id()
            item = _OutputItem("function_call", self._new_id("function_call"), delta.name, call_id)
            events = self._open(item)
        if not delta.arguments:
            return events
        self._items[-1].text += delta.arguments
        return events + self._delta(delta.arguments, "")

    def _delta(self, text: str, more: str) -> str:
        event = f'{self._delta_prefix}{quote(text)},"sequence_number":{self._n_events}{more}}}\n\n'
        self._n_events += 1
        return event

    def _open(self, item: _OutputItem) -> str:
        """The events that end the last item and begin this one."""
        events = self._close("completed")
        self._items.append(item)
        place = self._place(item)
        fields = json.dumps({"type": _DELTAS[item.kind], **place}, separators=(",", ":"))
        self._delta_prefix = f'event: {_DELTAS[item.kind]}\ndata: {fields[:-1]},"delta":'
        events += self._event(
            "response.output_item.added", output_index=place["output_index"], item=self._shown(item)
        )
        if item.kind != "function_call":
            events += self._event("response.content_part.added", **place, part=self._part(item))
        return events

    def _close(self, status: str) -> str:
        """The events that end the last item, if there is one."""
        if not self._items:
            return ""
        item = self._items[-1]
        item.status = status
        place = self._place(item)
        if item.kind == "function_call":
            done = self._event(
                "response.function_call_arguments.done", **place, name=item.name, arguments=item.text
            )
        else:
            part = self._part(item)
            name = "output_text" if item.kind == "message" else "reasoning_text"
            fields = {key: part[key] for key in ("text", "logprobs") if key in part}
            done = self._event(f"response.{name}.done", **place, **fields)
            done += self._event("response.content_part.done", **place, part=part)
        return done + self._event(
            "response.output_item.done", output_index=place["output_index"], item=self._shown(item)
        )

    def _place(self, item: _OutputItem) -> dict[str, Any]:
        """The fields that place the events of the last item."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else {**place, "content_index": 0}

    def _shown(self, item: _OutputItem) -> dict[str, Any]:
        """An item as the output has it."""
        shown: dict[str, Any] = {"id": item.id, "type": item.kind, "status": item.status}
        if item.kind == "function_call":
            return {**shown, "call_id": item.call_id, "name": item.name, "arguments": item.text}
        content = [] if item.status == "in_progress" else [self._part(item)]
        if item.kind == "message":
            return {**shown, "role": "assistant", "content": content}
        return {**shown, "summary": [], "content": content}

    def _part(self, item: _OutputItem) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        logprobs = chat_logprobs(self._served.tokenizer, item.tokens)
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> str:
        return json.dumps(chat_logprobs(self._served.tokenizer, tokens)) if tokens else "[]"

    def _new_id(self, kind: str) -> str:
        return f"{_ID_KINDS[kind]}_{uuid4().hex}"

    def _event(self, kind: str, /, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"

    def _whole(self) -> dict[str, Any]:
        return {**self._response(self._status, self._items), **interp_fields(self._call, 0)}

    def _response(self, status: str, items: Sequence[_OutputItem]) -> dict[str, Any]:
        body, params = self._body, self._call.answers[0].request.params
        is_over = status in ("completed", "incomplete")
        choice = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._shown(item) for item in items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
        }

    def _format(self) -> dict[str, Any]:
        text = self._body.text
        if text is None or text.format is None:
            return {"type": "text"}
        return text.format.model_dump(exclude_none=True, by_alias=True)

    def _usage(self) -> Mapping[str, Any]:
        call = self._call
        return {
            "input_tokens": call.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.n_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": call.n_generated,
            "output_tokens_details": {"reasoning_tokens": self._choice.n_reasoning},
            "total_tokens": call.n_prompt_tokens + call.n_generated,
        }


def _tool(tool: FunctionTool) -> dict[str, Any]:
    """A tool as a response repeats it: unless it says so, its schema is not enforced."""
    return {**tool.model_dump(), "strict": bool(tool.strict)}
