"""/v1/responses: the newer form of a chat."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from kukri.dialects.calls import CallDelta
from kukri.errors import KukriError, RequestError
from kukri.sampling import SampledToken
from kukri.server.chat.request import ChatRequest, only_grammar
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.openai.logprobs import chat_logprobs
from kukri.server.openai.response_store import ResponseStore
from kukri.server.openai.response_tools import (
    ClientTool,
    ResponseTools,
    custom_arguments,
    custom_input,
    model_name,
)
from kukri.server.openai.responses_schema import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    FunctionTool,
    HostedItem,
    HostedTool,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponseBody,
    ResponseTool,
)
from kukri.server.reply import Reply, interp_fields
from kukri.server.schema import OtherPart, RefusalPart, steering
from kukri.tokenizer import newest_turn, note

_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_ID_KINDS = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")
_DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


async def respond(served: ServedModel, body: ResponseBody, http: Request) -> Response:
    """The response to a response request."""
    model = served.check_model(body.model)
    tools = ResponseTools.of(body)
    http.scope["kukri.left_out"] = tools.left_out
    chat = await served.open(parse_response(body, items_of(body, http)), http.scope)
    store: ResponseStore = http.app.state.responses
    keep = partial(_keep, store, http.scope["kukri.client"].owner, body) if body.store is not False else None
    writer = ResponseWriter(served, chat, body, model, tools, keep)
    return Reply(served, chat.call, writer, stream=bool(body.stream))


def items_of(body: ResponseBody, http: Request) -> list[Item]:
    """The items of a conversation, with those of the response that it continues. Raises RequestError."""
    store, owner = http.app.state.responses, http.scope["kukri.client"].owner
    earlier = _ITEMS.validate_python(store.items_before(owner, body.previous_response_id))
    found = earlier + _own_items(body)
    references = {item.id for item in found if isinstance(item, ItemReference)}
    known = store.items_by_id(owner, references) if references else {}
    for i, item in enumerate(found):
        if isinstance(item, ItemReference):
            stored = known.get(item.id)
            if stored is None:
                message = f"there is no item {item.id[:100]!r} here any more: send the item itself"
                raise RequestError(message, param="input", code="item_not_found")
            found[i] = _ITEMS.validate_python([stored])[0]
    return found


def _own_items(body: ResponseBody) -> list[Item]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def _keep(store: ResponseStore, owner: str, body: ResponseBody, response: dict[str, Any]) -> None:
    """Keeps a response that is finished."""
    given = [item.model_dump(exclude_none=True) for item in _own_items(body)]
    store.add(owner, body.previous_response_id, given, response)


def parse_response(body: ResponseBody, items: Sequence[Item] | None = None) -> ChatRequest:
    """The request of a body, whose conversation is `items` if they are given. Raises RequestError."""
    if body.wants_logprobs and body.tools and body.tool_choice != "none":
        raise RequestError(
            "log-probabilities and tools cannot be combined", param="top_logprobs", code="invalid_value"
        )
    tools = ResponseTools.of(body)
    choice, tool_name = tools.chosen(body)
    format = body.text.format.as_grammar() if body.text and body.text.format else None
    return ChatRequest(
        messages=_messages(body, _own_items(body) if items is None else items),
        model=body.model,
        sampling=body.sampling(
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        ),
        functions=tools.functions,
        tool_choice=choice,
        tool_name=tool_name,
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


def _messages(body: ResponseBody, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation of a body: reasoning, text and calls that follow each other are one turn."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for message in _pieces(items, len(items) - len(_own_items(body))):
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


def _pieces(items: Sequence[Item], n_before: int) -> Iterator[dict[str, Any]]:
    """The messages that the items add; `n_before` of them are not among those of the request.

    Raises RequestError on the result of an unknown call, and on a new part that cannot be read.
    """
    call_ids = set()
    newest = newest_turn([_role(item) for item in items])
    for i, item in enumerate(items):
        param = f"input[{i - n_before}]"
        if isinstance(item, MessageItem):
            yield {"role": item.role, "content": _text(item.content, f"{param}.content", is_new=i >= newest)}
        elif isinstance(item, ReasoningItem):
            reasoning = "\n".join(part.text for part in item.content or item.summary or ())
            yield {"role": "assistant", "reasoning_content": reasoning}
        elif isinstance(item, CallItem | CustomCallItem):
            call_ids.add(item.call_id)
            arguments = item.arguments if isinstance(item, CallItem) else custom_arguments(item.input)
            function = {"name": model_name(item.name, item.namespace), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            yield {"role": "assistant", "tool_calls": [call]}
        elif isinstance(item, CallOutputItem):
            if item.call_id not in call_ids:
                raise RequestError(
                    f"there is no call before the output of {item.call_id[:100]!r}: input has to hold the "
                    "calls too, or previous_response_id to name the response with them",
                    param="input",
                )
            content = _text(item.output, param, is_new=False)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif isinstance(item, HostedItem):
            yield {"role": "assistant", "content": note(item.type, param, is_new=False)}


def _role(item: Item) -> str:
    if isinstance(item, MessageItem):
        return item.role
    return "tool" if isinstance(item, CallOutputItem) else "assistant"


def _text(content: str | list[InputText | RefusalPart | OtherPart], param: str, *, is_new: bool) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, OtherPart):
            texts.append(note(part.type, f"{param}[{i}]", is_new=is_new))
        else:
            texts.append(part.refusal if isinstance(part, RefusalPart) else part.text)
    return "\n".join(texts)


@dataclass
class _OutputItem:
    """An item of the output as it grows; `text` is the text, or the arguments of a call."""

    kind: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    id: str
    tool: ClientTool = field(default_factory=lambda: ClientTool(""))
    call_id: str = ""
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)  # with log-probabilities
    status: str = "in_progress"


class ResponseWriter:
    """Writes a response, whole or as events: reasoning, texts and calls are items of its output."""

    def __init__(
        self,
        served: ServedModel,
        chat: Chat,
        body: ResponseBody,
        model: str,
        tools: ResponseTools,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """`keep` is called with the finished response."""
        self._served, self._body, self._model, self._tools, self._keep = served, body, model, tools, keep
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
            tool = self._tools.tools.get(delta.name) or ClientTool(delta.name)
            kind: Literal["function_call", "custom_tool_call"]
            kind = "custom_tool_call" if tool.is_custom else "function_call"
            events = self._open(_OutputItem(kind, self._new_id(kind), tool, call_id))
        if not delta.arguments:
            return events
        self._items[-1].text += delta.arguments
        if self._items[-1].kind == "custom_tool_call":  # whose text is known when it is whole
            return events
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
        if item.kind not in _CALLS:
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
                "response.function_call_arguments.done", **place, name=item.tool.name, arguments=item.text
            )
        elif item.kind == "custom_tool_call":
            text = custom_input(item.text)
            done = self._delta(text, "") if text else ""
            done += self._event("response.custom_tool_call_input.done", **place, input=text)
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
        return place if item.kind in _CALLS else {**place, "content_index": 0}

    def _shown(self, item: _OutputItem) -> dict[str, Any]:
        """An item as the output has it."""
        if item.kind == "custom_tool_call":  # which has no status
            return {"id": item.id, "type": item.kind, "call_id": item.call_id, **item.tool.shown(item.text)}
        shown: dict[str, Any] = {"id": item.id, "type": item.kind, "status": item.status}
        if item.kind == "function_call":
            return {**shown, "call_id": item.call_id, **item.tool.shown(item.text)}
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
        response = self._response(self._status, self._items)
        if self._keep is not None:
            self._keep(response)
        return {**response, **interp_fields(self._call, 0)}

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
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else _given(choice) if choice else "auto",
            "tools": [_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
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


def _tool(tool: ResponseTool) -> dict[str, Any]:
    """A tool as a response repeats it: unless it says so, its schema is not enforced."""
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(), "strict": bool(tool.strict)}
    return _given(tool)


def _given(body: BaseModel) -> dict[str, Any]:
    """The fields that a client sent."""
    return body.model_dump(exclude_none=True)
