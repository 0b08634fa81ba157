"""The system message that a conversation begins with, unless the user gives one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kukri.tokenizer import ChatTemplate

# After the one that SmolLM2's template puts in, plain questions may be near ties that rounding decides:
# see docs/decisions/serving-and-scale.md
DEFAULT_SYSTEM = "You are a helpful AI assistant."


def opening(template: ChatTemplate, system: str = DEFAULT_SYSTEM) -> list[dict[str, str]]:
    """The system message of a new conversation, if any.

    DEFAULT_SYSTEM is left out if the model's template takes no system message; without one, a template may
    add its own.
    """
    if not system or (system == DEFAULT_SYSTEM and not template.takes_system_message()):
        return []
    return [{"role": "system", "content": system}]
