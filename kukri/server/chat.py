"""/v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import KukriError, RequestError
from kukri.sampling import Grammar, SampledToken
from kukri.server.bridge import Answer, Call
from kukri.server.errors import error_body
from kukri.server.logprobs import chat_logprobs
from kukri.server.reasoning import ReasoningSplit
from kukri.server.reply import DONE, Reply
from kukri.server.schema import ChatBody
from kukri.server.service import Service
from kukri.server.structure import grammar_of, messages_of, templates_of, toolbox_of
from kukri.server.tools import CallDelta, Toolbox, ToolSplit


async def complete_chat(service: Service, body: ChatBody, http: Request) -> Response:
    """The response to a chat completion."""
    model = service.check_model(body.model)
    toolbox = toolbox_of(body, service.dialect)
    prompt = await service.encode_chat(
        messages_of(body.messages),
        body.chat_template_kwargs,
        effort=body.reasoning_effort,
        tools=templates_of(body) if body.tool_choice != "none" else None,
    )
    params = service.params(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(service, body, toolbox, prompt),
        thoughts=service.thought_limit(body.thinking_token_budget, prompt),
    )
    call = await service.open_call(
        http,
        [prompt],
        params,
        body,
        where="messages",
        continues=True,
        dialect=toolbox.dialect if toolbox else None,
    )
    writer = ChatWriter(service, call, body, model, toolbox, inside=service.ends_in_thoughts(prompt))
    return Reply(service, call, writer, stream=bool(body.stream))


def _grammar(
    service: Service, body: ChatBody, toolbox: Toolbox | None, prompt: Sequence[int]
) -> Grammar | None:
    grammar = grammar_of(body)
    if grammar is not None and toolbox is not None:
        raise RequestError(
            f"{grammar.param} and tools both say what the answer may be: give one, or tool_choice: none",
            param=grammar.param,
        )
    if toolbox is not None:
        vocabulary = service.tokenizer.vocabulary
        grammar = toolbox.grammar(vocabulary.id_of, vocabulary.special_ids)
    return None if grammar is None else service.after_thoughts(grammar, prompt)


class Choice:
    """One answer, split into thoughts, content and, with a toolbox, calls."""

    def __init__(self, answer: Answer, *, inside: bool, toolbox: Toolbox | None = None) -> None:
        self.answer = answer
        self.n_thought = 0  # tokens
        self.tokens: list[SampledToken] = []  # with log-probabilities, those not yet taken
        self.calls: list[CallDelta] = []  # those not yet taken
        self._split = ReasoningSplit(inside=inside)
        self._tools = None if toolbox is None else toolbox.split()
        self._has_many = toolbox is not None and toolbox.many
        self._has_called = False
        self._is_flushed = False

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None while it has not."""
        reason = self.answer.finish_reason
        return "tool_calls" if reason == "stop" and self._has_called else reason

    def advance(self) -> tuple[str, str]:
        """(thoughts, content) that came since the last time."""
        answer, is_last = self.answer, False
        thoughts, content = self._split.push(answer.take_text())
        if self._split.is_thinking:
            self.n_thought = answer.n_tokens
        if answer.finish_reason is not None and not self._is_flushed:
            self._is_flushed = is_last = True
            more_thoughts, more_content = self._split.flush()
            thoughts, content = thoughts + more_thoughts, content + more_content
        if self._tools is not None:
            content = self._take_calls(self._tools, content, is_last)
        self.tokens += [token for _, token in answer.take_tokens()]
        return thoughts, content

    def _take_calls(self, tools: ToolSplit, content: str, is_last: bool) -> str:
        """The content that is no call."""
        events = tools.push(content) + (tools.flush() if is_last else [])
        calls = [event for event in events if isinstance(event, CallDelta)]
        self._has_called |= bool(calls)
        self.calls += [call for call in calls if self._has_many or call.place == 0]
        return "".join(event for event in events if isinstance(event, str))


