"""The messages of a conversation as chat templates expect them: checked, with texts and objects in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kukri.errors import RequestError

ROLES = ("system", "user", "assistant", "tool", "developer")

Message = Mapping[str, Any]


def note(kind: str, param: str, *, is_new: bool) -> str:
    """Return the text that replaces a part which the model cannot read, such as "[image]".

    Raises RequestError, naming `param`, if the part is in the newest turn: the answer would be about it.
    """
    if is_new:
        raise RequestError.of(
            param,
            f"must not be of type {kind[:50]!r}: the model reads and writes only text",
            code="unsupported_content",
        )
    return f"[{kind.removeprefix('input_').removesuffix('_url').replace('_', ' ')[:50]}]"


def newest_turn(roles: Sequence[str]) -> int:
    """The index of the first message of the newest turn, which is after all answers."""
    return len(roles) - next((i for i, role in enumerate(reversed(roles)) if role == "assistant"), len(roles))


def checked_messages(messages: Sequence[Message], roles: frozenset[str]) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them. Raises RequestError naming a wrong part.

    What an assistant wrote and what a tool returned is always taken: without content it is empty, and
    arguments that are not a JSON object are kept as text. A call without text has the content None.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError.of("messages", "must be a list with at least one message")
    newest = newest_turn([str(message.get("role")) for message in messages if isinstance(message, Mapping)])
    return [
        _checked(message, f"messages[{i}]", roles, is_new=i >= newest) for i, message in enumerate(messages)
    ]


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return copies of the tools. Raises RequestError unless every tool is an object."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError.of("tools", "must be a list of objects")
    return [dict(tool) for tool in tools]


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call; text that is not a JSON object, such as one cut off, under the key `_raw`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_raw": text}


def _checked(message: Message, param: str, roles: frozenset[str], *, is_new: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be an object, not {type(message).__name__}", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise RequestError(f"'role' must be one of {', '.join(ROLES)}, not {role!r}", param=f"{param}.role")
    checked = dict(message)
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _checked_calls(message["tool_calls"], f"{param}.tool_calls")
    if message.get("content") is not None:
        is_asked = is_new and role != "tool"
        checked["content"] = _checked_content(message["content"], f"{param}.content", is_new=is_asked)
    elif role == "assistant" and message.get("tool_calls"):
        checked["content"] = None
    elif role in ("assistant", "tool"):
        checked["content"] = ""
    else:
        raise RequestError(f"a message of the {role} must have content", param=f"{param}.content")
    return checked


def _checked_content(content: Any, param: str, *, is_new: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"'content' must be text or a list of parts, not {type(content).__name__}", param=param
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(kind, str) else None
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(kind, str) and kind not in ("text", "refusal"):
            texts.append(note(part.get("kind") or kind, part.get("param") or f"{param}[{i}]", is_new=is_new))
        else:
            raise RequestError(
                'a part of content must be {"type": "text", "text": ...}, because the model reads only text',
                param=f"{param}[{i}]",
            )
    return "\n".join(texts)


def _checked_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, the form that templates print."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError("'tool_calls' must be a list of objects", param=param)
    checked = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = arguments_object(function["arguments"])
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(dict(call))
    return checked
