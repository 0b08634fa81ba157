"""/v1/messages and its count_tokens: chats in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.calls.choice import Part, PartEvent
from kukri.dataclass import dataclass, field
from kukri.errors import ContextLengthError, RequestError
from kukri.server.answers.reply import AnswerWriter, Reply, image_usage, interp_fields, sse
from kukri.server.anthropic.schema import (
    DocumentSource,
    MessageHostedTool,
    MessagesBody,
    MessageTool,
    MessageToolChoice,
    OtherBlock,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
    message_error_body,
)
from kukri.server.chat.request import ChatRequest, ToolChoice
from kukri.server.intervention_bodies import steering
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.schema import client_image, content_of, only_grammar
from kukri.tokenizer import arguments_object, newest_turn, note

_BILLING = "x-anthropic-billing-header:"
_CHOICES: dict[str, ToolChoice] = {
    "auto": "auto", "any": "required", "tool": "required", "none": "none",
}  # fmt: skip
_NAMES = {
    "prompt": "messages", "reasoning_effort": "output_config.effort", "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}  # fmt: skip
_DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


async def answer_message(served: ServedModel, body: MessagesBody, http: Request) -> Response:
    """The response to a message."""
    model = served.check_model(body.model)
    hosted = [tool.name or tool.type for tool in body.tools or () if isinstance(tool, MessageHostedTool)]
    http.scope["kukri.left_out"]["x-tools-left-out"] = hosted
    try:
        chat = await served.open(parse_message(body), http.scope)
    except ContextLengthError as error:  # in the words that make clients compact their conversation
        error.args = (f"prompt is too long: {error.n_tokens} tokens > {error.max_context} maximum",)
        raise
    return Reply(served, chat.call, MessageWriter(chat, body, model), stream=bool(body.stream))


async def count_tokens(served: ServedModel, body: PromptBody, http: Request) -> Response:
    """The response with the number of tokens of a message's prompt."""
    served.check_model(body.model)
    return JSONResponse({"input_tokens": await served.n_prompt_tokens(parse_message(body))})


def parse_message(body: PromptBody) -> ChatRequest:
    """The request of a body, whose answer continues a last message of the assistant. Raises RequestError."""
    choice = body.tool_choice or MessageToolChoice(type="auto")
    more: dict[str, Any] = {"sampling": {}}
    if isinstance(body, MessagesBody):
        format = (
            body.output_config.format.as_grammar()
            if body.output_config and body.output_config.format
            else None
        )
        user = body.metadata.user_id if body.metadata is not None else None
        more = {
            "sampling": body.sampling(max_tokens=body.max_tokens, stop=body.stop_sequences or None),
            "grammar": only_grammar([body.form, format]),
            "user": user or body.user or "",
            "priority": body.priority,
            "interventions": steering(body.interventions),
        }
    return ChatRequest(
        messages=_messages(body),
        model=body.model,
        functions=[tool.as_function() for tool in body.tools or () if isinstance(tool, MessageTool)],
        tool_choice=_CHOICES[choice.type],
        tool_name=choice.name,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        continue_final_message=body.messages[-1].role == "assistant",
        effort=_effort(body),
        thinking_budget=body.thinking.budget_tokens if body.thinking is not None else None,
        names=_NAMES,
        **more,
    )


def _effort(body: PromptBody) -> str | None:
    """The effort to reason."""
    thinking = body.thinking
    effort = body.output_config.effort if body.output_config is not None else None
    if thinking is None or thinking.type == "adaptive":
        return effort
    if thinking.type == "disabled" and effort is not None:
        raise RequestError("'output_config.effort' requires enabled thinking", param="thinking")
    return effort or ("none" if thinking.type == "disabled" else "medium")


