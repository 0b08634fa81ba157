"""One turn of a conversation: the prompt that a model answers, and the parts that its answer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kukri.calls.answer import Answer
from kukri.calls.choice import Choice
from kukri.calls.image_prompts import Prompt, ids_of
from kukri.dataclass import dataclass, replace
from kukri.dialects.answer_parser import AnswerBeginning, shown_marks
from kukri.dialects.model_dialect import ModelDialect
from kukri.dialects.toolbox import Toolbox
from kukri.sampling import Grammar


@dataclass(frozen=True)
class Turn:
    """A prompt, the tools that the answer may call, and the way in which the model writes both.

    `may_reason` is False if the answer begins without reasoning, unless the prompt has begun it.
    """

    dialect: ModelDialect
    prompt: Prompt
    toolbox: Toolbox | None = None
    may_reason: bool = True

    @cached_property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt; an image has the ids of its placeholders."""
        return ids_of(self.prompt)

    @property
    def marks(self) -> tuple[str, ...]:
        """The control tokens by which the parser finds reasoning and calls, so that the text keeps them."""
        return shown_marks(self.dialect.dialect, with_calls=self.toolbox is not None)

    def with_reasoning(self, grammar: Grammar) -> Grammar:
        """Return the grammar of the answer, before which the model may reason."""
        return self.dialect.with_reasoning(grammar, self.prompt_ids, may_reason=self.may_reason)

    def call_grammar(self, functions: Sequence[Mapping[str, Any]] | None = None) -> Grammar | None:
        """Return the grammar of an answer with calls, None if the answer is free.

        `functions` replace the toolbox's own, for schemas that a grammar cannot enforce.
        """
        assert self.toolbox is not None, "there are tools"
        toolbox = self.toolbox if functions is None else replace(self.toolbox, functions=functions)
        grammar = toolbox.grammar(self.dialect.spelling)
        # Harmony's grammar of calls has the channels before them
        return (
            grammar if grammar is None or toolbox.dialect.body == "harmony" else self.with_reasoning(grammar)
        )

    def beginning(self) -> AnswerBeginning:
        """Return a new reader of the answer's beginning, after whose reasoning stop strings count."""
        return AnswerBeginning(self.dialect.parser(self.prompt_ids, None))

    def choice(
        self,
        answer: Answer,
        on_missed: Callable[[Sequence[str]], None] | None = None,
        on_called: Callable[[], None] | None = None,
    ) -> Choice:
        """Return the parts of one answer, which are empty so far. See `Choice` for the callbacks."""
        parser = self.dialect.parser(self.prompt_ids, self.toolbox)
        return Choice(answer, parser, toolbox=self.toolbox, on_missed=on_missed, on_called=on_called)
