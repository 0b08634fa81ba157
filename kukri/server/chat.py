"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from kukri.answer import Answer
from kukri.errors import RequestError
from kukri.sampling import Grammar, SampledToken
from kukri.server.bridge import Call
from kukri.server.logprobs import chat_logprobs
from kukri.server.reasoning import ReasoningSplit
from kukri.server.reply import ChunkWriter, Reply, usage
from kukri.server.schema import ChatBody
from kukri.server.service import Service
from kukri.server.structure import grammar_of, messages_of, templates_of, toolbox_of
from kukri.server.tool_split import CallDelta, ToolSplit
from kukri.server.tools import Toolbox


class OpenChat(NamedTuple):
    """A chat in the queue."""

    call: Call
    toolbox: Toolbox | None  # what it may call
    inside: bool  # the prompt has begun its thoughts


async def complete_chat(service: Service, body: ChatBody, http: Request) -> Response:
    """The response to a chat completion."""
    model = service.check_model(body.model)
    call, toolbox, inside = await open_chat(service, body, http, grammar_of(body))
    writer = ChatWriter(service, call, body, model, toolbox, inside=inside)
    return Reply(service, call, writer, stream=bool(body.stream))


async def open_chat(
    service: Service, body: ChatBody, http: Request, grammar: Grammar | None, *, where: str = "messages"
) -> OpenChat:
    """Queues what a body asks for; `grammar` is the form it wants, `where` the field of its prompt.

    Raises RequestError and CapacityError.
    """
    toolbox = toolbox_of(body, service.dialect)
    prompt = await chat_prompt(service, body)
    params = service.params(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(service, grammar, toolbox, prompt, body.reasoning_effort),
        thoughts=service.thought_limit(body.thinking_token_budget, prompt),
        prediction=body.prediction.text if body.prediction else None,
    )
    call = await service.open_call(
        http,
        [prompt],
        params,
        body,
        where=where,
        continues=True,
        dialect=toolbox.dialect if toolbox else None,
    )
    return OpenChat(call, toolbox, service.ends_in_thoughts(prompt))


async def chat_prompt(service: Service, body: ChatBody) -> list[int]:
    """The token ids of the conversation, tools included."""
    return await service.encode_chat(
        messages_of(body.messages),
        body.chat_template_kwargs,
        effort=body.reasoning_effort,
        tools=templates_of(body) if body.tool_choice != "none" else None,
    )


def _grammar(
    service: Service,
    grammar: Grammar | None,
    toolbox: Toolbox | None,
    prompt: Sequence[int],
    effort: str | None,
) -> Grammar | None:
    """What the answer has to be, of the form that is wanted and the tools."""
    if grammar is not None and toolbox is not None:
        raise RequestError(
            f"{grammar.param} and tools both say what the answer may be: give one, or tool_choice: none",
            param=grammar.param,
        )
    if toolbox is not None:
        vocabulary = service.tokenizer.vocabulary
        grammar = toolbox.grammar(vocabulary.id_of, vocabulary.special_ids)
    return None if grammar is None else service.after_thoughts(grammar, prompt, effort)


class Choice:
    """One answer, split into thoughts, content and, with a toolbox, calls."""

    def __init__(self, answer: Answer, *, inside: bool, toolbox: Toolbox | None = None) -> None:
        self.answer = answer
        self.tokens: list[SampledToken] = []  # of no thoughts, with log-probabilities, not yet taken
        self.calls: list[CallDelta] = []  # those not yet taken
        self._split = ReasoningSplit(inside=inside)
        self._unsplit: list[tuple[int, SampledToken]] = []  # perhaps of the thoughts; where their text begins
        self._tools = None if toolbox is None else toolbox.split()
        self._has_many = toolbox is not None and toolbox.many
        self._has_called = False
        self._is_flushed = False

    @property
    def n_thought(self) -> int:
        """Tokens of thoughts so far."""
        if self._split.is_thinking:
            return self.answer.n_tokens
        end = self._split.thoughts_end
        return 0 if end is None else self.answer.n_tokens_within(end)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None while it has not."""
        reason = self.answer.finish_reason
        return "tool_calls" if reason == "stop" and self._has_called else reason

    def advance(self) -> tuple[str, str]:
        """(thoughts, content) that came since the last time; calls are in `calls`."""
        thoughts, pieces = self.pieces()
        self.calls += [piece for piece in pieces if isinstance(piece, CallDelta)]
        return thoughts, "".join(piece for piece in pieces if isinstance(piece, str))

    def pieces(self) -> tuple[str, list[str | CallDelta]]:
        """(thoughts, content and calls in their order) that came since the last time."""
        answer, is_last = self.answer, False
        thoughts, content = self._split.push(answer.take_text())
        if answer.finish_reason is not None and not self._is_flushed:
            self._is_flushed = is_last = True
            more_thoughts, more_content = self._split.flush()
            thoughts, content = thoughts + more_thoughts, content + more_content
        self._take_tokens()
        return thoughts, [content] if self._tools is None else self._split_calls(
            self._tools, content, is_last
        )

    def _take_tokens(self) -> None:
        """Takes the tokens that are known to be no thoughts."""
        self._unsplit += self.answer.take_tokens()
        start = self._split.answer_start
        if start is not None:
            self.tokens += [token for place, token in self._unsplit if place >= start]
            self._unsplit.clear()

    def _split_calls(self, tools: ToolSplit, content: str, is_last: bool) -> list[str | CallDelta]:
        """Content and calls, without those that are one too many."""
        pieces = tools.push(content) + (tools.flush() if is_last else [])
        self._has_called |= any(isinstance(piece, CallDelta) for piece in pieces)
        return [piece for piece in pieces if isinstance(piece, str) or self._has_many or piece.place == 0]


class ChatWriter(ChunkWriter):
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
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, call, body, model, kind=kind, id_kind="chatcmpl")
        self._body, self._toolbox = body, toolbox
        self._choices = [Choice(answer, inside=inside, toolbox=toolbox) for answer in call.answers]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        self._thoughts = [""] * len(self._choices)
        self._contents = [""] * len(self._choices)
        self._has_role = [False] * len(self._choices)

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
        return self._event(
            f'{{"index":{i},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish_reason}}}'
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
