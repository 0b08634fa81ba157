"""Moves system and developer messages for which a chat template has no place, so that no message is lost.

Messages at the beginning are merged into one, or into the first user's message if the template knows no
system role. A later message joins the user's message next to it, so that the order of the texts, and with it
a cached prefix, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

SYSTEM_ROLES = ("system", "developer")
_MOST_PROBED = 4  # messages at the beginning; more are merged

Shows = Callable[[Sequence[str]], bool]


def placed(messages: list[dict[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return the messages in places where the template shows them all; unchanged if it shows no user's
    message.
    """
    if not any(message["role"] in SYSTEM_ROLES for message in messages) or not shows(["user"]):
        return messages
    n_lead = 0
    while n_lead < len(messages) and messages[n_lead]["role"] in SYSTEM_ROLES:
        n_lead += 1
    lead, rest = messages[:n_lead], messages[n_lead:]
    done = _beginning(lead, ["user"] if rest else [], shows) if lead else []
    before = _roles(done) if done and done[-1]["role"] in SYSTEM_ROLES else []
    following: list[str | None] = [None]  # the role after each message, without system messages
    for message in reversed(rest):
        following.append(following[-1] if message["role"] in SYSTEM_ROLES else message["role"])
    for message, after in zip(rest, following[::-1], strict=False):
        role = message["role"]
        if role in SYSTEM_ROLES:
            role = _later_role(role, before, done[-1]["role"], after, shows)
            before = before if role == "user" else [*before, "user", "assistant", role][:_MOST_PROBED]
            message = {**message, "role": role, "is_moved": role == "user"}
        done.append(message)
    return _joined(done)


def as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes only turns of user and assistant."""
    moved = [{**m, "role": "user"} if m["role"] in SYSTEM_ROLES else m for m in messages]
    return _joined([{**m, "is_moved": m["role"] in ("user", "assistant")} for m in moved])


def _beginning(lead: list[dict[str, Any]], after: list[str], shows: Shows) -> list[dict[str, Any]]:
    """Return the messages before the first turn, in the first of three forms that the template shows."""
    same = [{**message, "role": "system"} for message in lead]
    merged = {**same[0], "content": "\n\n".join(message["content"] for message in lead)}
    for form in (lead, same, [merged]):
        roles = _roles(form)
        if len(roles) <= _MOST_PROBED and shows([*roles, *after]):
            return form
    return [{**merged, "role": "user", "is_moved": True}]


def _later_role(role: str, before: list[str], previous: str, after: str | None, shows: Shows) -> str:
    """Return the role under which the template shows a later message: unchanged, "system" or "user"."""
    context = ["user"] if previous == "user" else ["user", "assistant"]
    following = [] if after is None else ["user" if after == "user" else "assistant"]
    for one in dict.fromkeys((role, "system")):
        if shows([*before, *context, one, *following]):
            return one
    return "user"


def _roles(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the roles in order, without a third of the same role in a row: templates treat it as the
    second.
    """
    return [role for role, run in groupby(message["role"] for message in messages) for role in list(run)[:2]]


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with moved messages joined to neighbours of the same role; calls stay separate."""
    joined: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # the texts of each, put together once
    is_open = False  # the last message may take the next one
    for message in messages:
        message = dict(message)
        is_moved = message.pop("is_moved", False)
        last = joined[-1] if joined else {"role": None}
        has_calls = message.get("tool_calls") or last.get("tool_calls")
        if last["role"] == message["role"] and not has_calls and (is_moved or is_open):
            joined[-1] |= message
            texts[-1].append(message["content"])
        else:
            joined.append(message)
            texts.append([message["content"]])
        is_open = is_moved
    for message, parts in zip(joined, texts, strict=True):
        message["content"] = parts[0] if len(parts) == 1 else "\n\n".join(parts)
    return joined
