"""The body of /v1/responses, as OpenAI's API has it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.server.schema import (
    HINTS,
    NO_CALLS,
    NO_STORE,
    TEXT_ONLY,
    Body,
    Interventions,
    MaxTokens,
    Piece,
    Refused,
    Sampling,
    TextOr,
    ToolName,
)

_NO_CALLERS = (({"type": "direct"},), "calls come from the model alone")
_NO_NAMESPACES = ((), "tools have no namespaces")
Status = Literal["completed", "incomplete", "in_progress"]


class InputText(Piece):
    """A part of an item: text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _bare(self) -> InputText:
        if self.annotations:
            raise RequestError("annotations cannot be shown to the model", param="annotations")
        return self


class InputItem(Piece):
    """Something among the items of `input`; id and status are those of an item that came from here."""

    id: str | None = None
    status: Status | None = None


class MessageItem(InputItem):
    """A message."""

    refused: ClassVar[Refused] = {"phase": ((), "chat templates have no place for it")}
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[list[InputText]]


class ReasoningText(Piece):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(InputItem):
    """The reasoning of an earlier turn."""

    refused: ClassVar[Refused] = {
        "summary": (([],), "the model's reasoning comes as it is, in content"),
        "encrypted_content": ((), "reasoning is sent in the open, in content"),
    }
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class CallItem(InputItem):
    """The call of a function in an earlier turn."""

    refused: ClassVar[Refused] = {
        "async": ((False,), NO_CALLS),
        "caller": _NO_CALLERS,
        "namespace": _NO_NAMESPACES,
    }
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON


class CallOutputItem(InputItem):
    """The result of a function; templates take its name from the call."""

    refused: ClassVar[Refused] = {"caller": _NO_CALLERS, "namespace": _NO_NAMESPACES}
    type: Literal["function_call_output"]
    call_id: str
    name: str | None = None
    output: TextOr[list[InputText]]


def _kind(value: Any) -> str:
    """The type of an item; messages may go without one. As a tag, it is left out of errors."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind or 'message'}"


Item = Annotated[
    Annotated[MessageItem, Tag("@message")]
    | Annotated[ReasoningItem, Tag("@reasoning")]
    | Annotated[CallItem, Tag("@function_call")]
    | Annotated[CallOutputItem, Tag("@function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="An item is of type message, reasoning, function_call or function_call_output",
    ),
]


class FunctionTool(Piece):
    """A function that the model may call: the one kind of tool."""

    refused: ClassVar[Refused] = {
        "allowed_callers": ((["direct"],), "calls come from the model alone"),
        "async": ((False,), NO_CALLS),
        "defer_loading": ((False,), "every tool is shown to the model"),
        "output_schema": ((), "chat templates have no place for it: put it into the description"),
    }
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class NamedFunction(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of a response: as `ResponseFormat`, without a level between."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> TextFormat:
        has_both = self.name is not None and self.schema_ is not None
        if self.type == "json_schema" and not has_both:
            raise RequestError("the type json_schema needs name and schema", param="text.format")
        if self.type != "json_schema" and self.model_fields_set != {"type"}:
            raise RequestError(f"the type {self.type} takes nothing else", param="text.format")
        return self

    def as_grammar(self) -> Grammar | None:
        """The grammar; None for plain text."""
        return None if self.type == "text" else Grammar.json(self.schema_, param="text.format")


class TextOptions(Body):
    """The form of a response."""

    ignored = frozenset({"verbosity"})
    format: TextFormat | None = None


class Reasoning(Body):
    """The reasoning before a response."""

    refused: ClassVar[Refused] = {
        "summary": ((), "reasoning is not summarized"),
        "generate_summary": ((), "reasoning is not summarized"),
        "context": (("auto",), "there is no choice of it"),
        "mode": (("standard",), "there is one mode"),
    }
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseBody(Sampling):
    """A request to /v1/responses."""

    refused: ClassVar[Refused] = {
        "access_programs": ((), "there are none"),
        "background": ((False,), NO_STORE),
        "background_options": ((), NO_STORE),
        "conversation": ((), NO_STORE),
        "image": ((), TEXT_ONLY),
        "max_tool_calls": ((), NO_CALLS),
        "moderation": ((), "nothing is moderated here"),
        "previous_response_id": ((), NO_STORE),
        "prompt": ((), NO_STORE),
        "stream_options": (({}, {"include_obfuscation": False}), "events are not padded"),
        "truncation": (("disabled",), "a prompt that is too long is an error"),
    }
    ignored = HINTS
    input: TextOr[Annotated[list[Item], Field(min_length=1)]]
    instructions: str | None = None
    # the reasoning that encrypted_content would carry into the next request is in the items themselves
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    interventions: Interventions | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None  # tokens; then the answer begins

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probabilities are requested."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
