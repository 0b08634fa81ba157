"""`ModelDialect`: how one model reasons and calls tools, from its chat template and vocabulary."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kukri.dialects.answer_parser import AnswerParser, parser_of
from kukri.dialects.call_grammar import Reasoning, Spelling, reasoning_grammar
from kukri.dialects.families import dialect_of
from kukri.dialects.history import readable
from kukri.dialects.toolbox import Toolbox
from kukri.sampling import Grammar
from kukri.tokenizer import ChatTemplate, Tokenizer


class ModelDialect:
    """Writes conversations with tools as the model's template shows them whole, and reads its answers.

    Errors are RequestErrors that name `messages`.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        vocabulary = tokenizer.vocabulary
        self.dialect = dialect_of(template.source, vocabulary.id_of)
        self.spelling = Spelling(vocabulary.id_of, vocabulary.special_ids)
        self.source = template.source or ""

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. `options` are passed to `ChatTemplate.encode`."""
        controls = f"\ufdd1{secrets.token_hex(8)}"  # a secret, so that no message can contain it
        told = self.readable(messages, variables, tools, controls)
        return self.template.encode(self.tokenizer, **told, controls=controls, **options, **variables)

    def answer_prompt_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the prompt that the answer itself follows, because reasoning is off or closed at once."""
        off = {"enable_thinking": False} if "enable_thinking" in self.source else {}
        ids = self.prompt_ids(messages, off, None, **options)
        end, before = self.end_of(ids), ""
        if self.dialect.body == "harmony":
            before = "<|channel|>final<|message|>"
        elif self.dialect.thoughts.has_begun(end):
            before = f"\n{self.dialect.thoughts.closer}\n\n"
        return [*ids, *self.tokenizer.encode_inside(before, parse_special=True)] if before else ids

    def parser(self, prompt_ids: Sequence[int], toolbox: Toolbox | None) -> AnswerParser:
        """A parser of one answer to a prompt."""
        tools = None if toolbox is None else toolbox.signatures
        dialect = self.dialect if toolbox is None else toolbox.dialect
        return parser_of(dialect, tools, self.end_of(prompt_ids))

    def with_reasoning(
        self, grammar: Grammar, prompt_ids: Sequence[int], *, may_reason: bool = True
    ) -> Grammar:
        """Return the grammar of an answer to a prompt, after reasoning if the model can reason and may.

        Reasoning that the prompt has begun is continued in any case.
        """
        before = reasoning_grammar(self.dialect, self.spelling, self._reasoning(prompt_ids, may_reason))
        return replace(grammar, before=before)

    def _reasoning(self, prompt_ids: Sequence[int], may_reason: bool) -> Reasoning:
        end, thoughts = self.end_of(prompt_ids), self.dialect.thoughts
        if thoughts.has_begun(end):
            return "open"
        can = self.dialect.can_reason(self.source) and not end.endswith(thoughts.closer)
        return "possible" if can and may_reason else "none"

    def end_of(self, prompt_ids: Sequence[int]) -> str:
        """The end of a prompt, as text with control tokens."""
        return self.tokenizer.decode(prompt_ids[-16:]).rstrip()

    def readable(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        controls: str = "",
    ) -> dict[str, Any]:
        """The messages and tools as the template prints all of them. Raises RequestError."""
        self.template.check(messages)  # an error names the message by its place in the request
        told = readable(
            messages, tools, self.dialect, self.source,
            reads_code=bool(variables.get("python_tools")), controls=controls,
        )  # fmt: skip
        return {"messages": told, "tools": None if self.dialect.is_generic else tools}
