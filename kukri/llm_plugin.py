"""kukri in the command-line program llm (https://llm.datasette.io): `llm -m kukri "Hello"`.

llm finds this by its entry point and is the only one to import it; the extra `llm` of kukri has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import llm
from llm.parts import AttachmentPart, TextPart
from pydantic import Field, create_model

from kukri import LLM, Grammar, SamplingParams
from kukri.calls.system_message import opening
from kukri.sampling.fields import facts_of

_MAX_TOKENS = 512


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Called by llm when it starts: costs nothing until the model is asked."""
    register(Kukri())


def _options() -> Any:
    """Options of `kukri run`; the model has defaults."""
    kinds = {"number": float, "integer": int, "switch": bool}
    fields: dict[str, Any] = {
        name: (
            kinds[facts.kind] | None,
            Field(default=_MAX_TOKENS if name == "max_tokens" else None, description=facts.help),
        )
        for name, facts in facts_of(SamplingParams)
        if facts.flags and facts.kind in kinds
    }
    model = Field(default=None, description="A known name, org/repo[:type] or a path")
    return create_model("Options", __base__=llm.Options, model=(str | None, model), **fields)


class Kukri(llm.Model):
    """Any model that kukri runs, in llm's own process; it stays loaded while that lives. Not for threads."""

    model_id = "kukri"
    can_stream = True
    supports_schema = True
    attachment_types = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"})

    Options = _options()

    def __init__(self) -> None:
        self._loaded: dict[str | None, LLM] = {}

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """The pieces of the answer to a conversation. A KukriError becomes llm's own line."""
        options: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
        engine = self._load(options.pop("model", None))
        messages = [{"role": message.role, "content": _content(message.parts)} for message in prompt.messages]
        if not messages or messages[0]["role"] != "system":
            messages = [*opening(engine.chat_template), *messages]
        schema: Any = prompt.schema  # llm makes a dict of a class
        grammar = Grammar.json(schema) if schema else None
        for chunk in engine.stream(messages, grammar=grammar, **options):
            yield chunk.text
            if chunk.result is not None:
                timings = chunk.result.timings
                response.set_usage(input=timings.n_prompt_tokens, output=timings.n_generated)

    def _load(self, model: str | None) -> LLM:
        if model not in self._loaded:
            for other in list(self._loaded):
                self._loaded.pop(other).close()
            self._loaded[model] = LLM(model)
        return self._loaded[model]


def _content(parts: list[Any]) -> Any:
    """The texts of a message, or its parts if images are attached, which llm puts after the text."""
    images = [
        {"type": "image", "image": _bytes_of(part.attachment), "param": "attachment"}
        for part in parts
        if isinstance(part, AttachmentPart) and part.attachment is not None
    ]
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return [*images, {"type": "text", "text": text}] if images else text


def _bytes_of(attachment: Any) -> Any:
    """The bytes of a file, or at a URL, which llm has checked and reads itself."""
    return attachment.content_bytes()
