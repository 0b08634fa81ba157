"""The bodies of requests: every field that can change an answer is honoured, or refused by name.

Fields that OpenAI's API has and kukri cannot honour are in the `refused` tables, each with the values that
ask for nothing and with the reason; hints that cannot change an answer are ignored. Any other field that is
not declared is an error unless it is null. Fields beyond OpenAI's are spelled as in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kukri.errors import RequestError, brief
from kukri.sampling import Grammar
from kukri.sampling.fields import MAX_COUNT
from kukri.server.aliases import (
    CHAT_ALIASES,
    SAMPLING_ALIASES,
    TEXT_ALIASES,
    Aliases,
    sampler_names,
)
from kukri.server.body import TEXT_OR_LIST, Body, Piece, Refused
from kukri.server.intervention_bodies import Interventions
from kukri.server.sampling_fields import FACTS, with_sampling
from kukri.tokenizer import newest_turn, note
from kukri.tokenizer.image_marks import IMAGE_TYPES

_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")
_TOKEN_IDS = re.compile(rf"{_TOKEN_ID.pattern}(?:,{_TOKEN_ID.pattern})*")

TEXT_ONLY = "the model reads and writes only text"
NO_CALLS = "the server has no tools of its own"
# fields of vLLM and llama.cpp, with the values that change nothing here
ELSEWHERE: Refused = {
    "include_reasoning": ((True,), "reasoning is always shown"),
    "include_stop_str_in_output": ((False,), "stop strings are not shown"),
    "length_penalty": ((1.0,), "the server has no beam search"),
    "min_keep": ((0,), "samplers keep at least one token"),
    "lora": (([],), "use the adapter's name as the model"),
    "parse_tool_calls": ((True,), "tool calls are always read"),
    "post_sampling_probs": ((False,), "log-probabilities are the model's own"),
    "spaces_between_special_tokens": ((True, False), "tokens are joined as they are"),
    **dict.fromkeys(
        ("t_max_predict_ms", "t_max_prompt_ms"), ((0, -1), "--deadline sets the server's time limit")
    ),
    "use_beam_search": ((False,), "the server has no beam search"),
}
# hints that cannot change an answer: taken and ignored
HINTS = frozenset(
    {
        "cache_prompt", "cache_salt", "context_management", "draft_model", "id_slot", "keep_alive",
        "metadata", "n_cache_reuse", "n_keep", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "provider", "request_id", "ttl",
        "safety_identifier", "service_tier", "sse_ping_interval", "store", "user", "verbose", "verbosity",
    }
)  # fmt: skip
_OTHER_FORM = {"max_tokens", "logprobs", "prompt_logprobs"}  # and name, at each endpoint
SAME_FORM = {name for name, facts in FACTS.items() if facts.kind != "object"} - _OTHER_FORM
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]  # those of MCP too
MAX_IDS = 2**20  # longest prompt given as token ids
MaxTokens = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _form_of(value: Any) -> str:
    """The name of a content's form; errors leave it out."""
    return "str" if isinstance(value, str) else TEXT_OR_LIST


Parts = TypeVar("Parts")
TextOr = Annotated[  # a content: one text, or a list
    Annotated[str, Tag("str")] | Annotated[Parts, Tag(TEXT_OR_LIST)], Discriminator(_form_of)
]


class StreamOptions(Body):
    """Options of a stream."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: the counts so far, in each chunk


class UsageOption(Body):
    """Whether an answer tells its usage, as one that is no stream always does."""

    include: bool | None = None


class StructuredOutputs(Body):
    """The form of an answer, as vLLM spells it: one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=10_000)] | None
    ) = None
    grammar: Annotated[str, Field(min_length=1)] | None = None  # Lark or GBNF

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1 or None in (getattr(self, n) for n in self.model_fields_set):
            raise RequestError(
                "exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar' is required",
                param="structured_outputs",
            )
        return self

    def as_grammar(self) -> Grammar:
        """The grammar. Raises RequestError if its source is too long, or no schema."""
        param = "structured_outputs"
        if self.regex is not None:
            return Grammar.regex(self.regex, param=param)
        if self.choice is not None:
            return Grammar.choice(self.choice, param=param)
        if self.grammar is not None:
            return Grammar.text(self.grammar, param=param)
        return Grammar.json(self.json_, param=param)


