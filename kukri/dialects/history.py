"""Calls and results of earlier turns, as a model's chat template prints all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from kukri.dialects.dialect import MARK, Around, Dialect
from kukri.dialects.families import introduction
from kukri.tokenizer import arguments_object
from kukri.tokenizer.messages import note

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_TOOLS_OF_MESSAGE = re.compile(r"""\bmessage(?:\.tools|\[["']tools["']\])""")


def readable(
    messages: Messages, tools: Tools, dialect: Dialect, source: str, *, reads_code: bool, controls: str = ""
) -> list[dict[str, Any]]:
    """The messages in a form of which the template `source` prints everything.

    Results carry the names of their tools. Calls are written into the texts if the template would leave them
    out, between `controls` where they are control tokens, and one by one if it takes one in a message. For a
    template that knows no tools, the system message shows them and results are the user's.
    """
    named = _with_tool_names(messages)
    if dialect.is_generic:
        return _without_tool_roles(_with_calls_in_texts(named, dialect), tools)
    if dialect.most_calls == 1:
        named = _one_call_each(named)
    if "tool_calls" not in source and not dialect.begins_bare:
        written = replace(dialect, around=_between(dialect.around, controls), reads_code=reads_code)
        named = _with_calls_in_texts(named, written)
    if tools and _TOOLS_OF_MESSAGE.search(source):
        named = _with_tools_in_system_message(named, tools)
    return named


def _with_tool_names(messages: Messages) -> list[dict[str, Any]]:
    """Copies of the messages; the result of a tool carries the name of its tool."""
    copies = [dict(message) for message in messages]
    names = {
        call["id"]: call["function"]["name"] for message in copies for call in message.get("tool_calls", ())
    }
    for message in copies:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return copies


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those with several calls as several, each followed by its result."""
    results = {m["tool_call_id"]: m for m in messages if m["role"] == "tool" and m.get("tool_call_id")}
    found: list[dict[str, Any]] = []
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            if message.get("tool_call_id") not in moved:
                found.append(message)
            continue
        for i, call in enumerate(calls):
            found.append({**message, "tool_calls": [call]} | ({"content": ""} if i else {}))
            if call["id"] in results:
                found.append(results[call["id"]])
                moved.add(call["id"])
    return found


def _between(around: Around, controls: str) -> Around:
    """The marks around calls, each between two `controls`."""
    marked = f"{controls}\\g<0>{controls}"
    return Around(**{field.name: MARK.sub(marked, getattr(around, field.name)) for field in fields(around)})


def _with_calls_in_texts(messages: Messages, dialect: Dialect) -> list[dict[str, Any]]:
    """The messages with their calls at the end of the texts too."""
    written = []
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            given = [(f["name"], arguments_object(f["arguments"])) for f in functions]
            texts = [_text(message), dialect.written(given)]
            message["content"] = "\n".join(text for text in texts if text)
            if dialect.is_generic:
                del message["tool_calls"]
        written.append(message)
    return written


def _with_tools_in_system_message(messages: list[dict[str, Any]], tools: Messages) -> list[dict[str, Any]]:
    """The messages, the first one the system's, with the functions as JSON in its field `tools`."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _without_tool_roles(messages: Sequence[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The messages with tools in the system message, and their results in messages of the user."""
    plain: list[dict[str, Any]] = []
    if tools:
        is_first = messages[0]["role"] in ("system", "developer")
        given = [_text(messages[0])] if is_first else []
        messages = messages[1:] if is_first else messages
        plain = [{"role": "system", "content": "\n\n".join([*given, introduction(tools)])}]
    is_open = False  # the last message holds results, which the user's next message joins
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            content = _together("<tool_response>\n", _content(message), "\n</tool_response>")
            message = {"role": "user", "content": content}
        if is_open and message["role"] == "user":
            plain[-1]["content"] = _together(plain[-1]["content"], "\n", _content(message))
        else:
            plain.append(message)
        is_open = is_result
    return plain


def _together(*pieces: str | list[Any]) -> str | list[Any]:
    """Contents one after another: a text, or parts if one of them has any."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return "".join(texts)
    parts: list[Any] = []
    for piece in pieces:
        parts += [{"type": "text", "text": piece}] if isinstance(piece, str) else piece
    return parts


def _content(message: Mapping[str, Any]) -> str | list[Any]:
    """The content of a message: its text, or its parts if one is an image, to be refused or noted later."""
    content = message.get("content") or ""
    has_others = not isinstance(content, str) and any("text" not in part for part in content)
    return list(content) if has_others else _text(message)


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message, its parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if "text" in part else note(part["type"], "messages", is_new=False) for part in content
    )
