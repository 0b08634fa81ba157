"""The bodies of /tokenize, /detokenize and /apply-template, as vLLM and llama.cpp have them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kukri.errors import RequestError
from kukri.server.body import Body
from kukri.server.schema import MAX_IDS, ChatMessage, Tool


class PromptText(Body):
    """The conversation of /tokenize and /apply-template."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        """The options of `ChatPrompts.encode` and `render`."""
        return {
            "variables": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None,
        }


class TokenizeBody(PromptText):
    """A request to /tokenize: `prompt` or `messages` as vLLM has them, or `content` as llama.cpp has it."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True  # to a prompt
    add_special: bool = False  # to a content
    parse_special: bool = True  # control tokens written in either count
    return_token_strs: bool = False
    with_pieces: bool = False  # each token with its text

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if sum(given is not None for given in (self.prompt, self.content, self.messages)) != 1:
            raise RequestError("one of 'prompt', 'content' and 'messages' is required", param="prompt")
        return self


class DetokenizeBody(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_IDS)]


class TemplateBody(PromptText):
    """A request to /apply-template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
