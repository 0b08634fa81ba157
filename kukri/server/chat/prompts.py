"""From a conversation to the token ids of its prompt, by the model's chat template."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kukri.errors import RequestError
from kukri.sampling import Grammar, ReasoningLimit
from kukri.server.chat.dialects.answer_parser import AnswerParser, parser_of
from kukri.server.chat.dialects.call_grammar import Reasoning, Spelling, reasoning_grammar
from kukri.server.chat.dialects.families import dialect_of
from kukri.server.chat.dialects.history import readable
from kukri.server.chat.request import ChatRequest
from kukri.server.chat.tools import Toolbox
from kukri.tokenizer import ChatTemplate, Tokenizer

MAX_TEMPLATE_VARIABLES = 32
# names that the template gets from elsewhere
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "tokenizer", "self"}


class ChatPrompts:
    """Renders and encodes conversations, and knows from the template how the model reasons and calls tools.

    Rendering runs on a thread of its own. Errors are RequestErrors that name `messages`,
    `chat_template_kwargs` or `thinking_token_budget`.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, max_context: int) -> None:
        self.template, self.tokenizer, self.max_context = template, tokenizer, max_context
        vocabulary = tokenizer.vocabulary
        self.dialect = dialect_of(template.source, vocabulary.id_of)
        self.spelling = Spelling(vocabulary.id_of, vocabulary.special_ids)
        self._source = template.source or ""

    async def of(self, request: ChatRequest) -> list[int]:
        """The token ids of a request's prompt."""
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
    ) -> list[int]:
        """The token ids of a conversation; `options` are those of `ChatTemplate.encode`."""
        given = {**self._effort(effort), **self._checked(variables)}
        controls = f"\ufdd1{secrets.token_hex(8)}"  # nobody can write it into a message
        told = self._readable(messages, given, tools, controls)
        return await asyncio.to_thread(
            self.template.encode, self.tokenizer, **told, controls=controls, **options, **given
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation; `options` are those of `ChatTemplate.render`."""
        given = self._checked(variables)
        told = self._readable(messages, given, tools)
        return await asyncio.to_thread(self.template.render, **told, **options, **given)

    def parser(self, prompt_ids: Sequence[int], toolbox: Toolbox | None) -> AnswerParser:
        """A parser of one answer to a prompt."""
        tools = None if toolbox is None else toolbox.signatures
        dialect = self.dialect if toolbox is None else toolbox.dialect
        return parser_of(dialect, tools, self._end_of(prompt_ids))

    def with_reasoning(self, grammar: Grammar, prompt_ids: Sequence[int], request: ChatRequest) -> Grammar:
        """The grammar of an answer to a prompt, before which a model that can may reason.

        With the effort "none", or in the middle of a message, it may not, unless the prompt has begun the
        reasoning.
        """
        before = reasoning_grammar(self.dialect, self.spelling, self._reasoning(prompt_ids, request))
        return replace(grammar, before=before)

    def _reasoning(self, prompt_ids: Sequence[int], request: ChatRequest) -> Reasoning:
        end, thoughts = self._end_of(prompt_ids), self.dialect.thoughts
        if thoughts.has_begun(end):
            return "open"
        can = self.dialect.can_reason(self._source) and not end.endswith(thoughts.closer)
        may = can and request.effort != "none" and not request.continue_final_message
        return "possible" if may else "none"

    def reasoning_limit(self, n_tokens: int | None, prompt_ids: Sequence[int]) -> ReasoningLimit | None:
        """The limit of the reasoning in the answer to a prompt. Raises RequestError if the model has none."""
        if n_tokens is None:
            return None
        thoughts, id_of = self.dialect.thoughts, self.tokenizer.vocabulary.id_of
        ids = [id_of.get(mark) for mark in (thoughts.token, thoughts.closer)]
        if ids[0] is None or ids[1] is None:
            raise RequestError(
                f"the model has no tokens {thoughts.token} and {thoughts.closer} to reason between",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        return ReasoningLimit(n_tokens, ids[0], ids[1], thoughts.has_begun(self._end_of(prompt_ids)))

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(prompt_ids[-16:]).rstrip()

    def _readable(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        controls: str = "",
    ) -> dict[str, Any]:
        """The messages and tools as the template prints all of them. Raises RequestError."""
        self.template.check(messages)  # an error names the message by its place in the request
        told = readable(
            messages, tools, self.dialect, self._source,
            reads_code=bool(variables.get("python_tools")), controls=controls,
        )  # fmt: skip
        return {"messages": told, "tools": None if self.dialect.is_generic else tools}

    def _checked(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables for the chat template: those that it reads, as the others change no prompt."""
        given = given or {}
        if len(given) > MAX_TEMPLATE_VARIABLES:
            raise RequestError(f"more than {MAX_TEMPLATE_VARIABLES} variables", param="chat_template_kwargs")
        for name in _RESERVED & given.keys():
            raise RequestError(
                f"{name!r} is not for chat_template_kwargs",
                param=f"chat_template_kwargs.{name}",
                code="unsupported_parameter",
            )
        return {name: value for name, value in given.items() if name.isidentifier() and name in self._source}

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """The template's variable for an effort to reason, if it reads any."""
        if effort is not None and "reasoning_effort" in self._source:
            return {"reasoning_effort": effort}
        if effort is not None and "enable_thinking" in self._source:
            return {"enable_thinking": effort != "none"}
        return {}
