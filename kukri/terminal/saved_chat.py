"""Conversations in files: of /save and /load, and the last one, which `kukri chat --resume` continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kukri.dataclass import dataclass, field
from kukri.errors import RequestError
from kukri.host.private_files import write_private

ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


@dataclass(frozen=True)
class SavedChat:
    """A conversation, the model that it was held with, and where its prefix was saved."""

    messages: list[Message]
    name: str = field(default="", kw_only=True)  # the model's
    path: str | None = field(default=None, kw_only=True)
    prefix_dir: str | None = field(default=None, kw_only=True)


def last_chat() -> Path:
    """The file of the last conversation, in the user's state directory."""
    from platformdirs import user_state_path

    return user_state_path("kukri") / "last_chat.json"


def read_chat(path: Path) -> SavedChat:
    """A saved conversation. Raises RequestError for any other file, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        messages = [_read(message) for message in found["messages"]]
        texts = [found.get(name) for name in ("path", "prefix_dir")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{path} must be a saved conversation") from None
    if not all(text is None or isinstance(text, str) for text in texts):
        raise RequestError(f"{path} must be a saved conversation")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES[0 if i == 0 else 1 :] or not _is_content(message["content"]):
            raise RequestError(f"{path} must be a saved conversation: message {i + 1} is wrong")
    return SavedChat(messages, path=texts[0], prefix_dir=texts[1])


def _read(message: Message) -> Message:
    """The parts of a message that a conversation is continued with."""
    reasoning = message.get("reasoning_content")
    thoughts = {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
    return {"role": message["role"], "content": message["content"], **thoughts}


def _is_content(content: Any) -> bool:
    """True for a text, or for texts and images."""
    if isinstance(content, str):
        return True
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return False
    return all(isinstance(part.get("text"), str) or part.get("type") == "image_url" for part in content)


def write_chat(path: Path, chat: SavedChat, *, replaces: bool) -> None:
    """Writes a conversation, readable only by its owner, whole or not at all.

    Raises RequestError if it cannot be written, or if there is such a file and `replaces` is false.
    """
    if not replaces and path.exists():
        raise RequestError(f"{path} already exists: choose another name")
    facts = {
        "model": chat.name,
        "path": chat.path,
        "prefix_dir": chat.prefix_dir,
        "messages": chat.messages,
    }
    try:
        write_private(path, (json.dumps(facts, ensure_ascii=False, indent=2) + "\n").encode())
    except OSError as error:
        raise RequestError(f"{path} cannot be used: {error.strerror}") from None
