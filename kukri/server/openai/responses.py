"""/v1/responses: the newer form of a chat."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from kukri.calls.choice import Part, PartEvent
from kukri.errors import KukriError, RequestError
from kukri.server.answers.logprobs import chat_logprobs
from kukri.server.answers.reply import AnswerWriter, Reply, compact, image_usage, interp_fields, sse
from kukri.server.answers.timings import timings_of, timings_of_progress
from kukri.server.chat.request import ChatRequest
from kukri.server.intervention_bodies import steering
from kukri.server.models.served_model import Chat, ServedModel
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
from kukri.server.schema import OtherPart, RefusalPart, content_of, only_grammar, piece_of
from kukri.tokenizer import newest_turn, note

_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_ID_KINDS = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
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
    http.scope["kukri.left_out"]["x-tools-left-out"] = tools.left_out
    store: ResponseStore = http.app.state.responses
    owner = await store.owner(http.scope["kukri.client"])
    items = items_of(body, store, owner)
    chat = await served.open(parse_response(body, items), http.scope)
    keep = None
    if body.store is not False:
        own = items[-len(_own_items(body)) :]
        keep = partial(_keep, store, owner, body.previous_response_id, own)
    writer = ResponseWriter(served, chat, body, model, tools, keep)
    tells_progress = bool(body.return_progress)
    return Reply(served, chat.call, writer, stream=bool(body.stream), tells_progress=tells_progress)


def items_of(body: ResponseBody, store: ResponseStore, owner: str) -> list[Item]:
    """The items of a conversation, with those of the owner's response that it continues. Raises
    RequestError.
    """
    earlier = _ITEMS.validate_python(store.items_before(owner, body.previous_response_id))
    found = earlier + _own_items(body)
    references = {item.id for item in found if isinstance(item, ItemReference)}
    known = store.items_by_id(owner, references) if references else {}
    for i, item in enumerate(found):
        if isinstance(item, ItemReference):
            stored = known.get(item.id)
            if stored is None:
                message = f"the item {item.id[:100]!r} was not found, or has expired: send the item itself"
                raise RequestError(message, param="input", code="item_not_found")
            found[i] = _ITEMS.validate_python([stored])[0]
    return found


def _own_items(body: ResponseBody) -> list[Item]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


async def _keep(
    store: ResponseStore, owner: str, previous: str | None, own: Sequence[Item], response: dict[str, Any]
) -> bool:
    """Keep a response that is finished, with its own input, and return whether the store could."""
    return await store.add(owner, previous, [_as_listed(item) for item in own], response)


def _as_listed(item: Item) -> dict[str, Any]:
    """An item of an input with all that an output's has: an id, a type, a status, content in parts."""
    given = item.model_dump(exclude_none=True)
    kind = given.setdefault("type", "message")
    given.setdefault("id", f"{_ID_KINDS.get(kind, 'item')}_{uuid4().hex}")
    if kind == "reasoning":
        return {"summary": [], **given}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        given["content"] = [{"type": "input_text", "text": item.content}]
    if isinstance(item, MessageItem) and item.role == "assistant":
        given["content"] = [
            {**part, "type": "output_text", "annotations": []} if "text" in part else part
            for part in given["content"]
        ]
    return {"status": "completed", **given}


def parse_response(body: ResponseBody, items: Sequence[Item] | None = None) -> ChatRequest:
    """The request of a body, whose conversation is `items` if they are given. Raises RequestError."""
    if body.wants_logprobs and body.tools and body.tool_choice != "none":
        raise RequestError.of("top_logprobs", "cannot be combined with tools", code="invalid_value")
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
            content = _content(item.content, f"{param}.content", is_new=i >= newest)
            yield {"role": item.role, "content": content}
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
                    f"the call {item.call_id[:100]!r} was not found: put it into 'input' before its "
                    "output, or give 'previous_response_id'",
                    param="input",
                )
            content = _content(item.output, f"{param}.output", is_new=False)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif isinstance(item, HostedItem):
            yield {"role": "assistant", "content": note(item.type, param, is_new=False)}


def _role(item: Item) -> str:
    if isinstance(item, MessageItem):
        return item.role
    return "tool" if isinstance(item, CallOutputItem) else "assistant"


def _content(content: str | list[InputText | RefusalPart | OtherPart], param: str, *, is_new: bool) -> Any:
    if isinstance(content, str):
        return content
    return content_of(
        [
            part.text if isinstance(part, InputText) else piece_of(part, f"{param}[{i}]", is_new)
            for i, part in enumerate(content)
        ]
    )