@with_sampling(name for name in FACTS if name in SAME_FORM - {"n", "best_of", "stop"})
class Sampling(Body):
    """Sampling parameters, as `kukri.sampling.params` declares them, and what all chats and texts share."""

    aliases: ClassVar[Aliases] = SAMPLING_ALIASES
    model: str | None = None
    stream: bool | None = None
    user: str | None = None  # the user of the request: the queue is fair among those of a key
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None  # the lower the earlier
    structured_outputs: StructuredOutputs | None = None
    if TYPE_CHECKING:
        logit_bias: dict[str, float] | None

    @model_validator(mode="before")
    @classmethod
    def _name_samplers(cls, data: Any) -> Any:
        """Give samplers kukri's names."""
        if not isinstance(data, dict) or "samplers" not in data:
            return data
        return {**data, "samplers": sampler_names(data["samplers"])}

    def sampling(self, **others: Any) -> dict[str, Any]:
        """The fields of SamplingParams that are set; `others` are those that endpoints name differently.

        Raises RequestError on a bias of no token id.
        """
        given = {name: getattr(self, name, None) for name in SAME_FORM}
        given["logit_bias"] = self.token_bias()
        both = (*given.items(), *others.items())
        return {"max_tokens": None, **{name: value for name, value in both if value is not None}}

    def token_bias(self) -> dict[int, float] | None:
        """The bias by token id. Raises RequestError on a key that is not an id."""
        return _token_bias(self.logit_bias)

    @property
    def form(self) -> Grammar | None:
        """The grammar of `structured_outputs`."""
        return self.structured_outputs.as_grammar() if self.structured_outputs is not None else None


@with_sampling(["n", "stop"])
class GenerationBody(Sampling):
    """Fields of chat and text completions."""

    adapter: str | None = None  # a LoRA adapter; or its name is the model's
    if TYPE_CHECKING:
        n: int | None
    grammar: str | None = None  # as llama.cpp spells structured_outputs.grammar; "" is like None
    json_schema: dict[str, Any] | None = None  # as it spells structured_outputs.json
    stream_options: StreamOptions | None = None
    usage: UsageOption | None = None  # as OpenRouter has it: stream_options.include_usage, of streams
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # for each token of the prompt
    return_token_ids: bool | None = None  # those of prompt and answer
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens `token_id:17`
    timings_per_token: bool | None = None  # as llama.cpp has it: `timings` in each chunk and in the whole
    verbose: bool | None = None  # as llama.cpp has it: `__verbose` tells the prompt and all settings
    return_progress: bool | None = None  # as llama.cpp has it: chunks of `prompt_progress` before the answer
    interventions: Interventions | None = None

    @property
    def form(self) -> Grammar | None:
        """The grammar of `structured_outputs`, `grammar` or `json_schema`. Raises RequestError on two."""
        text = Grammar.text(self.grammar) if self.grammar else None
        schema = None if self.json_schema is None else Grammar.json(self.json_schema, param="json_schema")
        return only_grammar([super().form, text, schema])

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationBody:
        if self.usage is not None and self.usage.include and self.stream:
            self.stream_options = self.stream_options or StreamOptions()
            self.stream_options.include_usage = True
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise RequestError.of("stream_options", 'requires "stream": true')
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError.of("prompt_logprobs", "cannot be combined with 'stream'")
        return self


class TextPart(Piece):
    """A part of a message: text."""

    type: Literal["text"]
    text: str


class RefusalPart(Piece):
    """A part of an answer: the text of a refusal."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(Piece):
    """A part of another type: its text, as those of responses have, an image, or what cannot be read."""

    type: str
    text: str | None = None
    # an image's fields; a model that sees none does not look at them
    image_url: Any = None
    detail: Any = None
    image_tokens: Any = None


def part_kind(value: Any) -> str:
    """The tag of a part that is read, by its type, or that of other parts. Errors leave it out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if kind in ("text", "refusal") else "@other"


Part = Annotated[
    Annotated[TextPart, Tag("@text")]
    | Annotated[RefusalPart, Tag("@refusal")]
    | Annotated[OtherPart, Tag("@other")],
    Discriminator(part_kind),
]


class FunctionCall(Piece):
    """The call of an earlier turn."""

    name: str
    arguments: str


