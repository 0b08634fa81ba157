"""From a conversation to the token ids of its prompt, by the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kukri.errors import RequestError
from kukri.sampling import Grammar, ReasoningLimit
from kukri.server.chat.dialects.answer_parser import AnswerParser, parser_of
from kukri.server.chat.dialects.call_grammar import Reasoning, Spelling, reasoning_grammar
from kukri.server.chat.dialects.dialect import Dialect
from kukri.server.chat.dialects.families import dialect_of, introduction
from kukri.server.chat.request import ChatRequest
from kukri.server.chat.tools import Toolbox
from kukri.tokenizer import ChatTemplate, Tokenizer, arguments_object

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
        readable = self._readable(messages, given, tools)
        return await asyncio.to_thread(self.template.encode, self.tokenizer, **readable, **options, **given)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation; `options` are those of `ChatTemplate.render`."""
        given = self._checked(variables)
        readable = self._readable(messages, given, tools)
        return await asyncio.to_thread(self.template.render, **readable, **options, **given)

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
        can = thoughts.opener in self._source and not end.endswith(thoughts.closer)
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
    ) -> dict[str, Any]:
        """The messages and tools as the template prints all of them: results carry the tools' names.

        Calls are written into the texts if the template would leave them out, as SmolLM3's does. For a
        template that knows no tools, the system message shows them and results are the user's.
        """
        named = _with_tool_names(messages)
        dialect = self.dialect
        if dialect.is_generic:
            return {"messages": _without_tool_roles(_with_calls_in_texts(named, dialect), tools)}
        if not dialect.begins_bare and "tool_calls" not in self._source:
            dialect = replace(dialect, reads_code=bool(variables.get("python_tools")))
            named = _with_calls_in_texts(named, dialect)
        return {"messages": named, "tools": tools}

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


def _with_tool_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages; the result of a tool carries the name of its tool."""
    copies = [dict(message) for message in messages]
    names = {
        call["id"]: call["function"]["name"] for message in copies for call in message.get("tool_calls", ())
    }
    for message in copies:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return copies


def _with_calls_in_texts(messages: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
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


def _without_tool_roles(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
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
            content = f"<tool_response>\n{_text(message)}\n</tool_response>"
            message = {"role": "user", "content": content}
        if is_open and message["role"] == "user":
            plain[-1]["content"] += "\n" + _text(message)
        else:
            plain.append(message)
        is_open = is_result
    return plain


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message, its parts joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
