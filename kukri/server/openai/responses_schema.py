"""The body of /v1/responses, as OpenAI's API has it."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.server.body import Body, Piece, Refused
from kukri.server.intervention_bodies import Interventions
from kukri.server.schema import (
    HINTS,
    TEXT_ONLY,
    MaxTokens,
    OtherPart,
    RefusalPart,
    Sampling,
    TextOr,
    ToolName,
    part_kind,
    tool_type,
)

# Items of tools that OpenAI's servers run, and of others that a history may hold: notes stand for them.
_HOSTED_ITEMS = re.compile(
    r"[a-z_]{1,50}_(call|call_output|output|list_tools|approval_request|approval_response)|compaction"
)


class InputText(Piece):
    """A part of an item: text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "@text" if kind in ("input_text", "output_text", "text") else part_kind(value)


InputPart = Annotated[
    Annotated[InputText, Tag("@text")]
    | Annotated[RefusalPart, Tag("@refusal")]
    | Annotated[OtherPart, Tag("@other")],
    Discriminator(_part_kind),
]


class InputItem(Piece):
    """Something among the items of `input`; the id is that of an item that came from here."""

    id: str | None = None


class MessageItem(InputItem):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[list[InputPart]]


class ReasoningText(Piece):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(InputItem):
    """The reasoning of an earlier turn. Encrypted content is somebody else's."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None


class CallItem(InputItem):
    """The call of a function in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str  # JSON


class CustomCallItem(InputItem):
    """The call of a custom tool in an earlier turn."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(InputItem):
    """The result of a function or custom tool; templates take its name from the call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOr[list[InputPart]]


class ItemReference(Piece):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


class HostedItem(InputItem):
    """An item of a tool that is not run here."""

    type: str


def _kind(value: Any) -> str:
    """The type of an item; messages may go without one. As a tag, it is left out of errors."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("custom_tool_call", "reasoning", "function_call", "item_reference"):
        return f"@{kind}"
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "@function_call_output"
    if isinstance(kind, str) and _HOSTED_ITEMS.fullmatch(kind):
        return "@hosted"
    return f"@{kind or 'message'}"


Item = Annotated[
    Annotated[MessageItem, Tag("@message")]
    | Annotated[ReasoningItem, Tag("@reasoning")]
    | Annotated[CallItem, Tag("@function_call")]
    | Annotated[CustomCallItem, Tag("@custom_tool_call")]
    | Annotated[CallOutputItem, Tag("@function_call_output")]
    | Annotated[ItemReference, Tag("@item_reference")]
    | Annotated[HostedItem, Tag("@hosted")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="must be an item of type message, reasoning, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output or item_reference",
    ),
]


class FunctionTool(Piece):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        """The function as chats have it."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class CustomFormat(Piece):
    """The form of a custom tool's text."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Piece):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> dict[str, Any]:
        """The function that stands for it. Its `grammar`, in Lark's syntax, is enforced, and told as well."""
        text, more = {"type": "string"}, {}
        description = self.description or ""
        if self.format is not None and self.format.definition is not None:
            syntax, definition = self.format.syntax or "lark", self.format.definition
            description += f"\nThe input follows this {syntax} grammar:\n{definition}"
            if syntax == "regex":
                text["pattern"] = f"^(?:{definition})$"
                whole = definition.removeprefix("^").removesuffix("$")
                definition = "start: /{}/".format(re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", whole))
            more["grammar"] = definition
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"name": self.name, "description": description.strip(), "parameters": parameters, **more}


class HostedTool(Piece):
    """A tool that OpenAI's servers run: it is left out."""

    type: str


def _tool_kind(value: Any) -> str:
    kind = tool_type(value)
    return f"@{kind}" if kind in ("function", "custom", "namespace") else "@hosted"


_OneTool = Annotated[
    Annotated[FunctionTool, Tag("@function")]
    | Annotated[CustomTool, Tag("@custom")]
    | Annotated[HostedTool, Tag("@hosted")],
    Discriminator(lambda value: tag if (tag := _tool_kind(value)) != "@namespace" else "@hosted"),
]


class NamespaceTool(Piece):
    """Tools that share the beginning of their names."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[_OneTool], Field(max_length=512)]


ResponseTool = FunctionTool | CustomTool | NamespaceTool | HostedTool
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("@function")]
    | Annotated[CustomTool, Tag("@custom")]
    | Annotated[NamespaceTool, Tag("@namespace")]
    | Annotated[HostedTool, Tag("@hosted")],
    Discriminator(_tool_kind),
]


class NamedChoice(Piece):
    """The one tool that is to be called, in the form of responses, or in that of chats."""

    type: str
    name: str | None = None
    namespace: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        """Takes the form of chats, in which the name is a level deeper."""
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            return {**data, "name": data["function"].get("name")}
        return data


class AllowedTools(Piece):
    """The tools among which the model may choose."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(max_length=512)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@word")]
    | Annotated[AllowedTools, Tag("@allowed_tools")]
    | Annotated[NamedChoice, Tag("@named")],
    Discriminator(
        lambda value: (
            "@word"
            if isinstance(value, str)
            else "@allowed_tools"
            if tool_type(value) == "allowed_tools"
            else "@named"
        )
    ),
]


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
            raise RequestError("'name' and 'schema' are required for this type", param="text.format")
        if self.type != "json_schema" and self.model_fields_set != {"type"}:
            raise RequestError(f"the type {self.type!r} does not support other fields", param="text.format")
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

    ignored = frozenset({"summary", "generate_summary", "context", "mode"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseBody(Sampling):
    """A request to /v1/responses."""

    refused: ClassVar[Refused] = {
        "access_programs": ((), "the server has none"),
        "background": ((False,), "responses are computed in the foreground"),
        "background_options": ((), "responses are computed in the foreground"),
        "conversation": ((), "conversations are not stored: use 'previous_response_id'"),
        "image": ((), TEXT_ONLY),
        "moderation": ((), "the server has no moderation"),
        "prompt": ((), "the server has no stored prompts"),
    }
    ignored = (HINTS - {"store"}) | {
        *("client_metadata", "max_tool_calls", "stream_options", "truncation"),
    }
    input: TextOr[Annotated[list[Item], Field(min_length=1)]]
    instructions: str | None = None
    include: list[str] | None = None  # log-probabilities of the text; the rest is there anyway, or nowhere
    store: bool | None = None  # keep the response for previous_response_id, unless false
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Annotated[list[AnyTool], Field(max_length=512)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    interventions: Interventions | None = None
    timings_per_token: bool | None = None  # as llama.cpp has it: `timings` in each delta and at the end
    return_progress: bool | None = None  # as llama.cpp has it: `prompt_progress` in events before the answer
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None  # tokens; then the answer begins

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probabilities are requested."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