class ChatWriter:
    """Writes chat completions, whole or as chunks."""

    def __init__(
        self,
        service: Service,
        call: Call,
        body: ChatBody,
        model: str,
        toolbox: Toolbox | None,
        *,
        inside: bool,
    ) -> None:
        self._service, self._call, self._body, self._toolbox = service, call, body, toolbox
        self._choices = [Choice(answer, inside=inside, toolbox=toolbox) for answer in call.answers]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        self._thoughts = [""] * len(self._choices)
        self._contents = [""] * len(self._choices)
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        self._with_usage = with_usage
        self._prefix = f"data: {json.dumps(self._head, separators=(',', ':'))[:-1]}"
        self._has_role = [False] * len(self._choices)
        self._is_ended = [False] * len(self._choices)

    def advance(self) -> bytes:
        """Takes what came; its chunks, if it is a stream."""
        events = ""
        for i, choice in enumerate(self._choices):
            if self._is_ended[i]:
                continue
            thoughts, content = choice.advance()
            if self._body.stream:
                events += self._chunks(i, choice, thoughts, content)
            else:
                self._thoughts[i] += thoughts
                self._contents[i] += content
                self._add_calls(i, choice)
        return events.encode()

    def end(self) -> bytes:
        """The usage, where asked for, and the end mark."""
        if not self._with_usage:
            return DONE
        last = f'{self._prefix},"choices":[],"usage":{json.dumps(self._usage())}}}\n\n'
        return last.encode() + DONE

    def fail(self, error: KukriError) -> bytes:
        """An error event and the end mark."""
        return b"data: " + json.dumps(error_body(str(error), 500)).encode() + b"\n\n" + DONE

    def body(self) -> dict[str, Any]:
        """The completion."""
        choices = []
        for i, choice in enumerate(self._choices):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._contents[i] or (None if self._thoughts[i] or self._calls[i] else ""),
                "refusal": None,
            }
            if self._thoughts[i]:
                message["reasoning_content"] = self._thoughts[i]
            if self._calls[i]:
                message["tool_calls"] = self._calls[i]
            choices.append(
                {
                    "index": i,
                    "message": message,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": choice.finish_reason,
                }
            )
        body = {**self._head, "choices": choices, "usage": self._usage()}
        return body if self._body.metadata is None else {**body, "metadata": self._body.metadata}

    def _chunks(self, i: int, choice: Choice, thoughts: str, content: str) -> str:
        finish_reason = choice.finish_reason
        if not (thoughts or content or choice.tokens or choice.calls or finish_reason):
            return ""
        events = ""
        if not self._has_role[i]:
            self._has_role[i] = True
            events += self._chunk(i, '{"role":"assistant","content":"","refusal":null}')
        if thoughts:
            events += self._chunk(i, f'{{"reasoning_content":{quote(thoughts)}}}')
        if content or choice.tokens:
            logprobs = json.dumps(self._logprobs(choice)) if choice.tokens else "null"
            choice.tokens = []
            events += self._chunk(i, f'{{"content":{quote(content)}}}', logprobs)
        for call in choice.calls:
            events += self._chunk(i, f'{{"tool_calls":[{json.dumps(self._call_delta(call))}]}}')
        choice.calls = []
        if finish_reason is not None:
            self._is_ended[i] = True
            events += self._chunk(i, "{}", finish_reason=f'"{finish_reason}"')
        return events

    def _chunk(self, i: int, delta: str, logprobs: str = "null", finish_reason: str = "null") -> str:
        return (
            f'{self._prefix},"choices":[{{"index":{i},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}}}]{self._tail}'
        )

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.place, "function": {"arguments": call.arguments}}
        assert self._toolbox is not None, "calls come of tools"
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.place, "id": self._toolbox.new_id(), "type": "function", "function": function}

    def _add_calls(self, i: int, choice: Choice) -> None:
        for call in choice.calls:
            delta = self._call_delta(call)
            if call.name is None:
                self._calls[i][-1]["function"]["arguments"] += call.arguments
            else:
                del delta["index"]
                self._calls[i].append(delta)
        choice.calls = []

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_logprobs(self._service.tokenizer, choice.tokens), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        return usage(self._call, sum(choice.n_thought for choice in self._choices))


def usage(call: Call, n_thought: int) -> dict[str, Any]:
    """The `usage` of the older endpoints."""
    return {
        "prompt_tokens": call.n_prompt_tokens,
        "completion_tokens": call.n_generated,
        "total_tokens": call.n_prompt_tokens + call.n_generated,
        "prompt_tokens_details": {"cached_tokens": call.n_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": n_thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
