"""What a body asks of the form of its answer: a Grammar, a Toolbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.server.messages_schema import MessagesBody
from kukri.server.responses_schema import ResponseBody
from kukri.server.schema import (
    ChatBody,
    ChatMessage,
    GenerationBody,
    NamedTool,
    StructuredOutputs,
)
from kukri.server.tool_dialects import ToolDialect
from kukri.server.tools import Toolbox


def grammar_of(body: GenerationBody | ResponseBody | MessagesBody) -> Grammar | None:
    """The grammar that a body asks for, if any. Raises RequestError where it asks for two."""
    found = [_of_structured_outputs(body.structured_outputs)]
    if isinstance(body, ChatBody) and body.response_format is not None:
        given = body.response_format
        schema = given.json_schema.schema_ if given.json_schema is not None else None
        found.append(_of_format(given.type, schema, "response_format"))
    if isinstance(body, ResponseBody) and body.text is not None and body.text.format is not None:
        found.append(_of_format(body.text.format.type, body.text.format.schema_, "text.format"))
    if isinstance(body, MessagesBody) and body.output_config and body.output_config.format:
        found.append(Grammar.json(body.output_config.format.schema_, param="output_config.format"))
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars)
        raise RequestError(f"{names} both say what the answer has to be: give one", param=grammars[0].param)
    return grammars[0] if grammars else None


def _of_format(kind: str, schema: dict[str, Any] | None, param: str) -> Grammar | None:
    return None if kind == "text" else Grammar.json(schema if kind == "json_schema" else None, param=param)


def _of_structured_outputs(given: StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    param = "structured_outputs"
    if given.json_ is not None:
        return Grammar.json(given.json_, param=param)
    if given.regex is not None:
        return Grammar.regex(given.regex, param=param)
    if given.choice is not None:
        return Grammar.choice(given.choice, param=param)
    if given.grammar is not None:
        return Grammar.text(given.grammar, param=param)
    return Grammar.json(param=param)


def toolbox_of(body: ChatBody, dialect: ToolDialect | None) -> Toolbox | None:
    """The tools that a body lets the model call; None for none.

    Raises RequestError where the model's chat template, whose dialect is given, knows no tools.
    """
    reads_code = bool((body.chat_template_kwargs or {}).get("python_tools"))
    if body.tool_choice == "none" or not (body.tools or reads_code):
        return None
    if dialect is None:
        raise RequestError(
            "the model's chat template knows no tools, or kukri not the way in which it calls them",
            param="tools" if body.tools else "chat_template_kwargs",
            code="unsupported_parameter",
        )
    choice = body.tool_choice
    functions = [tool.function for tool in body.tools or ()]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    return Toolbox(
        replace(dialect, reads_code=reads_code),
        [function.model_dump(exclude_none=True) for function in functions],
        many=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
        required=choice == "required" or isinstance(choice, NamedTool),
        is_strict=any(function.strict for function in functions),
    )


def templates_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools as chat templates print them."""
    if not body.tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools]


def messages_of(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it: the results of tools carry the names of their tools."""
    messages = [message.model_dump(exclude_none=True) for message in given]
    names = {
        call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())
    }
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def calls_in_texts(messages: Sequence[Mapping[str, Any]], dialect: ToolDialect) -> list[dict[str, Any]]:
    """The conversation with its calls at the end of the texts too, for templates that print no others.

    Arguments that are no JSON objects are left to the template to refuse.
    """
    written = []
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            with suppress(ValueError, AttributeError, RecursionError):
                given = [(f["name"], json.loads(f["arguments"] or "{}")) for f in functions]
                texts = [message.get("content") or "", dialect.written(given)]
                message["content"] = "\n".join(text for text in texts if text)
        written.append(message)
    return written
