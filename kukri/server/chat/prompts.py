"""From a conversation to the token ids of its prompt, by the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kukri.calls.image_prompts import ImagePrompts, Prompt, Read
from kukri.dialects.model_dialect import ModelDialect
from kukri.errors import RequestError
from kukri.sampling import ReasoningLimit
from kukri.server.chat.request import ChatRequest
from kukri.tokenizer import ChatTemplate, Tokenizer
from kukri.tokenizer.image_marks import ImagePart

MAX_TEMPLATE_VARIABLES = 32
# names that the template gets from elsewhere
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "tokenizer", "self"}


class ChatPrompts(ModelDialect):
    """Renders and encodes the conversations of requests.

    Rendering runs on a thread of its own. Errors are RequestErrors that name `messages`,
    `chat_template_kwargs` or `thinking_token_budget`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        max_context: int,
        images: ImagePrompts,
        read_image: Read,
        check_generates: Callable[[], None],
    ) -> None:
        """`read_image` finds the picture of a part that a client sent.

        `check_generates` raises RequestError for a model that has no answers.
        """
        super().__init__(template, tokenizer)
        self.max_context, self._images, self._read_image = max_context, images, read_image
        self._check_generates = check_generates

    @property
    def sees(self) -> bool:
        """True if the model reads images."""
        return self._images.sees

    async def of(self, request: ChatRequest) -> Prompt:
        """A request's prompt: token ids, and images among them."""
        return await self.encode(
            request.messages,
            request.template_variables,
            effort=request.effort,
            tools=request.shown_tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            max_tokens=self.max_context,
        )

    async def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Prompt:
        """The prompt of a conversation; `options` are those of `ChatTemplate.encode`."""
        self._check_generates()
        given = {**self._effort(effort), **self._checked(variables)}
        return await asyncio.to_thread(
            self._images.prompt,
            messages,
            lambda told, images: self.prompt_ids(told, given, tools, images=images, **options),
            self._read_image,
        )

    def joined(self, pieces: Sequence[list[int] | ImagePart]) -> Prompt:
        """A prompt of token ids and images in turn."""
        return self._images.joined(pieces, self._read_image)

    async def before_answer(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """The prompt after which the answer itself comes; `options` are those of `ChatTemplate.encode`."""
        self._check_generates()
        return await asyncio.to_thread(
            self._images.prompt,
            messages,
            lambda told, images: self.answer_prompt_ids(told, images=images, **options),
            self._read_image,
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation; `options` are those of `ChatTemplate.render`."""
        self._check_generates()
        given = self._checked(variables)
        told = self.readable(messages, given, tools)
        return await asyncio.to_thread(self.template.render, **told, **options, **given)

    def reasoning_limit(self, n_tokens: int | None, prompt_ids: Sequence[int]) -> ReasoningLimit | None:
        """The limit of the reasoning in the answer to a prompt; a model that does not reason keeps any.

        Raises RequestError if the model reasons between marks that are no tokens.
        """
        if n_tokens is None or not self.dialect.can_reason(self.source):
            return None
        thoughts, id_of = self.dialect.thoughts, self.tokenizer.vocabulary.id_of
        ids = [id_of.get(mark) for mark in (thoughts.token, thoughts.closer)]
        if ids[0] is None or ids[1] is None:
            raise RequestError.of(
                "thinking_token_budget",
                f"is not supported: this model has no tokens {thoughts.token} and {thoughts.closer}",
                code="unsupported_parameter",
            )
        return ReasoningLimit(n_tokens, ids[0], ids[1], thoughts.has_begun(self.end_of(prompt_ids)))

    def _checked(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables for the chat template: those that it reads, as the others change no prompt."""
        given = given or {}
        if len(given) > MAX_TEMPLATE_VARIABLES:
            raise RequestError.of("chat_template_kwargs", f"must have up to {MAX_TEMPLATE_VARIABLES} names")
        for name in _RESERVED & given.keys():
            raise RequestError(
                f"{name!r} is not supported in 'chat_template_kwargs'",
                param=f"chat_template_kwargs.{name}",
                code="unsupported_parameter",
            )
        return {name: value for name, value in given.items() if name.isidentifier() and name in self.source}

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """The template's variable for an effort to reason, if it reads any."""
        if effort is not None and "reasoning_effort" in self.source:
            return {"reasoning_effort": effort}
        if effort is not None and "enable_thinking" in self.source:
            return {"enable_thinking": effort != "none"}
        return {}
