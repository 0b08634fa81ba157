"""A conversation in which a model calls Python functions until it answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kukri.calls.functions import FunctionTool, result_text
from kukri.calls.image_prompts import ids_of
from kukri.calls.results import Result
from kukri.dialects.answer_parser import AnswerBeginning, shown_marks
from kukri.dialects.calls import CallDelta
from kukri.dialects.model_dialect import ModelDialect
from kukri.dialects.thoughts import Thought
from kukri.dialects.toolbox import Toolbox
from kukri.errors import RequestError

if TYPE_CHECKING:
    from kukri.calls.engine_calls import Call, EngineCalls, Intervene, Message
    from kukri.sampling import SamplingParams


@dataclass(frozen=True)
class AskedCall:
    """A call that a model asks for. Both ways to run it give the text that the model reads as its result."""

    id: str
    tool: FunctionTool | str  # or why there is no such tool
    name: str
    arguments: str  # JSON

    @property
    def is_whole(self) -> bool:
        """False if the answer ended within the arguments."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True

    def run(self) -> str:
        """Calls the function; an error of it is a text for the model."""
        try:
            return result_text(self._begun())
        except Exception as error:
            return _error_text(error)

    async def run_async(self) -> str:
        """The same; a function that is not async runs in a thread."""
        try:
            if isinstance(self.tool, str) or not self.tool.is_async:
                return result_text(await asyncio.to_thread(self._begun))
            return result_text(await self._begun())
        except Exception as error:
            return _error_text(error)

    def _begun(self) -> Any:
        if isinstance(self.tool, str):
            raise LookupError(self.tool)
        bound = self.tool.bound(self.arguments)
        return self.tool.function(*bound.args, **bound.kwargs)


class ToolLoop:
    """One conversation. `next_call` asks the model, `read` finds its calls, `add_result` answers each.

    It is over when `result` is set. Errors of the arguments are RequestErrors, raised by the constructor.
    """

    def __init__(
        self,
        calls: EngineCalls,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        max_rounds: int,
        params: SamplingParams,
        *,
        adapter: str | None = None,
        intervene: Intervene | None = None,
        is_async: bool = False,
    ) -> None:
        calls.check_generates()
        if params.n_generated_answers > 1:
            raise RequestError("with tools there is one answer: leave n and best_of out", param="n")
        if params.grammar is not None:
            raise RequestError("grammar and tools both define the form of the answer", param="grammar")
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise RequestError(f"max_rounds must be at least 1, not {max_rounds!r}", param="max_rounds")
        tools = [FunctionTool.of(function) for function in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise RequestError("two tools have the same name", param="tools")
        if not is_async and any(tool.is_async for tool in tools):
            raise RequestError("an async function is a tool of AsyncLLM.chat only", param="tools")
        self._calls, self._params, self._adapter, self._intervene = calls, params, adapter, intervene
        self._dialect = ModelDialect(calls.chat_template, calls.tokenizer)
        dialect = self._dialect.dialect
        self._toolbox = Toolbox(
            dialect,
            [tool.schema for tool in tools],
            many=True,
            required=False,
            is_strict=dialect.is_generic or importlib.util.find_spec("llguidance") is not None,
        )
        ids = calls.tokenizer.vocabulary.id_of
        self._shown = frozenset(ids[m] for m in shown_marks(dialect, with_calls=True) if m in ids)
        self._messages, self._n_before = [dict(one) for one in messages], len(messages)
        self._prompt: Sequence[int] = ()
        self._n_rounds, self._max_rounds = 0, max_rounds
        self.result: Result | None = None

    def next_call(self) -> Call:
        """The call for the model's next answer."""
        dialect, toolbox = self._dialect, self._toolbox
        shown = [{"type": "function", "function": function} for function in toolbox.functions]
        prompt = self._calls.image_prompts.prompt(
            self._messages, lambda told, images: dialect.prompt_ids(told, {}, shown, images=images)
        )
        self._prompt = ids_of(prompt)
        params = self._params
        if grammar := toolbox.grammar(dialect.spelling):
            if toolbox.dialect.body != "harmony":  # whose grammar of calls has the channels before them
                grammar = dialect.with_reasoning(grammar, self._prompt)
            params = replace(params, grammar=grammar)
        return self._calls.for_ids(
            prompt,
            params,
            adapter=self._adapter,
            intervene=self._intervene,
            shown=self._shown,
            beginning=lambda: AnswerBeginning(dialect.parser(self._prompt, None)),
        )

    def read(self, result: Result) -> list[AskedCall]:
        """The calls in an answer, each of which wants a result. Without calls, the answer is the `result`.

        Raises RequestError for calls after the last round.
        """
        parser = self._dialect.parser(self._prompt, self._toolbox)
        is_stopped = isinstance(result.stop_reason, str)
        pieces = parser.push(result.text)
        pieces += parser.flush(is_cut=result.finish_reason != "stop", is_stopped=is_stopped)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts := "".join(piece.text for piece in pieces if isinstance(piece, Thought)):
            message["reasoning_content"] = thoughts
        asked = self._asked([piece for piece in pieces if isinstance(piece, CallDelta)])
        if result.finish_reason == "length" and any(not call.is_whole for call in asked):
            asked, message["content"] = [], result.text
        if asked and self._n_rounds == self._max_rounds:
            raise RequestError(
                f"the model has called tools in {self._max_rounds} rounds and calls again: "
                "max_rounds (--max-rounds) allows more",
                param="max_rounds",
            )
        if asked:
            self._n_rounds += 1
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in asked
            ]
        self._messages.append(message)
        if not asked:
            added = self._messages[self._n_before :]
            text = message["content"]
            outputs = tuple(replace(output, text=text) for output in result.outputs)
            self.result = replace(result, text=text, outputs=outputs, messages=added)
        return asked

    def add_result(self, asked: AskedCall, text: str) -> None:
        """Adds the result of a call to the conversation."""
        self._messages.append({"role": "tool", "tool_call_id": asked.id, "name": asked.name, "content": text})

    def _asked(self, pieces: Sequence[CallDelta]) -> list[AskedCall]:
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for piece in pieces:
            names[piece.place] = names.get(piece.place) or piece.name or ""
            arguments[piece.place] = arguments.get(piece.place, "") + piece.arguments
        missing = f"there is no such tool: there are {', '.join(self._tools)}"
        return [
            AskedCall(self._toolbox.new_id(), self._tools.get(name, missing), name, arguments[place])
            for place, name in names.items()
        ]


def _error_text(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"