class ToolCall(Piece):
    """A tool call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Piece):
    """A message of a conversation. Of an assistant without text, its refusal is the content."""

    refused: ClassVar[Refused] = {"function_call": ((), "use 'tool_calls'")}
    role: str  # one of the template's
    content: TextOr[list[Part]] | None = None
    name: str | None = None  # for templates that print it
    refusal: str | None = None
    audio: dict[str, Any] | None = None  # from an earlier answer of another server
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def as_dict(self, param: str = "messages", *, is_new: bool = False) -> dict[str, Any]:
        """The message as chat templates read it. Raises RequestError on what cannot be read in a new turn."""
        message = self.model_dump(exclude_none=True, exclude={"content", "refusal", "audio", "reasoning"})
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        content: Any = self.refusal
        if isinstance(self.content, list):
            is_asked = is_new and self.role != "tool"
            pieces = [
                piece_of(part, f"{param}.content[{i}]", is_asked) for i, part in enumerate(self.content)
            ]
            content = content_of(pieces)
        elif self.content is not None:
            content = self.content
        if content is None and self.audio is not None:
            content = note("audio", f"{param}.audio", is_new=False)
        if content is not None:
            message["content"] = content
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        return message


def piece_of(part: TextPart | RefusalPart | OtherPart, param: str, is_new: bool) -> str | dict[str, Any]:
    """The text of a part, or an image for the template. Raises RequestError on what no model reads here."""
    if isinstance(part, RefusalPart):
        return part.refusal
    if part.text is not None:
        return part.text
    if part.type in IMAGE_TYPES:
        given = part.model_dump(exclude_none=True, exclude={"type"})
        return client_image(part.type, param, **given)
    return note(part.type, param, is_new=is_new)


def client_image(kind: str, param: str, **given: Any) -> dict[str, Any]:
    """An image that a client sent, among the parts of a message: `data` in base64, or an `image_url`.

    The type `kind` is what the client called it, and `param` where.
    """
    return {**given, "type": "image", "kind": kind, "param": param}


def content_of(pieces: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content of texts on lines of their own, or of parts if images are among them."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return "\n".join(texts)
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates read them. Raises RequestError."""
    newest = newest_turn([message.role for message in messages])
    return [message.as_dict(f"messages[{i}]", is_new=i >= newest) for i, message in enumerate(messages)]


def tool_type(value: Any) -> str | None:
    """The type of a tool, which may be a body or a model of one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


class Function(Piece):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Piece):
    """A tool: functions are the one kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called, in the form of chats, or in that of responses."""

    type: Literal["function"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        """Takes the form of responses, in which the name has no level of its own."""
        if isinstance(data, dict) and "name" in data and "function" not in data:
            return {key: value for key, value in data.items() if key != "name"} | {
                "function": {"name": data["name"]}
            }
        return data


class JsonSchema(Body):
    """A schema; `strict` or not, answers follow it."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None  # which no answer shows
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer; `schema` next to the type is llama.cpp's spelling."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "'json_schema' is required for the type \"json_schema\", and not supported for others",
                param="response_format",
            )
        if self.schema_ is not None and self.type != "json_object":
            raise RequestError(
                f"'schema' is not supported for the type {self.type!r}: use the type 'json_object'",
                param="response_format",
            )
        return self

    def as_grammar(self) -> Grammar | None:
        """The grammar; None for plain text."""
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return None if self.type == "text" else Grammar.json(schema, param="response_format")


class Prediction(Body):
    """A text that the answer may resemble: drafts are looked up in it."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ThinkingSwitch(Piece):
    """Whether to reason, as Anthropic's and Z.ai's APIs spell it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    BeforeValidator(lambda value: "required" if value == "any" else value),  # Mistral's word for it
]


class ReasoningOption(Body):
    """Whether and how much to reason, as OpenRouter spells it."""

    place = "reasoning."
    refused: ClassVar[Refused] = {"exclude": ((False,), "reasoning is always shown")}
    ignored = frozenset({"summary"})
    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    enabled: bool | None = None


