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
    """Answers about a template, each rendered once. `render` takes messages and tools.

    `reads_parts` says that the template's source looks at the types of parts, or of something else.
    """

    def __init__(
        self,
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str],
        *,
        reads_parts: bool = True,
    ) -> None:
        self._render, self._reads_parts = render, reads_parts
        self._shown: dict[tuple[str, ...], bool] = {}

    def shows(self, roles: Sequence[str]) -> bool:
        """True if the texts of messages of these roles all reach the prompt."""
        key = tuple(roles)
        if key not in self._shown:
            texts = [f"probe{i}" for i in range(len(key))]
            contents: list[Any] = [[_text(text)] for text in texts] if self.wants_parts else texts
            messages = [{"role": role, "content": one} for role, one in zip(key, contents, strict=True)]
            prompt = self._text(messages)
            self._shown[key] = prompt is not None and all(text in prompt for text in texts)
        return self._shown[key]

    @cached_property
    def wants_parts(self) -> bool:
        """True if the template shows contents in parts and none that is a text, as some of images do."""
        if not self._reads_parts or "probe" in (self._text([{"role": "user", "content": "probe"}]) or ""):
            return False
        prompt = self._text([{"role": "user", "content": [_text("probe")]}]) or ""
        return "probe" in prompt and "'text'" not in prompt

    def takes_image(self, role: str, placeholder: str) -> bool:
        """True if the template writes the placeholder for an image in a message of that role."""
        key = (role, placeholder)
        if key not in self._shown:
            content = [{"type": "image"}, _text("probe")]
            if role == "tool":
                messages = _calling("")[:3]
                messages[-1]["content"] = content
            else:
                before = [{"role": "user", "content": [_text("?")]}] if role == "assistant" else []
                after = [{"role": "user", "content": [_text("?")]}] if role in ("system", "developer") else []
                messages = [*before, {"role": role, "content": content}, *after]
            prompt = self._text(messages)
            self._shown[key] = (
                prompt is not None
                and prompt.count(placeholder) == 1
                and "probe" in prompt
                and "'text'" not in prompt
            )
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


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _calling(content: str | None, arguments: Any = _ARGUMENTS) -> list[dict[str, Any]]:
    """A conversation with two calls, before and after the last question; templates may treat them apart."""
    question = {"role": "user", "content": "?"}
    function = {"name": "probe", "arguments": arguments}
    called = [{"id": "CALL00000", "type": "function", "function": function}]
    call = {"role": "assistant", "content": content, "tool_calls": called}
    result = {"role": "tool", "name": "probe", "tool_call_id": "CALL00000", "content": "1"}
    return [question, call, result, {"role": "assistant", "content": "!"}, question, call, result]
