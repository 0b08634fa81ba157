"""The tools of a response request as functions of the model, and calls of these as the client's tools.

A `namespace` is flattened: its tools carry its name in theirs. A `custom` tool takes a text: it becomes a
function with one parameter. Hosted tools are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kukri.dataclass import dataclass, field
from kukri.errors import RequestError
from kukri.server.chat.request import ToolChoice
from kukri.server.openai.responses_schema import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedChoice,
    NamespaceTool,
    ResponseBody,
    ResponseTool,
)
from kukri.tokenizer import arguments_object

INPUT = "input"  # the parameter of the function that a custom tool becomes


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def shown(self, arguments: str) -> dict[str, Any]:
        """The fields of a call's item that tell what is called with what."""
        named = (
            {"name": self.name}
            if self.namespace is None
            else {"name": self.name, "namespace": self.namespace}
        )
        return (
            {**named, "input": custom_input(arguments)}
            if self.is_custom
            else {**named, "arguments": arguments}
        )


@dataclass
class ResponseTools:
    """The tools of a request. `tools` has the client's by the model's names, `left_out` the hosted ones."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    tools: dict[str, ClientTool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, body: ResponseBody) -> ResponseTools:
        """The tools of a body. Raises RequestError if a flattened name is too long."""
        made = cls()
        made._add(body.tools or ())
        return made

    def chosen(self, body: ResponseBody) -> tuple[ToolChoice, str | None]:
        """How to choose among them, and the one that has to be called; leaves what is not allowed out.

        Raises RequestError if a tool is chosen that is not there.
        """
        choice = body.tool_choice
        if isinstance(choice, NamedChoice):
            return "required", self._found(choice)
        if isinstance(choice, AllowedTools):
            allowed = {self._found(one) for one in choice.tools if one.type in ("function", "custom")}
            self.functions = [function for function in self.functions if function["name"] in allowed]
            return choice.mode, None
        return choice or "auto", None

    def _found(self, choice: NamedChoice) -> str:
        name = model_name(choice.name, choice.namespace)
        if name is None or name not in self.tools:
            message = f"'tool_choice' must name one of the tools, not {choice.name or choice.type!r}"
            raise RequestError(message, param="tool_choice", code="invalid_value")
        return name

    def _add(self, tools: Iterable[ResponseTool], namespace: str | None = None) -> None:
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                self._add(tool.tools, tool.name)
            elif isinstance(tool, FunctionTool | CustomTool):
                name = model_name(tool.name, namespace)
                assert name is not None, "it has a name"
                if len(name) > 128:
                    raise RequestError(f"the name {name[:40]!r}… must have up to 128 letters", param="tools")
                self.functions.append({**tool.as_function(), "name": name})
                self.tools[name] = ClientTool(tool.name, namespace, isinstance(tool, CustomTool))
            else:
                self.left_out.append(tool.type)


def model_name(name: str | None, namespace: str | None) -> str | None:
    """The name under which the model knows a tool."""
    if namespace is None or name is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of the function that a custom tool became."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets; that of a call which was cut off, or has another form, as it is."""
    given = arguments_object(arguments).get(INPUT)
    return given if isinstance(given, str) else arguments
