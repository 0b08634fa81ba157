"""The bodies of /v1/messages and of its count_tokens, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from starlette.requests import Request

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.sampling.fields import MAX_STOPS, MAX_TEXT
from kukri.server.body import Body, Piece, Refused
from kukri.server.errors import unknown_field
from kukri.server.intervention_bodies import Interventions
from kukri.server.schema import HINTS, NO_CALLS, MaxTokens, Sampling, TextOr, ToolName, tool_type

NO_THREADS = "thread_unsupported_request"  # the code at which clients send whole conversations
_MESSAGE_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class TextBlock(Piece):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Piece):
    """The reasoning of an earlier turn; the signature means nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Piece):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class DocumentSource(Piece):
    """What a document holds; a text can be read."""

    type: str | None = None
    data: str | None = None
    url: str | None = None


class OtherBlock(Piece):
    """A block of another type: an image, a document of plain text, or what the model cannot read."""

    type: str
    source: DocumentSource | None = None
    # beyond Anthropic's
    detail: Any = None
    image_tokens: Any = None

    @property
    def text(self) -> str | None:
        """The text of a document; None if there is nothing to read."""
        is_text = self.type == "document" and self.source is not None and self.source.type == "text"
        return self.source.data if is_text and self.source is not None else None


def _kind(value: Any) -> str:
    """The type of a block, or "other", as a tag that errors leave out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if kind in ("text", "thinking", "tool_use", "tool_result") else "@other"


ReadBlock = Annotated[
    Annotated[TextBlock, Tag("@text")] | Annotated[OtherBlock, Tag("@other")],
    Discriminator(lambda value: tag if (tag := _kind(value)) == "@text" else "@other"),
]


class ToolResultBlock(Piece):
    """The result of a tool; `is_error` puts "Error: " before it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[list[ReadBlock]] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("@text")]
    | Annotated[ThinkingBlock, Tag("@thinking")]
    | Annotated[ToolUseBlock, Tag("@tool_use")]
    | Annotated[ToolResultBlock, Tag("@tool_result")]
    | Annotated[OtherBlock, Tag("@other")],
    Discriminator(_kind),
]


class TurnMessage(Piece):
    """A turn of a conversation. Calls and reasoning are the assistant's, results the user's."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[list[Block]] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> TurnMessage:
        for block in self.content if isinstance(self.content, list) else ():
            owner = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}.get(block.type)
            if owner not in (None, self.role):
                raise RequestError(
                    f"a block {block.type!r} must be in a message of the {owner}, not of the {self.role}",
                    param="messages",
                )
        return self


class MessageTool(Piece):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        """The function as OpenAI's API has it."""
        given = {"description": self.description, "strict": self.strict}
        given = {key: value for key, value in given.items() if value is not None}
        return {"name": self.name, "parameters": self.input_schema, **given}


class MessageHostedTool(Piece):
    """A tool that Anthropic's servers run, such as a search: there is none here, so that it is left out."""

    type: str
    name: str | None = None


AnyTool = Annotated[
    Annotated[MessageTool, Tag("@custom")] | Annotated[MessageHostedTool, Tag("@hosted")],
    Discriminator(
        lambda value: "@hosted" if tool_type(value) not in (None, "custom") else "@custom",
    ),
]


class MessageToolChoice(Body):
    """The choice of the tools to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                "'tool_choice.name' is required for the type \"tool\", and not supported for others",
                param="tool_choice",
            )
        if self.type == "none" and self.disable_parallel_tool_use is not None:
            raise RequestError(
                "'disable_parallel_tool_use' cannot be combined with the type \"none\"",
                param="tool_choice",
            )
        return self


class Thinking(Body):
    """The reasoning before an answer, and its limit in tokens."""

    ignored = frozenset({"display"})
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise RequestError(
                "'thinking.budget_tokens' is required for the type \"enabled\", and not supported for others",
                param="thinking",
            )
        return self


class MessageFormat(Body):
    """The form of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def as_grammar(self) -> Grammar:
        """The grammar."""
        return Grammar.json(self.schema_, param="output_config.format")


class OutputConfig(Body):
    """The effort and the form of an answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class Metadata(Piece):
    """The user of a request: the queue is fair among users."""

    user_id: str | None = None


class PromptBody(Body):
    """A request to /v1/messages/count_tokens: the fields that make a prompt."""

    refused: ClassVar[Refused] = {"mcp_servers": (([],), NO_CALLS)}
    ignored = HINTS | {"cache_control", "diagnostics", "inference_geo", "speed"}
    model: str | None = None
    messages: Annotated[list[TurnMessage], Field(min_length=1)]
    system: TextOr[list[TextBlock]] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=512)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    _left_out: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out(cls, data: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Keep the names of unknown fields for `check_known`, and refuse a thread."""
        if not isinstance(data, dict):
            return read(data)
        if data.get("thread") is not None:
            raise RequestError.of("thread", "is not supported: send the whole conversation", code=NO_THREADS)
        unknown = dict.fromkeys(cls._unknown(data))
        body = read({name: value for name, value in data.items() if name not in unknown})
        body._left_out = tuple(unknown)
        return body

    def check_known(self, http: Request) -> None:
        """Raise RequestError for an unknown field; of a beta, have it named in the log and a header."""
        if self._left_out and http.query_params.get("beta") != "true":
            raise unknown_field(self._left_out[0], type(self))
        http.scope["kukri.left_out"]["x-fields-left-out"] = self._left_out


class MessagesBody(PromptBody, Sampling):
    """A request to /v1/messages: Anthropic's fields and those of `Sampling`."""

    refused: ClassVar[Refused] = {**PromptBody.refused, "container": ((), "this server runs no code")}
    max_tokens: MaxTokens
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    metadata: Metadata | None = None
    interventions: Interventions | None = None

    @model_validator(mode="after")
    def _fits(self) -> MessagesBody:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise RequestError(
                f"'thinking.budget_tokens' must be below 'max_tokens' ({self.max_tokens}), not {budget}",
                param="thinking",
            )
        return self


def message_error_body(
    message: str, status: int, request_id: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error of /v1/messages, with details if its code is NO_THREADS."""
    kind = _MESSAGE_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code == NO_THREADS:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}
