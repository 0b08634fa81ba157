"""`ChatRequest`: one checked chat, whichever API it came by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kukri.dataclass import dataclass, field, replace
from kukri.dialects.dialect import Dialect
from kukri.dialects.toolbox import Toolbox
from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.server.preset import Preset

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A chat that `ServedModel.open` can run. `parse_chat`, `parse_response` and `parse_message` make them.

    `messages` are in OpenAI's form, as chat templates read them; `sampling` holds the fields of
    SamplingParams that the client set. With `tool_name`, `tool_choice` is "required". `names` maps the names
    of fields that errors speak of to those of the client's API.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    functions: Sequence[
        Mapping[str, Any]
    ] = ()  # name, description, parameters, strict, grammar: those that are set
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None  # the one function that has to be called
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None  # without tools
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the assistant's last message
    effort: str | None = None
    thinking_budget: int | None = None  # tokens
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    max_context: int | None = None  # tokens of prompt and answer
    model: str | None = None  # the name that the client gave, which may be an adapter's
    adapter: str | None = None
    interventions: Sequence[Mapping[str, Any]] = ()  # see kukri.interp.Intervention
    user: str = ""  # the queue is fair among users
    priority: int | None = None
    shows_control: bool = False  # control tokens are part of the text, but for those of reasoning and calls
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises RequestError if the tools do not agree with the rest."""
        names = [function["name"] for function in self.functions]
        if len(set(names)) < len(names):
            raise RequestError.of("tools", "must have different names", code="invalid_value")
        if self.tool_name is not None and self.tool_name not in names:
            raise RequestError.of("tool_choice", "must name one of the tools")
        if self.tool_choice == "required" and not names:
            raise RequestError("'tools' is required when 'tool_choice' asks for a call", param="tool_choice")
        if self.grammar is not None and self.uses_tools:
            param = self.grammar.param
            message = f'{param!r} cannot be combined with tools: leave one out, or set tool_choice to "none"'
            raise RequestError(message, param=param)

    @property
    def uses_tools(self) -> bool:
        """True if the model may call something: functions, or SmolLM3's Python tools."""
        return self.tool_choice != "none" and bool(self.functions or self.calls_python)

    @property
    def calls_python(self) -> bool:
        """True if calls may be written as Python code."""
        return bool(self.template_variables.get("python_tools"))

    @property
    def may_reason(self) -> bool:
        """False if the effort is "none", or the answer continues a message."""
        return self.effort != "none" and not self.continue_final_message

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template gets; None for none."""
        if not self.functions or self.tool_choice == "none":
            return None
        shown = [
            {key: value for key, value in function.items() if key not in ("strict", "grammar")}
            for function in self.functions
        ]
        return [{"type": "function", "function": function} for function in shown]

    def toolbox(self, dialect: Dialect) -> Toolbox | None:
        """The tools that the answer may call, in a model's dialect; None for none."""
        if not self.uses_tools:
            return None
        named = self.tool_name
        functions = [f for f in self.functions if named is None or f["name"] == named]
        return Toolbox(
            replace(dialect, reads_code=self.calls_python),
            functions,
            many=self.parallel_tool_calls and named is None,
            required=self.tool_choice == "required",
            is_strict=dialect.is_generic
            or any(function.get("strict") or function.get("grammar") for function in functions),
        )

    def with_preset(self, preset: Preset) -> ChatRequest:
        """Return the request with the preset's parts; a system message of its own replaces the preset's."""
        messages = list(self.messages)
        begins = bool(messages) and messages[0]["role"] in ("system", "developer")
        system = [messages.pop(0)] if begins else []
        if not begins and preset.system:
            system = [{"role": "system", "content": preset.system}]
        return replace(
            self,
            messages=[*system, *preset.messages, *messages],
            sampling=preset.under(self.sampling),
            adapter=self.adapter or preset.adapter,
            max_context=preset.max_context if self.max_context is None else self.max_context,
        )

    def error(self, error: RequestError) -> RequestError:
        """Renames an error's fields to those that the client sent."""
        head = re.match(r"\w*", error.param or "")
        if head is not None and head[0] in self.names:
            error.param = self.names[head[0]]
        text = str(error)
        for name, theirs in self.names.items():
            if "_" in name:  # others are words as well
                text = re.sub(rf"\b{name}\b", theirs, text)
        error.args = (text,)
        return error