class ResponseWriter(AnswerWriter):
    """Writes a response, whole or as events: the parts of the answer are items of its output."""

    def __init__(
        self,
        served: ServedModel,
        chat: Chat,
        body: ResponseBody,
        model: str,
        tools: ResponseTools,
        keep: Callable[[dict[str, Any]], Awaitable[bool]] | None,
    ) -> None:
        """`keep` is called with the finished response, and returns whether it is stored."""
        super().__init__(chat.call, chat.choices, stream=bool(body.stream), progress=body.return_progress)
        self._served, self._body, self._model, self._tools, self._keep = served, body, model, tools, keep
        self._choice = chat.choices[0]
        self._id, self._created = uuid4().hex, int(time.time())
        self._n_events = 0
        self._delta_prefix = ""

    async def settle(self) -> None:
        """Makes the finished response, with an empty message if it has nothing else, and stores it."""
        self._added = self._choice.add_empty()
        self._ended = await asyncio.to_thread(self._response, self._status, self._choice.parts)
        if self._keep is not None:
            self._ended["store"] = await self._keep(self._ended)

    def end(self) -> bytes:
        """The last events."""
        events = self._news(0, self._added)
        last = self._event(f"response.{self._status}", response=self._whole(), **self._timings())
        return (events + last).encode()

    def fail(self, error: KukriError) -> bytes:
        """The event of a response that failed."""
        done = [part for part in self._choice.parts if part.is_closed]
        failed = {
            **self._response("failed", done),
            "error": {"code": "server_error", "message": str(error)},
        }
        return self._event("response.failed", response=failed).encode()

    def body(self) -> dict[str, Any]:
        """The response."""
        return {**self._whole(), **self._timings()}

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.answer.finish_reason == "length" else "completed"

    def _begin(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _progressed(self, news: dict[str, int]) -> str:
        timings = {"timings": timings_of_progress(news)} if self._body.timings_per_token else {}
        response = self._response("in_progress", [])
        return self._event("response.in_progress", response=response, prompt_progress=news, **timings)

    def _timings(self) -> dict[str, Any]:
        """The `timings` so far, if they are requested."""
        return {"timings": timings_of(self._choice.answer.request)} if self._body.timings_per_token else {}

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        return "".join([self._rendered(event) for event in events])

    def _rendered(self, event: PartEvent) -> str:
        part = event.part
        if event.what == "opened":
            return self._opened(part)
        if event.what == "closed":
            return self._closed(part)
        if part.kind == "text":
            entries = chat_logprobs(self._served.tokenizer, event.tokens) if event.tokens else ()
            return self._delta(event.text, f',"logprobs":{json.dumps(entries) if entries else "[]"}')
        if part.kind == "call" and self._tool(part).is_custom:  # whose text is known when it is whole
            return ""
        return self._delta(event.text)

    def _opened(self, part: Part) -> str:
        kind, place = self._kind(part), self._place(part)
        fields = compact({"type": _DELTAS[kind], **place})
        self._delta_prefix = f'event: {_DELTAS[kind]}\ndata: {fields[:-1]},"delta":'
        shown = self._event("response.output_item.added", output_index=part.index, item=self._item(part))
        if part.kind == "call":
            return shown
        return shown + self._event("response.content_part.added", **place, part=self._content(part))

    def _closed(self, part: Part) -> str:
        place, tool = self._place(part), self._tool(part)
        if part.kind != "call":
            content = self._content(part)
            fields = {key: content[key] for key in ("text", "logprobs") if key in content}
            done = self._event(f"response.{content['type']}.done", **place, **fields)
            done += self._event("response.content_part.done", **place, part=content)
        elif tool.is_custom:
            text = custom_input(part.text)
            done = self._delta(text) if text else ""
            done += self._event("response.custom_tool_call_input.done", **place, input=text)
        else:
            given = {**place, "name": tool.name, "arguments": part.text}
            done = self._event("response.function_call_arguments.done", **given)
        return done + self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def _delta(self, text: str, more: str = "") -> str:
        if self._body.timings_per_token:
            more += f",{json.dumps(self._timings())[1:-1]}"
        event = f'{self._delta_prefix}{quote(text)},"sequence_number":{self._n_events}{more}}}\n\n'
        self._n_events += 1
        return event

    def _tool(self, part: Part) -> ClientTool:
        return self._tools.tools.get(part.name) or ClientTool(part.name)

    def _kind(self, part: Part) -> str:
        """The type of a part's item."""
        if part.kind == "call":
            return "custom_tool_call" if self._tool(part).is_custom else "function_call"
        return "message" if part.kind == "text" else "reasoning"

    def _item_id(self, part: Part) -> str:
        return f"{_ID_KINDS[self._kind(part)]}_{self._id}{part.index:04x}"

    def _place(self, part: Part) -> dict[str, Any]:
        """The fields that place the events of a part."""
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _item(self, part: Part) -> dict[str, Any]:
        """A part as the output has it."""
        item: dict[str, Any] = {"id": self._item_id(part), "type": self._kind(part)}
        is_last = part is self._choice.parts[-1]
        if item["type"] != "custom_tool_call":  # which has no status
            item["status"] = "in_progress" if not part.is_closed else self._status if is_last else "completed"
        if part.kind == "call":
            return {**item, "call_id": part.call_id, **self._tool(part).shown(part.text)}
        content = [self._content(part)] if part.is_closed else []
        if part.kind == "text":
            return {**item, "role": "assistant", "content": content}
        return {**item, "summary": [], "content": content}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        logprobs = chat_logprobs(self._served.tokenizer, part.tokens)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._n_events += 1
        return sse({"type": kind, "sequence_number": self._n_events - 1, **fields}, kind)

    def _whole(self) -> dict[str, Any]:
        return {**self._ended, **interp_fields(self._call, 0)}

    def _response(self, status: str, parts: Sequence[Part]) -> dict[str, Any]:
        body, params = self._body, self._call.answers[0].request.params
        is_over = status in ("completed", "incomplete")
        choice = body.tool_choice
        return {
            "id": f"resp_{self._id}",
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
            "output": [self._item(part) for part in parts],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": self._keep is not None,
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
            "input_tokens_details": {
                "cached_tokens": call.n_cached_tokens,
                "cache_write_tokens": 0,
                **image_usage(call),
            },
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
