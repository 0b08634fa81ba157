"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kukri.calls.choice import Choice, PartEvent, PlacedToken
from kukri.server.answers.logprobs import chat_logprobs
from kukri.server.answers.reply import ChunkWriter, Reply, interp_fields, usage
from kukri.server.chat.request import ChatRequest
from kukri.server.intervention_bodies import steering
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.schema import ChatBody, NamedTool, conversation, only_grammar

_NAMES = {"prompt": "messages"}


async def complete_chat(served: ServedModel, body: ChatBody, http: Request) -> Response:
    """The response to a chat completion."""
    model = served.check_model(body.model)
    chat = await served.open(parse_chat(body), http.scope)
    writer = ChatWriter(served, chat, body, model)
    if body.verbose:
        ids = chat.call.answers[0].request.prompt.tolist()
        writer.prompt_text = await asyncio.to_thread(served.tokenizer.decode, ids)
    return Reply(
        served,
        chat.call,
        writer,
        stream=bool(body.stream),
        tells_progress=bool(body.return_progress),
    )


def parse_chat(body: ChatBody) -> ChatRequest:
    """The request of a body. Raises RequestError."""
    choice = body.tool_choice or "auto"
    format = body.response_format.as_grammar() if body.response_format is not None else None
    return ChatRequest(
        messages=conversation(body.messages),
        model=body.model,
        adapter=body.adapter,
        sampling=body.sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            prediction=body.prediction.text if body.prediction else None,
        ),
        functions=[tool.function.model_dump(exclude_none=True) for tool in body.tools or ()],
        tool_choice="required" if isinstance(choice, NamedTool) else choice,
        tool_name=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=only_grammar([body.form, format]),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        effort=body.effort,
        thinking_budget=body.thinking_budget,
        max_context=body.num_ctx,
        template_variables=body.template_variables,
        interventions=steering(body.interventions),
        user=body.user or "",
        priority=body.priority,
        shows_control=body.skip_special_tokens is False,
        names=_NAMES | ({"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {}),
    )


class ChatWriter(ChunkWriter):
    """Writes chat completions, whole or as chunks."""

    def __init__(self, served: ServedModel, chat: Chat, body: ChatBody, model: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(served, chat, body, model, kind=kind, id_kind="chatcmpl")
        self._body = body
        self._around: dict[int, tuple[str, str]] = {}  # before and after the text in the chunks of a choice

    def body(self) -> dict[str, Any]:
        """The completion."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        facts = {"usage": self._usage(), **self._timings(), **self._prompt_fields(), **self._verbose(0)}
        body = {**self._head, "choices": choices, **facts}
        return body if self._body.metadata is None else {**body, "metadata": self._body.metadata}

    def _whole(self, i: int, choice: Choice) -> dict[str, Any]:
        reasoning, content = choice.text("reasoning"), choice.text()
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in choice.calls
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if reasoning or calls else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        ids = {"token_ids": self._new_token_ids(i)} if self._body.return_token_ids else {}
        return {
            "index": i,
            "message": message,
            "logprobs": self._logprobs(choice.tokens) if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            **ids,
            **interp_fields(self._call, i),
        }

    def _prompt_fields(self) -> dict[str, Any]:
        """The fields that vLLM has of the prompt, if they are requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            request = self._call.answers[0].request
            fields["prompt_token_ids"] = request.prompt.tolist()
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_scores(0, self._body.prompt_logprobs)
        return fields

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        finish_reason = self._choices[i].finish_reason
        found = interp_fields(self._call, i)
        ids = self._new_token_ids(i) if self._body.return_token_ids else []
        has_more = found or ids or finish_reason
        if not (events or has_more):
            return ""
        if i in self._around and not has_more and len(events) == 1 and _is_plain(events[0]):
            before, after = self._around[i]
            return f"{before}{quote(events[0].text)}{after}"
        chunks = "" if self._is_begun[i] else self._first_chunk(i)
        ids_field = f',"token_ids":{json.dumps(ids)}' if ids else ""
        for event in events:
            delta = self._delta(event)
            if delta:
                logprobs = json.dumps(self._logprobs(event.tokens)) if event.tokens else "null"
                chunks += self._chunk(i, delta, logprobs, more=ids_field)
                ids_field = ""
        if ids_field:
            chunks += self._chunk(i, '{"content":""}', more=ids_field)
        if finish_reason is not None or found:
            more = f",{json.dumps(found)[1:-1]}" if found else ""
            reason = "null" if finish_reason is None else f'"{finish_reason}"'
            verbose = self._verbose(i) if finish_reason is not None else {}
            facts = f",{json.dumps(verbose)[1:-1]}" if verbose else ""
            chunks += self._chunk(i, "{}", finish_reason=reason, more=more, facts=facts)
        return chunks

    def _first_chunk(self, i: int) -> str:
        self._is_begun[i] = True
        if not (self._counts_each or self._has_timings):  # which differ from chunk to chunk
            key = '{"content":'
            before, after = self._chunk(i, key + "}").split(key)
            self._around[i] = before + key, after
        fields = self._prompt_fields()
        more = f",{json.dumps(fields)[1:-1]}" if fields else ""
        delta = '{"role":"assistant","content":"","refusal":null}'
        return self._event(f'{{"index":{i},"delta":{delta},"logprobs":null,"finish_reason":null}}', more)

    def _chunk(
        self,
        i: int,
        delta: str,
        logprobs: str = "null",
        finish_reason: str = "null",
        more: str = "",
        facts: str = "",
    ) -> str:
        choice = f'"index":{i},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish_reason}{more}'
        return self._event(f"{{{choice}}}", facts)

    def _delta(self, event: PartEvent) -> str:
        """The delta of an event; "" for one without."""
        part = event.part
        if part.kind != "call":
            key = "content" if part.kind == "text" else "reasoning_content"
            return f'{{"{key}":{quote(event.text)}}}' if event.what == "grown" else ""
        if event.what == "closed":
            return ""
        fields: dict[str, Any] = {"index": part.place}
        if event.what == "opened":
            fields |= {"id": part.call_id, "type": "function"}
        function = (
            {"arguments": event.text} if event.what == "grown" else {"name": part.name, "arguments": ""}
        )
        return f'{{"tool_calls":[{json.dumps({**fields, "function": function})}]}}'

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return {"content": chat_logprobs(self._served.tokenizer, tokens, as_ids=as_ids), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return usage(self._call, sum(choice.n_reasoning for choice in self._choices))


def _is_plain(event: PartEvent) -> bool:
    """True if only text has come."""
    return event.what == "grown" and event.part.kind == "text" and not event.tokens
