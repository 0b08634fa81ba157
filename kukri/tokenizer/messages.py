"""The messages of a conversation as chat templates expect them: checked, with texts and objects in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kukri.errors import RequestError

ROLES = ("system", "user", "assistant", "tool", "developer")

Message = Mapping[str, Any]


def checked_messages(messages: Sequence[Message], roles: frozenset[str]) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them. Raises RequestError naming a wrong part.

    What an assistant wrote and what a tool returned is always taken: without content it is empty, and
    arguments that are not a JSON object are kept as text. A call without text has the content None.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return [_checked(message, f"messages[{i}]", roles) for i, message in enumerate(messages)]


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies of the tools. Raises RequestError unless each is an object."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    return [dict(tool) for tool in tools]


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call; text that is not a JSON object, such as one cut off, under the key `_raw`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_raw": text}


def _checked(message: Message, param: str, roles: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be an object, not {type(message).__name__}", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise RequestError(f"{role!r} is not a role; roles are {', '.join(ROLES)}", param=f"{param}.role")
    checked = dict(message)
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _checked_calls(message["tool_calls"], f"{param}.tool_calls")
    if message.get("content") is not None:
        checked["content"] = _checked_content(message["content"], f"{param}.content")
    elif role == "assistant" and message.get("tool_calls"):
        checked["content"] = None
    elif role in ("assistant", "tool"):
        checked["content"] = ""
    else:
        raise RequestError(f"a message of the {role} must have content", param=f"{param}.content")
    return checked


def _checked_content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"content must be text or a list of parts, not {type(content).__name__}", param=param
        )
    texts = []
    for i, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                'a part of content must be {"type": "text", "text": ...}: the model reads only text',
                param=f"{param}[{i}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, the form that templates print."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError("tool_calls must be a list of objects", param=param)
    checked = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = arguments_object(function["arguments"])
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(dict(call))
    return checked