@dataclass
class _Draft:
    """A message while its pieces are gathered: bodies may have tens of thousands of them."""

    role: str
    texts: list[str | dict[str, Any]] = field(default_factory=list)  # and images
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers_to: str | None = None  # the call whose result it is

    @property
    def is_empty(self) -> bool:
        """True if nothing has been gathered."""
        return not (self.texts or self.reasoning or self.calls)

    def add(
        self, block: TextBlock | ThinkingBlock | ToolUseBlock | OtherBlock, param: str, is_new: bool
    ) -> None:
        """Adds a block. Raises RequestError, naming `param`, if it cannot be read and `is_new`."""
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            self.calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            self.reasoning += [block.thinking] if block.thinking else []
        elif block.type == "redacted_thinking":  # which nobody here can read
            pass
        elif isinstance(block, OtherBlock):
            self.texts.append(_read(block, param, is_new))
        else:
            self.texts += [block.text] if block.text else []

    def join(self, other: _Draft) -> None:
        """Adds the parts of another."""
        self.texts += other.texts
        self.reasoning += other.reasoning
        self.calls += other.calls

    def message(self) -> dict[str, Any]:
        """The message in OpenAI's form: texts on lines of their own, calls after calls."""
        message: dict[str, Any] = {"role": self.role}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.texts or not self.calls:
            message["content"] = content_of(self.texts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message if self.answers_to is None else {**message, "tool_call_id": self.answers_to}


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form. Neighbours of one role are one message, as in Anthropic's API."""
    system = _system(body.system)
    drafts = [_Draft("system", [system])] if system else []
    newest = newest_turn([turn.role for turn in body.messages])
    for i, turn in enumerate(body.messages):
        for draft in _turn(turn, f"messages[{i}]", i >= newest):
            if drafts and draft.role == drafts[-1].role != "tool":
                drafts[-1].join(draft)
            else:
                drafts.append(draft)
    return [draft.message() for draft in drafts]


def _system(given: str | list[TextBlock] | None) -> str:
    """The system prompt, without the block of Claude Code that changes with each request.

    It is addressed to Anthropic's billing, and would keep all that follows it out of the prefix cache.
    """
    if given is None or isinstance(given, str):
        return given or ""
    return "\n".join(block.text for block in given if not block.text.startswith(_BILLING))


def _turn(turn: TurnMessage, param: str, is_new: bool) -> Iterator[_Draft]:
    """The messages of a turn: each result of a tool is one of its own."""
    if not isinstance(turn.content, list):
        yield _Draft(turn.role, [turn.content] if turn.content else [])
        return
    draft, has_results = _Draft(turn.role), False
    for i, block in enumerate(turn.content):
        if isinstance(block, ToolResultBlock):
            has_results = True
            if not draft.is_empty:
                yield draft
                draft = _Draft(turn.role)
            pieces = _pieces(block.content or "", f"{param}.content[{i}].content")
            if block.is_error:
                first = pieces.pop(0) if pieces and isinstance(pieces[0], str) else ""
                pieces.insert(0, f"Error: {first}")
            yield _Draft("tool", pieces, answers_to=block.tool_use_id)
        else:
            draft.add(block, f"{param}.content[{i}]", is_new)
    if not (draft.is_empty and has_results):
        yield draft


def _pieces(content: str | list[TextBlock | OtherBlock], param: str) -> list[str | dict[str, Any]]:
    """The texts and images of a tool's result."""
    if isinstance(content, str):
        return [content]
    return [
        block.text if isinstance(block, TextBlock) else _read(block, f"{param}[{i}]", is_new=False)
        for i, block in enumerate(content)
    ]


def _read(block: OtherBlock, param: str, is_new: bool) -> str | dict[str, Any]:
    """An image, the text of a document, or the note for what cannot be read. Raises RequestError."""
    if block.type == "image":
        source = block.source or DocumentSource()
        given = {"detail": block.detail, "image_tokens": block.image_tokens}
        given |= {"image_url": source.url} if source.type == "url" else {"data": source.data}
        return client_image("image", param, **given)
    text = block.text
    return note(block.type, param, is_new=is_new) if text is None else text


class MessageWriter(AnswerWriter):
    """Writes a message, whole or as events: the parts of the answer are its blocks."""

    error_json = staticmethod(message_error_body)

    def __init__(self, chat: Chat, body: MessagesBody, model: str) -> None:
        super().__init__(chat.call, chat.choices, stream=bool(body.stream))
        self._body, self._model = body, model
        self._choice = chat.choices[0]
        self._id = f"msg_{uuid4().hex}"

    def end(self) -> bytes:
        """Why the message ended, and the end mark."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        found = interp_fields(self._call, 0)
        last = _event("message_delta", delta=delta, usage=self._usage(), **found)
        return (last + _event("message_stop")).encode()

    def body(self) -> dict[str, Any]:
        """The message."""
        blocks = [_block(part, part.text) for part in self._choice.parts]
        message = self._message(blocks, self._stop_reason, self._stop_sequence)
        return {**message, **interp_fields(self._call, 0)}

    def _begin(self) -> str:
        return _event("message_start", message=self._message([], None, None))

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        return "".join([self._rendered(event) for event in events])

    def _rendered(self, event: PartEvent) -> str:
        index = event.part.index
        if event.what == "grown":
            type, key = _DELTAS[event.part.kind]
            return (
                f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},'
                f'"delta":{{"type":"{type}","{key}":{quote(event.text)}}}}}\n\n'
            )
        if event.what == "closed":
            return _event("content_block_stop", index=index)
        start = _event("content_block_start", index=index, content_block=_block(event.part, ""))
        return start if index else start + _event("ping")

    @property
    def _stop_sequence(self) -> str | None:
        return self._choice.answer.stop_string

    @property
    def _stop_reason(self) -> str:
        reason = self._choice.finish_reason
        if reason == "length":
            is_cut = self._call.n_generated >= self._body.max_tokens
            return "max_tokens" if is_cut else "model_context_window_exceeded"
        if reason == "tool_calls":
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": {**self._usage(), "service_tier": "standard"},
        }

    def _usage(self) -> dict[str, Any]:
        call = self._call
        return {
            "input_tokens": call.n_prompt_tokens - call.n_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": call.n_cached_tokens,
            "output_tokens": call.n_generated,
            "output_tokens_details": {"thinking_tokens": self._choice.n_reasoning},
            **image_usage(call),
        }


def _block(part: Part, text: str) -> dict[str, Any]:
    """A part as a block with some text."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments_object(text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _event(type: str, **fields: Any) -> str:
    return sse({"type": type, **fields}, type)
