"""/v1/responses: the newer form of a chat, without anything that would have to be stored."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import KukriError
from kukri.sampling import SampledToken
from kukri.server.bridge import Call
from kukri.server.chat import Choice
from kukri.server.logprobs import chat_logprobs
from kukri.server.reply import Reply
from kukri.server.schema import InputItem, ResponseBody
from kukri.server.service import Service
from kukri.server.structure import grammar_of


async def respond(service: Service, body: ResponseBody, http: Request) -> Response:
    """The response to a response request."""
    model = service.check_model(body.model)
    wants_logprobs = body.top_logprobs is not None or bool(body.include)
    prompt = await service.encode_chat(
        _messages(body), body.chat_template_kwargs, effort=body.reasoning.effort if body.reasoning else None
    )
    grammar = grammar_of(body)
    params = service.params(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        grammar=None if grammar is None else service.after_thoughts(grammar, prompt),
    )
    call = await service.open_call(http, [prompt], params, body, where="input", continues=True)
    inside = service.ends_in_thoughts(prompt)
    writer = ResponseWriter(service, call, body, model, inside=inside, with_logprobs=wants_logprobs)
    return Reply(service, call, writer, stream=bool(body.stream))


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """The conversation that a body describes, as chat templates take it."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    return messages + [{"role": item.role, "content": _content(item)} for item in body.input]


def _content(item: InputItem) -> str:
    return item.content if isinstance(item.content, str) else "\n".join(part.text for part in item.content)


class ResponseWriter:
    """Writes a response, whole or as events: thoughts are one item of its output, the message another."""

    def __init__(
        self,
        service: Service,
        call: Call,
        body: ResponseBody,
        model: str,
        *,
        inside: bool,
        with_logprobs: bool,
    ) -> None:
        self._service, self._call, self._body, self._model = service, call, body, model
        self._choice = Choice(call.answers[0], inside=inside)
        self._with_logprobs = with_logprobs
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._thoughts = self._text = ""
        self._tokens: list[SampledToken] = []
        self._n_events = 0
        self._output: list[dict[str, Any]] = []  # the items that are done
        self._open: dict[str, Any] | None = None  # the item that grows
        self._delta_prefix = ""

    def advance(self) -> bytes:
        """Takes what came; its events, if it is a stream."""
        thoughts, text = self._choice.advance()
        tokens, self._choice.tokens = self._choice.tokens, []
        self._thoughts += thoughts
        self._text += text
        self._tokens += tokens
        if not self._body.stream:
            return b""
        events = "" if self._n_events else self._begin()
        if thoughts:
            events += self._grow("reasoning", quote(thoughts), "[]")
        if text or tokens:
            logprobs = json.dumps(chat_logprobs(self._service.tokenizer, tokens)) if tokens else "[]"
            events += self._grow("message", quote(text), logprobs)
        return events.encode()

    def end(self) -> bytes:
        """The end of the last item and the finished response."""
        events = self._grow("message", "", "") if self._open is None else ""
        events += self._close_item()
        response = self._response(self._status, self._output)
        return (events + self._event(f"response.{self._status}", response=response)).encode()

    def fail(self, error: KukriError) -> bytes:
        """The event of a response that failed."""
        failed = {
            **self._response("failed", self._output),
            "error": {"code": "server_error", "message": str(error)},
        }
        return self._event("response.failed", response=failed).encode()

    def body(self) -> dict[str, Any]:
        """The response."""
        output = [self._item("reasoning", "completed")] if self._thoughts else []
        if self._text or not output:
            output.append(self._item("message", self._status))
        return self._response(self._status, output)

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.answer.finish_reason == "length" else "completed"

    def _begin(self) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _grow(self, kind: str, delta: str, logprobs: str) -> str:
        """The events that add a quoted delta to the item of a kind, which begins where it has to."""
        events = ""
        if self._open is None or self._open["type"] != kind:
            if self._open is not None:
                events += self._close_item()
            events += self._open_item(kind)
        if not delta:
            return events
        tail = f',"logprobs":{logprobs}}}\n\n' if kind == "message" else "}\n\n"
        events += f'{self._delta_prefix}{delta},"sequence_number":{self._n_events}{tail}'
        self._n_events += 1
        return events

    def _open_item(self, kind: str) -> str:
        item = self._open = self._item(kind, "in_progress", is_empty=True)
        place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        fields = json.dumps({"type": name, **place}, separators=(",", ":"))
        self._delta_prefix = f'event: {name}\ndata: {fields[:-1]},"delta":'
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        part = _part(kind, "", [])
        return added + self._event("response.content_part.added", **place, part=part)

    def _close_item(self) -> str:
        """The events that end the item that grows."""
        assert self._open is not None
        kind, item_id = self._open["type"], self._open["id"]
        status = self._status if self._choice.answer.finish_reason else "completed"
        item = {**self._item(kind, status), "id": item_id}
        place = {"item_id": item_id, "output_index": len(self._output), "content_index": 0}
        part = item["content"][0]
        if kind == "message":
            done = self._event(
                "response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]
            )
        else:
            done = self._event("response.reasoning_text.done", **place, text=part["text"])
        done += self._event("response.content_part.done", **place, part=part)
        done += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return done

    def _item(self, kind: str, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else self._text if kind == "message" else self._thoughts
        logprobs = (
            chat_logprobs(self._service.tokenizer, self._tokens)
            if kind == "message" and self._with_logprobs and not is_empty
            else []
        )
        content = [] if is_empty else [_part(kind, text, logprobs)]
        if kind == "message":
            return {
                "id": f"msg_{uuid4().hex}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        return {
            "id": f"rs_{uuid4().hex}",
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }

    def _event(self, name: str, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._call.answers[0].request.params
        is_over = status in ("completed", "incomplete")
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
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
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
            "output_tokens_details": {"reasoning_tokens": self._choice.n_thought},
            "total_tokens": call.n_prompt_tokens + call.n_generated,
        }


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}
