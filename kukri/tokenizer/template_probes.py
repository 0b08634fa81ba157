"""What a chat template does with messages, found by rendering short conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from kukri.errors import KukriError
from kukri.tokenizer.template_process import TemplateFailure

_ARGUMENTS = {"x": 1}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "x"}}},
    },
}


class TemplateProbes:
    """Answers about a template, each rendered once. `render` takes messages and tools."""

    def __init__(self, render: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]) -> None:
        self._render = render
        self._shown: dict[tuple[str, ...], bool] = {}

    def shows(self, roles: Sequence[str]) -> bool:
        """True if the texts of messages of these roles all reach the prompt."""
        key = tuple(roles)
        if key not in self._shown:
            texts = [f"probe{i}" for i in range(len(key))]
            messages = [{"role": role, "content": text} for role, text in zip(key, texts, strict=True)]
            prompt = self._text(messages)
            self._shown[key] = prompt is not None and all(text in prompt for text in texts)
        return self._shown[key]

    @cached_property
    def takes_null(self) -> bool:
        """True if a call's message may have the content None: it changes nothing but where it is read."""
        null, empty = (self._text(_calling(content), [_TOOL]) for content in (None, ""))
        return null is not None and (empty is None or null.count("None") <= empty.count("None"))

    @cached_property
    def joins_arguments(self) -> bool:
        """True if the template wants the arguments of calls as JSON text: it joins them to texts."""
        as_object = self._text(_calling(""), [_TOOL])
        if as_object is not None and "'x'" not in as_object:
            return False
        as_text = self._text(_calling("", '{"x": 1}'), [_TOOL])
        return as_text is not None and '{"x": 1}' in as_text

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            return self._render(messages, tools)
        except (TemplateFailure, KukriError):
            return None


def _calling(content: str | None, arguments: Any = _ARGUMENTS) -> list[dict[str, Any]]:
    """A conversation with two calls, before and after the last question; templates may treat them apart."""
    question = {"role": "user", "content": "?"}
    function = {"name": "probe", "arguments": arguments}
    called = [{"id": "CALL00000", "type": "function", "function": function}]
    call = {"role": "assistant", "content": content, "tool_calls": called}
    result = {"role": "tool", "name": "probe", "tool_call_id": "CALL00000", "content": "1"}
    return [question, call, result, {"role": "assistant", "content": "!"}, question, call, result]