class ChatBody(GenerationBody):
    """A request to /v1/chat/completions."""

    aliases: ClassVar[Aliases] = CHAT_ALIASES
    refused: ClassVar[Refused] = {
        **ELSEWHERE,
        "audio": ((), TEXT_ONLY),
        "add_special_tokens": ((False,), "the chat template has them"),
        "best_of": ((1,), "use n"),
        "echo": ((False,), "a conversation is not repeated"),
        "function_call": (("none", "auto"), "use 'tool_choice'"),
        "functions": (([],), "use 'tools'"),
        "modalities": ((["text"],), TEXT_ONLY),
        "moderation": ((), "the server has no moderation"),
        "reasoning_format": (("auto", "deepseek"), "reasoning is returned as 'reasoning_content'"),
        "web_search_options": ((), "the server does not search the web"),
    }
    ignored = HINTS
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer continues the last message
    skip_special_tokens: bool | None = None  # False: what is left of control tokens is shown
    chat_template_kwargs: dict[str, Any] | None = None
    # other servers' spellings of whether to reason: they set chat_template_kwargs and the effort
    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: ReasoningOption | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None  # tokens; then the answer begins
    num_ctx: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None  # Ollama's: tokens of prompt and answer

    @model_validator(mode="before")
    @classmethod
    def _with_logprobs(cls, data: Any) -> Any:
        """Take llama.cpp's `n_probs`, which asks for log-probabilities by itself."""
        return {"logprobs": True, **data} if isinstance(data, dict) and data.get("n_probs") else data

    @property
    def thinks(self) -> bool | str | None:
        """Whether to reason, or the effort, by the first of these fields that is set; None for none."""
        thinking = (
            self.thinking.type != "disabled" if isinstance(self.thinking, ThinkingSwitch) else self.thinking
        )
        enabled = self.reasoning.enabled if self.reasoning is not None else None
        said = (self.enable_thinking, self.think, thinking, enabled)
        return next((one for one in said if one is not None), None)

    @property
    def effort(self) -> str | None:
        """The reasoning effort; None if the body does not say."""
        thinks = self.thinks
        said = {None: None, True: "medium", False: "none"}.get(thinks, thinks)  # type: ignore[arg-type]
        theirs = None if self.reasoning is None else self.reasoning.effort
        return self.reasoning_effort or theirs or said

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of the reasoning."""
        said = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingSwitch) else None
        theirs = None if self.reasoning is None else self.reasoning.max_tokens
        budgets = (self.thinking_token_budget, said, theirs)
        return next((one for one in budgets if one is not None), None)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the template. Those that the client named win."""
        thinks = self.thinks
        said = {} if thinks is None else dict.fromkeys(("enable_thinking", "thinking"), thinks is not False)
        return said | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _agrees(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError.of(
                "max_tokens", "cannot be combined with another 'max_completion_tokens': give one"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError.of("top_logprobs", 'requires "logprobs": true')
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError.of("continue_final_message", "cannot be combined with 'add_generation_prompt'")
        return self


MAX_PROMPTS = 1024
TokenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_IDS)]


@with_sampling(["best_of"])
class CompletionBody(GenerationBody):
    """A request to /v1/completions."""

    aliases: ClassVar[Aliases] = TEXT_ALIASES
    refused: ClassVar[Refused] = {
        **ELSEWHERE,
        "add_special_tokens": ((True,), "the model's special tokens are always added to a text"),
    }
    ignored = HINTS - {"user"}
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    suffix: str | None = None  # the text after the answer, for models that fill in the middle
    parse_special: bool | None = None  # control tokens written in a prompt count, unless false
    if TYPE_CHECKING:
        best_of: int | None
    echo: bool | None = None
    skip_special_tokens: bool | None = None  # False: control tokens are part of the text
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> CompletionBody:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise RequestError.of("best_of", f"must be at least 'n' ({n}), not {best_of}")
        if best_of is not None and best_of > n and self.stream:
            raise RequestError.of("best_of", "cannot be combined with 'stream'")
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            raise RequestError.of(
                "suffix", "requires a prompt that is a text, and cannot be combined with 'echo'"
            )
        return self


class LoadAdapterBody(Body):
    """A request to /v1/load_lora_adapter, as vLLM spells it."""

    lora_name: Annotated[str, Field(pattern=r"^[^\s=]{1,200}$")]
    lora_path: Annotated[str, Field(min_length=1, max_length=1000)]  # within the adapter directory
    model: str | None = None  # the model that it is for, of several
    refused: ClassVar[Refused] = {"load_inplace": ((False,), "unload the adapter first")}


class UnloadAdapterBody(Body):
    """A request to /v1/unload_lora_adapter, as vLLM spells it."""

    lora_name: str
    ignored = frozenset({"lora_int_id"})


def only_grammar(grammars: Iterable[Grammar | None]) -> Grammar | None:
    """The one grammar among those that a body gives, None for none. Raises RequestError on two."""
    found = [grammar for grammar in grammars if grammar is not None]
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise RequestError(f"{names} cannot be combined: give one", param=found[0].param)
    return found[0] if found else None


def _token_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    joined = ",".join(bias)  # looked at in one go: there may be thousands
    if joined.count(",") >= len(bias) or not _TOKEN_IDS.fullmatch(joined):
        wrong = [key for key in bias if not _TOKEN_ID.fullmatch(key)]
        message = f"the keys of 'logit_bias' must be token ids, not {brief(', '.join(wrong[:5]))}"
        raise RequestError(message, param="logit_bias")
    return dict(zip(map(int, bias), bias.values(), strict=True))
