"""/v1/chat/completions."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kukri.dialects.calls import CallDelta
from kukri.server.chat.choice import Choice
from kukri.server.chat.request import ChatRequest, only_grammar
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.openai.logprobs import chat_logprobs
from kukri.server.reply import ChunkWriter, Reply, interp_fields, usage
from kukri.server.schema import ChatBody, NamedTool, conversation, steering

_NAMES = {"prompt": "messages"}


async def complete_chat(served: ServedModel, body: ChatBody, http: Request) -> Response:
    """The response to a chat completion."""
    model = served.check_model(body.model)
    chat = await served.open(parse_chat(body), http.scope)
    writer = ChatWriter(served, chat, body, model)
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
        super().__init__(served, chat.call, body, model, kind=kind, id_kind="chatcmpl")
        self._body, self._choices = body, chat.choices
        self._calls: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        self._reasoning = [""] * len(self._choices)
        self._contents = [""] * len(self._choices)
        self._has_role = [False] * len(self._choices)
        self._around: dict[int, tuple[str, str]] = {}  # before and after the text in the chunks of a choice

    def advance(self) -> bytes:
        """Handles an update; returns its chunks if the answer is a stream."""
        events = "" if self._progress is None else self._reading(self._progress)
        for i, choice in enumerate(self._choices):
            if self._is_ended[i]:
                continue
            reasoning, content = choice.advance()
            if self._body.stream:
                events += self._chunks(i, choice, reasoning, content)
            else:
                self._reasoning[i] += reasoning
                self._contents[i] += content
                self._add_calls(i, choice)
        return events.encode()

    def body(self) -> dict[str, Any]:
        """The completion."""
        choices = []
        for i, choice in enumerate(self._choices):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._contents[i] or (None if self._reasoning[i] or self._calls[i] else ""),
                "refusal": None,
            }
            if self._reasoning[i]:
                message["reasoning_content"] = self._reasoning[i]
            if self._calls[i]:
                message["tool_calls"] = self._calls[i]
            ids = {"token_ids": self._new_token_ids(i)} if self._body.return_token_ids else {}
            choices.append(
                {
                    "index": i,
                    "message": message,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": choice.finish_reason,
                    **ids,
                    **interp_fields(self._call, i),
                }
            )
        facts = {"usage": self._usage(), **self._timings(), **self._prompt_fields()}
        body = {**self._head, "choices": choices, **facts}
        return body if self._body.metadata is None else {**body, "metadata": self._body.metadata}

    def _prompt_fields(self) -> dict[str, Any]:
        """The fields that vLLM has of the prompt, if they are requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            request = self._call.answers[0].request
            fields["prompt_token_ids"] = request.tokens[: request.n_prompt].tolist()
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_scores(0, self._body.prompt_logprobs)
        return fields

    def _chunks(self, i: int, choice: Choice, reasoning: str, content: str) -> str:
        finish_reason = choice.finish_reason
        found = interp_fields(self._call, i)
        ids = self._new_token_ids(i) if self._body.return_token_ids else []
        has_more = found or reasoning or choice.tokens or choice.calls or finish_reason or ids
        if not (content or has_more):
            return ""
        around = self._around.get(i)
        if around is not None and not has_more:
            return f"{around[0]}{quote(content)}{around[1]}"
        events = ""
        if not self._has_role[i]:
            self._has_role[i] = True
            events += self._first_chunk(i)
            if not (self._counts_each or self._has_timings):  # which differ from chunk to chunk
                key = '{"content":'
                before, after = self._chunk(i, key + "}").split(key)
                self._around[i] = before + key, after
        ids_field = f',"token_ids":{json.dumps(ids)}' if ids else ""
        if reasoning:
            events += self._chunk(i, f'{{"reasoning_content":{quote(reasoning)}}}', more=ids_field)
            ids_field = ""
        if content or choice.tokens or ids_field:
            logprobs = json.dumps(self._logprobs(choice)) if choice.tokens else "null"
            choice.tokens = []
            events += self._chunk(i, f'{{"content":{quote(content)}}}', logprobs, more=ids_field)
        for call in choice.calls:
            events += self._chunk(i, f'{{"tool_calls":[{json.dumps(self._call_delta(choice, call))}]}}')
        choice.calls = []
        if finish_reason is not None:
            self._is_ended[i] = True
        if finish_reason is not None or found:
            more = f",{json.dumps(found)[1:-1]}" if found else ""
            reason = "null" if finish_reason is None else f'"{finish_reason}"'
            events += self._chunk(i, "{}", finish_reason=reason, more=more)
        return events

    def _first_chunk(self, i: int) -> str:
        fields = self._prompt_fields()
        more = f",{json.dumps(fields)[1:-1]}" if fields else ""
        delta = '{"role":"assistant","content":"","refusal":null}'
        return self._event(f'{{"index":{i},"delta":{delta},"logprobs":null,"finish_reason":null}}', more)

    def _chunk(
        self, i: int, delta: str, logprobs: str = "null", finish_reason: str = "null", more: str = ""
    ) -> str:
        return self._event(
            f'{{"index":{i},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish_reason}{more}}}'
        )

    def _call_delta(self, choice: Choice, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.place, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.place, "id": choice.new_call_id(), "type": "function", "function": function}

    def _add_calls(self, i: int, choice: Choice) -> None:
        for call in choice.calls:
            delta = self._call_delta(choice, call)
            if call.name is None:
                self._calls[i][-1]["function"]["arguments"] += call.arguments
            else:
                del delta["index"]
                self._calls[i].append(delta)
        choice.calls = []

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        entries = chat_logprobs(self._served.tokenizer, choice.tokens, as_ids=as_ids)
        return {"content": entries, "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return usage(self._call, sum(choice.n_reasoning for choice in self._choices))
